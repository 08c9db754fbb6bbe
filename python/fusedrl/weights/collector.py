"""Lets a collector's models follow a channel: finding, copying and tagging them."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

import torch
from tensordict.nn import CudaGraphModule
from torch import Tensor, nn
from torchrl.collectors.llm import LLMCollector as TorchrlLLMCollector
from torchrl.envs.llm.transforms.policy_version import PolicyVersion
from torchrl.modules.inference_server import InferenceServer

from fusedrl.channel import WeightHandle, WeightReader
from fusedrl.channel.follow import Follower, ModuleFollower, followers_of
from fusedrl.channel.layout import Layout
from fusedrl.channel.tensors import weights_in
from fusedrl.compat import torch as torch_names
from fusedrl.compat import torchrl
from fusedrl.vllm.policy import EngineFollower, wrappers_in

logger = logging.getLogger("fusedrl")
POLICY_STATE = "policy_state_dict"  # the policy's weights in a collector's state
VERSION_KEY = "policy_version"


def is_policy(model_id: Any) -> bool:
    """Whether an id names a collector's policy, or a part of it."""
    return model_id.split(".")[0] == "policy"


def find_model(collector: Any, model_id: Any) -> Any:
    """A collector's model by its attribute path; ``ValueError`` if this process has none."""
    try:
        return collector.get_model(model_id)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"weight_sync_schemes: expected {model_id!r} to name a model in this process, got "
            f"{error}; call scheme.init_on_sender(model_id=..., model=...) before"
        ) from error


def module_of(model: Any) -> nn.Module:
    """A model if it is a module, or its ``module``; ``TypeError`` if neither is one."""
    module = model if isinstance(model, nn.Module) else getattr(model, "module", None)
    if isinstance(module, nn.Module):
        return module
    raise TypeError(
        f"model: expected a module, or an object with a .module, got {type(model).__name__}; pass "
        "a module, or name the module in it, such as 'policy.actor', in weight_sync_schemes="
    )


class ChannelVersionTracker:
    """A torchrl version tracker whose version is the newest that a channel has published.

    The transforms that tag frames have the version of the current batch, which no update changes.
    """

    version_type = "a channel's"  # torchrl must not count them

    def __init__(self, reader: WeightReader) -> None:
        self._reader = reader

    @property
    def version(self) -> int:
        """The newest published version."""
        return self._reader.version or 0

    @version.setter
    def version(self, loaded: Any) -> None:
        logger.warning(
            "load_state_dict: expected weights through the channel, got those of version %s; "
            "publish the weights of the next batch with update_policy_weights_()",
            loaded,
        )

    def increment_version(self) -> None:
        """Do nothing: an update is counted when it is published."""


def check_counts(tracker: Any) -> None:
    """Raise ``ValueError`` unless a tracker's versions are integers."""
    if tracker.version_type not in (int, "int"):
        raise ValueError(
            "track_policy_version: expected True or PolicyVersion(version_type='int'), got "
            f"version_type={tracker.version_type!r}; a channel's versions are integers"
        )


def trackers_of(collector: Any) -> list[Any]:
    """A collector's version tracker, if any, and torchrl's copies of it, which tag frames too."""
    tracker = collector.policy_version_tracker  # copied where other transforms are appended
    transform: Any = getattr(collector.env, "transform", None)
    parts = getattr(transform, "transforms", [transform])
    copies = [part for part in parts if isinstance(part, PolicyVersion)]
    return [] if tracker is None else [tracker, *(part for part in copies if part is not tracker)]


def one_version_a_batch(
    collector: Any, follower: Follower, is_policy: bool
) -> Callable[[bool], None]:
    """Make a collector and its environment compute each batch with one version of a model.

    If the model is the policy or a part of it, frames are tagged with its versions. The collectors
    of dialogs in fusedrl, which have a method ``follow``, do both for each turn. The returned
    function undoes this; its argument is whether the policy keeps its last version. Otherwise it
    gets the trainer's weights, under a number that no published version has.
    """
    if is_policy and hasattr(collector, "follow"):
        return collector.follow(follower)
    if is_policy and isinstance(collector, TorchrlLLMCollector):
        raise TypeError(
            "collector: expected fusedrl.LLMCollector for dialogs with weights from a channel, "
            "got torchrl's LLMCollector; use fusedrl's, with the same arguments"
        )
    trackers, changed = trackers_of(collector) if is_policy else [], {}
    if trackers:
        check_counts(trackers[0])
        changed["policy_version_tracker"] = ChannelVersionTracker(follower.reader)
    owner = weakref.ref(collector)  # a scheme must not keep its collector alive
    wrapped = vars(collector).get("rollout")  # by another follower

    def rollout(*args: Any, **kwargs: Any) -> Any:
        existing: Any = owner()
        with follower.call() as version:
            for tracker in trackers:
                tracker.version = version or 0
            # The first frame starts with the tag of the last step of the previous batch.
            carried = torchrl.carried_by(existing) if trackers else None
            if carried is not None and VERSION_KEY in carried:
                carried.set(VERSION_KEY, torch.full_like(carried.get(VERSION_KEY), version or 0))
            run = wrapped or partial(type(existing).rollout, existing)
            return run(*args, **kwargs)

    restore = replaced(collector, rollout=rollout, **changed)

    def leave(keeps: bool = True) -> None:
        restore()
        for tracker in () if keeps else trackers:
            tracker.version = (follower.reader.version or 0) + 1

    return leave


