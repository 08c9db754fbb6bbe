"""Makes a torchrl collector follow a channel, with a change of version only between batches."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, NoReturn

import torch
from tensordict.nn import CudaGraphModule
from torch import nn
from torchrl.collectors.llm import LLMCollector as TorchrlLLMCollector
from torchrl.envs.llm.transforms.policy_version import PolicyVersion

from fusedrl.channel import WeightHandle, WeightReader
from fusedrl.channel.follow import Follower, ModuleFollower
from fusedrl.channel.tensors import weights_in
from fusedrl.compat import torchrl
from fusedrl.vllm.policy import EngineFollower, wrappers_in

VERSION_KEY = "policy_version"


class LeasedVersion:
    """The version tracker of a torchrl collector whose versions come with its weights.

    It has the newest published version, which the next batch computes with. The transform that tags
    frames has that of the current batch, which no update changes.

    Args:
        transform: the collector's ``PolicyVersion``, which has integers.
        follower: the follower of the collector's policy.
    """

    def __init__(self, transform: Any, follower: Follower) -> None:
        self.version_type = transform.version_type
        self._follower = follower

    @property
    def version(self) -> int:
        """The newest published version."""
        return self._follower.reader.version or 0

    @version.setter
    def version(self, _: Any) -> None:
        """Ignored: the version comes with the weights."""

    def increment_version(self) -> None:
        """Do nothing: an update is counted when it is published."""


def number_own(tracker: Any, follower: Follower) -> None:
    """Number the weights that a policy gets back from its trainer, after all that are published."""
    tracker.version = (follower.reader.version or 0) + 1


def trackers_of(collector: Any) -> list[Any]:
    """The tracker of a collector's versions and all that tag its frames; none without versions.

    torchrl copies it where it appends other transforms, such as for ``max_frames_per_traj``.
    """
    tracker = collector.policy_version_tracker
    transform: Any = getattr(collector.env, "transform", None)
    parts = getattr(transform, "transforms", [transform])
    copies = [part for part in parts if isinstance(part, PolicyVersion)]
    return [] if tracker is None else [tracker, *(part for part in copies if part is not tracker)]


class Attachment:
    """A follower of one of a collector's models, which takes the newest version for each batch.

    It stands around the collector's ``rollout``, in which the policy and the transforms of the
    environment compute with one version. Our collectors of dialogs give each turn a version of the
    policy by themselves.

    Args:
        collector: torchrl's ``Collector``, which may have a ``policy_version_tracker``; or a
            collector with a method ``hold_turns``.
        follower: the follower of the model.
        is_policy: whether the model is the collector's policy or a part of it, whose versions tag
            the frames.

    Raises:
        TypeError: the collector is torchrl's of dialogs.
        ValueError: the collector tags frames with UUIDs, or with the versions of another follower.
    """

    def __init__(self, collector: Any, follower: Follower, is_policy: bool) -> None:
        self._collector = weakref.ref(collector)
        self._follower = follower
        self._leave: Callable[[bool], None] | None = None
        self._trackers: list[Any] = []  # the transforms that tag frames
        with ExitStack() as undo:
            if is_policy and hasattr(collector, "hold_turns"):
                self._leave = collector.hold_turns(follower)
            else:
                if is_policy:
                    self._number(collector, undo)
                inner = vars(collector).get("rollout")  # that of another follower
                if inner is None:
                    inner = partial(call_if_alive, weakref.WeakMethod(collector.rollout))
                undo.callback(patch_attribute(collector, "rollout", partial(self._batch, inner)))
            self._undo = undo.pop_all()

    def _number(self, collector: Any, undo: ExitStack) -> None:
        """Let the channel number the collector's frames."""
        if isinstance(collector, TorchrlLLMCollector):
            raise TypeError(
                "collector: expected fusedrl.LLMCollector for dialogs with weights from a channel, "
                "got torchrl's; make ours, which takes the same arguments"
            )
        tracker = collector.policy_version_tracker
        if isinstance(tracker, LeasedVersion):
            refuse_another_channel()
        if tracker is not None:
            check_counts(tracker)
            self._trackers = trackers_of(collector)
            leased = LeasedVersion(tracker, self._follower)
            undo.callback(patch_attribute(collector, "policy_version_tracker", leased))

    def _batch(self, rollout: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A rollout of the collector, which computes with the newest version."""
        with self._follower.call():
            version = self._follower.version or 0
            for tracker in self._trackers:
                tracker.version = version
            # The first frame begins with the tag of the step before, in the batch before.
            carried: Any = torchrl.carried_by(self._collector()) if self._trackers else None
            if carried is not None and VERSION_KEY in carried:
                carried.set(VERSION_KEY, torch.full_like(carried.get(VERSION_KEY), version))
            return rollout(*args, **kwargs)

    def remove(self, keeps: bool = True) -> None:
        """Restore the collector.

        Args:
            keeps: whether the policy keeps the version that it had last. Otherwise it gets back the
                trainer's own weights, under a number that no published ones have.
        """
        self._undo.close()
        if self._leave is not None:
            self._leave(keeps)
        for tracker in () if keeps else self._trackers:
            number_own(tracker, self._follower)


def call_if_alive(method: weakref.WeakMethod[Any], *args: Any, **kwargs: Any) -> Any:
    """Call a method without keeping its object alive."""
    bound: Any = method()
    return None if bound is None else bound(*args, **kwargs)


def follow_channel(
    channel: WeightHandle | WeightReader, policy: Any, mode: Literal["alias", "copy"]
) -> tuple[Follower, Callable[[], None]]:
    """Let a policy follow a channel.

    Args:
        channel: a handle, which is opened and closed here, or a reader.
        policy: the module whose weights the channel has, or an object with such a module, or with
            a vLLM engine, as its ``model``.
        mode: ``"alias"`` or ``"copy"``; in alias mode a version is held until the next one is
            loaded, so that nothing of it changes between two calls. An engine has a copy.

    Returns:
        The follower, and a function that ends the following.

    Raises:
        ValueError: neither the policy nor its model has the names of the channel.
        TypeError: the policy has an engine, and ``channel`` is a reader.
        RuntimeError: the reader is closed.
    """
    with ExitStack() as stack:
        reader = (
            stack.enter_context(channel.open()) if isinstance(channel, WeightHandle) else channel
        )
        check_open(reader)
        if wrappers_in(policy):
            if not isinstance(channel, WeightHandle):
                raise TypeError(
                    "channel: expected a WeightHandle for a policy with a vLLM engine, which opens "
                    f"it in a process of its own, got {type(channel).__name__}; pass channel.handle"
                )
            follower: Follower = EngineFollower(channel, reader, policy)
        else:
            module = _module_with(policy, reader)
            # Not reader.follow(): a follower that somebody else has is not closed here.
            follower = ModuleFollower(reader, module, mode, keeps=True)
        stack.callback(follower.close)
        return follower, stack.pop_all().close


def check_open(reader: WeightReader) -> None:
    """Raise ``RuntimeError`` if a reader is closed, which others may have done."""
    try:
        reader.require_open()
    except RuntimeError as error:
        raise RuntimeError(
            "channel: expected a reader that stays open until the collector is shut down, got: "
            f"{error}; shut down the collector before you close the reader"
        ) from error


def _module_with(policy: Any, reader: WeightReader) -> nn.Module:
    names = {entry.name for entry in reader.layout.entries}
    for module in (getattr(policy, "model", None), policy):
        if isinstance(module, nn.Module) and names <= {s.name for s in weights_in(module)}:
            return module
    raise ValueError(
        f"channel: expected weights of {type(policy).__name__} or of its model, got "
        f"{min(names)}, ...; create the channel from the model that the policy wraps"
    )


def refuse_another_channel() -> NoReturn:
    """Raise ``ValueError``, because two channels number parts of one policy."""
    raise ValueError(
        "weight_sync_schemes: expected one for the policy, got another for a part of it, and a "
        "turn has one version; use one for 'policy', which is all of it"
    )


def refuse_another_policy() -> NoReturn:
    """Raise ``RuntimeError``, because the policy is not the one whose weights the channel has."""
    raise RuntimeError(
        "policy: expected the one whose weights come through a channel, got another, which the "
        "channel's versions are not of; publish its weights instead, or make another collector"
    )


def check_counts(tracker: Any) -> None:
    """Raise ``ValueError`` unless a tracker's versions are integers."""
    if tracker.version_type not in (int, "int"):
        raise ValueError(
            "track_policy_version: expected True or PolicyVersion(version_type='int'), got "
            f"version_type={tracker.version_type!r}; versions are integers"
        )


def patch_attribute(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute, and return a function that undoes it if the owner still exists."""
    # A value that the class has for all instances, unless it is a property.
    shared = getattr(type(owner), name, owner)
    of_class = name not in vars(owner) and shared is not owner and not isinstance(shared, property)
    before, reference = None if of_class else getattr(owner, name), weakref.ref(owner)
    setattr(owner, name, value)

    def put_back() -> None:
        existing = reference()
        if existing is not None and of_class:
            delattr(existing, name)
        elif existing is not None:
            setattr(existing, name, before)

    return put_back


def is_compiled(collector: Any) -> bool:
    """Whether the collector compiles its policy, or captures it as a CUDA graph."""
    return bool(
        getattr(collector, "compiled_policy", False)
        or getattr(collector, "cudagraphed_policy", False)
        or isinstance(getattr(collector, "policy", None), CudaGraphModule)
    )


def module_of(model: Any) -> nn.Module:
    """The module that a model is, or has as its ``module``.

    Raises:
        TypeError: neither.
    """
    module = model if isinstance(model, nn.Module) else getattr(model, "module", None)
    if isinstance(module, nn.Module):
        return module
    raise TypeError(
        f"model: expected a module, or what has one as .module, got {type(model).__name__}; name "
        "the module in it, such as 'policy.actor', in weight_sync_schemes="
    )
