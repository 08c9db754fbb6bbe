"""What makes a torchrl collector follow a channel: the version changes where its turns begin."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, NoReturn

import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.collectors.llm import LLMCollector

from fusedrl.channel import WeightHandle, WeightReader
from fusedrl.channel.following import Follower, Following
from fusedrl.channel.sources import module_places
from fusedrl.vllm.engine_follower import EngineFollower
from fusedrl.vllm.policy import wrappers_in

VERSION_KEY = "policy_version"


class LeasedVersion:
    """What a collector has as its version tracker: versions come with the weights.

    The transform that tags frames gets the version of each policy call. Neither an update that
    comes between that call and ``env.step`` nor a count of updates changes it.

    Args:
        transform: the collector's ``PolicyVersion``, of integers.
        follower: of the collector's policy.
    """

    def __init__(self, transform: Any, follower: Following) -> None:
        self.transform = transform
        self._follower = follower

    @property
    def version_type(self) -> Any:
        """That of the transform."""
        return self.transform.version_type

    @property
    def version(self) -> int:
        """The newest published version, which the next policy call computes with."""
        return self._follower.reader.version or 0

    @version.setter
    def version(self, _: Any) -> None:
        """Ignored: the version comes with the weights."""

    def increment_version(self) -> None:
        """An update is counted when it is published."""


class Unnumbered:
    """Weights that are in no version: those of a trainer's own model, whose scheme is shut down.

    Args:
        tracker: of the versions. It has the number of other weights, until it is given another.
    """

    def __init__(self, tracker: Any) -> None:
        self._tracker = tracker
        self._last = tracker.version

    def check(self) -> None:
        """Raise ``RuntimeError`` unless somebody has counted a version since."""
        if self._tracker.version == self._last:
            raise RuntimeError(
                f"policy_version: expected weights with a number, got those of the trainer, since "
                f"the scheme that published up to version {self._last} is shut down; make another "
                "collector, or count a version for each change, with increment_version()"
            )


class FollowedCall(partial):
    """How a followed policy is called; copies of the module are called as any."""

    def __getattr__(self, name: str) -> Any:
        """Of the policy."""
        return getattr(self.args[0], name)

    def __reduce__(self) -> Any:
        """Of a copy."""
        return type(None), ()


class Attachment:
    """A follower of one of a collector's models, attached to the calls of the model.

    A turn of a policy begins with its call and lasts until the next one, or the end of the rollout:
    what the environment's transforms compute with its weights has the version of the call, too.
    Other models switch versions at each call.

    Args:
        collector: torchrl's ``Collector``, which may compile its policy and have a
            ``policy_version_tracker``; or one that holds its turns itself, by ``hold_turns``.
        follower: of the model.
        is_policy: the model is the collector's policy, or in it: its versions tag the frames.

    Raises:
        ValueError: the collector tags frames with UUIDs, or with the versions of another follower.
    """

    def __init__(self, collector: Any, follower: Following, is_policy: bool) -> None:
        self._undo: list[Callable[[], Any]] = []
        self._leave: Callable[[bool], None] | None = None
        self._collector = weakref.ref(collector)
        self._follower = follower
        self._transform: Any = None
        self._rollouts: tuple[str, ...] = ()
        self._of_dialogs = isinstance(collector, LLMCollector)  # which calls its attribute `policy`
        self._rollout = threading.local()  # the turn of a rollout, in the thread that runs it
        if is_policy and hasattr(collector, "hold_turns"):
            self._leave = collector.hold_turns(follower)
        elif is_policy:
            self._attach_turns(collector)
        if not (is_policy and is_compiled(collector)):
            # A module calls this, if it has it, in the place of its forward and hooks. Hooks would
            # not run after KeyboardInterrupt, nor where the module is compiled already.
            module = follower.module
            call = module._compiled_call_impl or module._call_impl
            self._undo.append(
                patch_attribute(module, "_compiled_call_impl", FollowedCall(self._in_call, call))
            )

    def _attach_turns(self, collector: Any) -> None:
        tracker = collector.policy_version_tracker
        if tracker is not None:
            self._track(collector, tracker)
        if self._of_dialogs:
            name, call = "policy", collector.policy
            self._rollouts = ("_rollout_all", "_rollout_yield_trajs")
        else:
            name, call = "_wrapped_policy_maybe_compiled", collector._wrapped_policy
            self._rollouts = ("rollout",)
        self._undo.append(patch_attribute(collector, name, FollowedCall(self._in_turn, call)))
        for rollout in self._rollouts:
            if isinstance(vars(collector).get(rollout), _NumberedRollout):
                delattr(collector, rollout)  # this one numbers the weights again
            # Of another follower, or the collector's own, which must not keep the collector alive.
            inner = vars(collector).get(rollout) or partial(_call, self._collector, rollout)
            whole_turns = partial(self._whole_turns, inner)
            self._undo.append(patch_attribute(collector, rollout, whole_turns))

    def _track(self, collector: Any, tracker: Any) -> None:
        if isinstance(tracker, LeasedVersion):
            refuse_another_channel()
        check_counts(tracker)
        self._transform = tracker
        if self._follower.version is not None:
            tracker.version = self._follower.version
        leased = LeasedVersion(tracker, self._follower)
        self._undo.append(patch_attribute(collector, "policy_version_tracker", leased))

    def _whole_turns(self, rollout: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A rollout of the collector."""
        self._tag()  # a frame of random actions has no call
        self._rollout.called = False
        with ExitStack() as self._rollout.turn:
            try:
                made = rollout(*args, **kwargs)
            finally:
                del self._rollout.turn
        if not self._rollout.called:
            policy = vars(self._collector()).get("policy")
            if self._of_dialogs and not isinstance(policy, FollowedCall):
                refuse_another_policy()
        return made

    def _in_turn(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The collector's call of its policy, with which a turn begins."""
        self._rollout.called = True
        turn: ExitStack | None = getattr(self._rollout, "turn", None)
        if turn is None:
            return self._in_call(partial(self._tagged, call), *args, **kwargs)
        turn.close()  # the turn before
        turn.enter_context(self._follower)
        return self._tagged(call, *args, **kwargs)

    def _in_call(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._follower:
            return call(*args, **kwargs)

    def _tagged(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._transform is not None:
            self._transform.version = self._follower.version or 0
            self._tag(*args, *kwargs.values())
        return call(*args, **kwargs)

    def _tag(self, *given: Any) -> None:
        """Give the frame that begins the version that the transform gives to its ``"next"``.

        Otherwise its own tag were that of the step before, or of the reset.
        """
        for data in (*given, getattr(self._collector(), "_carrier", None)):
            if self._transform is not None and isinstance(data, TensorDictBase):
                tag = data.get(VERSION_KEY, None)
                if isinstance(tag, torch.Tensor):
                    data.set(VERSION_KEY, torch.full_like(tag, self._transform.version))

    def remove(self, keeps: bool = True) -> None:
        """Leave the collector as it was.

        Args:
            keeps: its policy has the version that it had last. Otherwise the collector refuses to
                tag frames, until somebody counts a version of the weights that it has instead.
        """
        while self._undo:
            self._undo.pop()()
        if self._leave is not None:
            self._leave(keeps)
        collector = self._collector()
        if keeps or collector is None or self._transform is None:
            return
        unnumbered = Unnumbered(self._transform)
        for rollout in self._rollouts:
            checked = _NumberedRollout(_call_checked, unnumbered, self._collector, rollout)
            setattr(collector, rollout, checked)


class _NumberedRollout(partial):
    """A rollout of a collector whose weights have a number; otherwise it is refused."""


def _call_checked(
    unnumbered: Unnumbered, collector: weakref.ref[Any], method: str, *args: Any, **kwargs: Any
) -> Any:
    unnumbered.check()
    return _call(collector, method, *args, **kwargs)


def _call(collector: weakref.ref[Any], method: str, *args: Any, **kwargs: Any) -> Any:
    """Call what an object's class has under a name."""
    existing = collector()
    return getattr(type(existing), method)(existing, *args, **kwargs)


def follow_channel(
    channel: WeightHandle | WeightReader, policy: Any, mode: Literal["alias", "copy"]
) -> tuple[Following, Callable[[], None]]:
    """What gives a policy the newest version of a channel, and what ends that.

    Args:
        channel: a handle, which is opened and closed here, or a reader.
        policy: the module that the channel has the weights of, or what has one, or a vLLM engine,
            as its ``model``.
        mode: ``"alias"`` or ``"copy"``; in alias mode a version is held until the next one is
            loaded, so that nothing of it changes between two calls. An engine has a copy.

    Raises:
        ValueError: neither has the names of the channel.
        TypeError: an engine, and a reader.
        RuntimeError: the reader is closed.
    """
    with ExitStack() as stack:
        reader = (
            stack.enter_context(channel.open()) if isinstance(channel, WeightHandle) else channel
        )
        check_open(reader)
        if wrappers_in(policy):
            follower: Following = EngineFollower(_handle(channel), reader, policy)
        else:
            module = _module_with(policy, reader)
            follower = Follower(reader, module, mode, keeps=True)
        stack.callback(follower.close)
        return follower, stack.pop_all().close


def _handle(channel: WeightHandle | WeightReader) -> WeightHandle:
    if isinstance(channel, WeightHandle):
        return channel
    raise TypeError(
        "channel: expected a WeightHandle for a policy with a vLLM engine, which opens it in a "
        f"process of its own, got {type(channel).__name__}; pass channel.handle"
    )


def check_open(reader: WeightReader) -> None:
    """Raise ``RuntimeError`` unless a reader, which others may close, can be used."""
    try:
        reader._end.require_open()
    except RuntimeError as error:
        raise RuntimeError(
            "channel: expected a reader that stays open until the collector is shut down, got: "
            f"{error}; pass channel.handle, and let the collector open it"
        ) from error


def _module_with(policy: Any, reader: WeightReader) -> nn.Module:
    names = {entry.name for entry in reader.layout.entries}
    for module in (getattr(policy, "model", None), policy):
        if isinstance(module, nn.Module) and names <= {s.name for s in module_places(module)}:
            return module
    raise ValueError(
        f"channel: expected weights of {type(policy).__name__} or of its model, got "
        f"{min(names)}, ...; create the channel from the model that the policy wraps"
    )


def refuse_another_channel() -> NoReturn:
    """Raise ``ValueError``: something else numbers the weights of a part of the policy."""
    raise ValueError(
        "weight_sync_schemes: expected one for the policy, got another for a part of it, and a "
        "turn has one version; use one for 'policy', which is all of it"
    )


def refuse_another_policy() -> NoReturn:
    """Raise ``RuntimeError``: the channel has the weights of the policy that there was."""
    raise RuntimeError(
        "policy: expected the one whose weights come through a channel, got another, which the "
        "channel's versions are not of; publish its weights instead, or make another collector"
    )


def check_counts(tracker: Any) -> None:
    """Raise ``ValueError`` unless a tracker's versions are integers."""
    if tracker.version_type not in (int, "int"):
        raise ValueError(
            "track_policy_version: expected True or PolicyVersion(version_type='int'), got "
            f"version_type={tracker.version_type!r}; a channel numbers its versions"
        )


def patch_attribute(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute; the function that is returned undoes it, while the owner exists."""
    shared = getattr(type(owner), name, owner)  # of all its instances, but a property
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