def replaced(owner: Any, **values: Any) -> Callable[[], None]:
    """Set attributes; returns a function that restores them if the owner still exists."""
    reference, kind = weakref.ref(owner), type(owner)
    # Methods are deleted, which restores the class's: a bound method would keep its owner.
    methods = {n for n in values if n not in vars(owner) and callable(getattr(kind, n, None))}
    before = {name: getattr(owner, name) for name in values if name not in methods}
    for name, value in values.items():
        setattr(owner, name, value)

    def restore() -> None:
        if (existing := reference()) is not None:
            for name, value in before.items():
                setattr(existing, name, value)
            for name in methods:
                delattr(existing, name)

    return restore


def with_own_copy(collector: Any, model_id: Any) -> Callable[[], None]:
    """Give a collector in the trainer's process a copy of its policy; returns the undo."""
    policy = module_of(collector.policy)
    if not is_policy(model_id) or followers_of(policy):
        raise ValueError(
            "weight_sync_schemes: expected one for the policy alone in the trainer's process, got "
            f"{model_id!r}; use 'policy' for all of it, and another process for other models"
        )
    names = ("policy", torchrl.UNCOMPILED_POLICY)
    try:
        if any(getattr(part, torch_names.COMPILED_CALL) is not None for part in policy.modules()):
            raise TypeError("one whose compile() was called; pass compile_policy= instead")
        copies = copy.deepcopy({name: getattr(collector, name) for name in names})
    except (TypeError, RuntimeError) as error:
        raise TypeError(
            "policy: expected one that copy.deepcopy can copy, since a copy computes with the "
            f"channel's weights, got {error}; remove that, or collect in another process"
        ) from error
    return replaced(collector, **copies, **{torchrl.COMPILED_POLICY: None})


def follow_policy(
    channel: WeightHandle | WeightReader, policy: Any, mode: Literal["alias", "copy"]
) -> tuple[Follower, Callable[[], None]]:
    """Make a policy follow a channel; returns the follower, and a function that ends it.

    A handle is opened and closed here. The channel may have the weights of the policy's ``model``,
    which may be a vLLM engine. With ``"alias"`` a version is held until the next one is loaded.
    """
    with ExitStack() as stack:
        handle = channel if isinstance(channel, WeightHandle) else None
        reader: Any = stack.enter_context(handle.open()) if handle else channel
        reader.require_open()
        if wrappers_in(policy):
            if handle is None:
                raise TypeError(
                    "channel: expected a WeightHandle for a vLLM engine, which opens it itself, "
                    "got a WeightReader; pass channel.handle"
                )
            follower: Follower = EngineFollower(handle, reader, policy)
        else:
            names, inner = {*reader.layout.view_of}, getattr(policy, "model", None)
            if isinstance(inner, nn.Module) and names <= {w.name for w in weights_in(inner)}:
                policy = inner
            follower = ModuleFollower(reader, module_of(policy), mode, between_calls=True)
        stack.callback(follower.close)
        return follower, stack.pop_all().close


def fitting_mode(
    module: nn.Module, reader: WeightReader, collector: Any
) -> Literal["alias", "copy"]:
    """``"alias"`` if dtypes and devices fit and the collector does not compile or write weights."""
    dtypes = {entry.name: entry.dtype for entry in reader.layout.entries}
    fits = all(
        (weight.tensor.dtype, weight.tensor.device) == (dtypes[weight.name], reader.device)
        for weight in weights_in(module)
        if weight.kind == "parameter" and weight.name in dtypes
    )
    flags = (getattr(collector, f"{how}_policy", False) for how in ("compiled", "cudagraphed"))
    is_graph = isinstance(getattr(collector, "policy", None), CudaGraphModule)
    in_place = any(flags) or is_graph or isinstance(collector, InferenceServer)
    return "alias" if fits and not in_place else "copy"


def materialise(
    module: nn.Module, layout: Layout, buffers: Mapping[str, Tensor], device: torch.device
) -> None:
    """Allocate memory for a module's tensors on meta, and tie those that the layout ties.

    torchrl sends policies to workers on meta, with their weights untied. ``buffers`` has the values
    of buffers that the layout lacks; other values are arbitrary.
    """
    made: dict[int, Tensor] = {}
    for weight in weights_in(module):
        if not weight.tensor.is_meta or weight.home is None:
            continue
        if weight.name in buffers:
            weight.home[weight.key] = buffers[weight.name].to(device, copy=True)
        elif (view := layout.view_of.get(weight.name)) is not None:
            if view not in made:
                memory = torch.empty_like(weight.tensor, device=device, requires_grad=False)
                is_parameter = weight.kind == "parameter"
                made[view] = nn.Parameter(memory, False) if is_parameter else memory
            weight.home[weight.key] = made[view]
