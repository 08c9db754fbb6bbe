"""Lets the policies in a multi-process collector's workers follow weight channels."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import CudaGraphModule
from torch import nn
from torch.utils.hooks import RemovableHandle

from fusedrl import _host
from fusedrl.channel import WeightChannel, WeightHandle, WeightReader
from fusedrl.channel.following import Follower
from fusedrl.channel.forking import renew_in_children
from fusedrl.weights import pipes

log = logging.getLogger(__name__)
_not_compiled: Any = torch.compiler.disable  # its types hide methods


class _Calls:
    """Hooks around a module's calls, each of which computes with the newest version.

    If they are pickled with the module, or forked, they open the channel in the process that calls
    the module. Before the first version is published, the module computes with its own weights.

    Args:
        handles: the handle of the channel for modules on each device.
        shared: whether the module arrives in memory that other processes use too.
    """

    def __init__(self, handles: Mapping[torch.device, WeightHandle], shared: bool) -> None:
        self.handles = dict(handles)
        self.shared = shared
        self._reader: WeightReader | None = None
        self._follower: Follower | None = None
        self._entered = threading.local()
        self._lock = threading.Lock()
        renew_in_children(self, _lock=threading.Lock)

    def __reduce__(self) -> Any:
        return _Calls, (self.handles, self.shared)

    def attach(self, module: nn.Module) -> list[RemovableHandle]:
        """Add the hooks to ``module``; removing them ends this."""
        return [
            module.register_forward_pre_hook(self._before, prepend=True),
            module.register_forward_hook(self._after, always_call=True),
        ]

    @_not_compiled
    def _before(self, module: nn.Module, args: Any) -> None:
        calls = self._entered.__dict__.setdefault("calls", [])
        calls.append(None)  # _after is also called if this hook fails
        with self._lock:
            follower = self._follower or self._open(module)
        if follower is not None:
            calls[-1] = _host.Entered(follower)

    @_not_compiled
    def _after(self, *_: Any) -> None:
        self._entered.calls.pop()  # which ends the call

    def _open(self, module: nn.Module) -> Follower | None:
        if self._reader is None:
            device = next(iter(module.state_dict().values())).device
            any_device = next(iter(self.handles.values()))
            self._reader = self.handles.get(device, any_device).open()
        if self._reader.version is None:
            return None
        if self.shared:
            for buffer in module.buffers():  # loading a version writes them, and a call may, too
                buffer.data = buffer.data.clone()
        try:
            self._follower = Follower(self._reader, module)
        except ValueError as error:
            self._follower = Follower(self._reader, module, "copy")
            log.warning("weights are copied for every version: %s", error)
        return self._follower


class _Followed:
    """A policy factory whose policies follow a channel."""

    def __init__(self, factory: Callable[[], Any], handle: WeightHandle) -> None:
        self.factory = factory
        self.handle = handle

    def __call__(self) -> nn.Module:
        policy = self.factory()
        if not isinstance(policy, nn.Module):
            raise TypeError(
                f"policy_factory: expected one that makes a module, got {type(policy).__name__}; "
                "leave policies without weights out of policy_weights"
            )
        _Calls({torch.device("cpu"): self.handle}, shared=False).attach(policy)
        return policy


@contextmanager
def following(
    collector: Any, policy_weights: Mapping[Any, TensorDictBase], slots: int
) -> Iterator[dict[Any, WeightChannel]]:
    """Let the policies of processes that a collector starts in this block follow channels.

    Yields:
        A channel for each key of ``policy_weights``, or none if the policies cannot follow one.

    Raises:
        ValueError: the weights have other names, shapes or dtypes than the policy's.
    """
    reason = _why_not(collector)
    if reason:
        log.warning("%s: workers may compute with half an update", reason)
        yield {}
    elif collector.policy is None:
        with _factories_followed(collector, policy_weights, slots) as channels:
            yield channels
    else:
        with _policy_followed(collector, policy_weights, slots) as channels:
            yield channels


def _why_not(collector: Any) -> str | None:
    if collector.cudagraphed_policy or isinstance(collector.policy, CudaGraphModule):
        return "weights of CUDA graphs are written in place, since a graph keeps its addresses"
    return None


@contextmanager
def _factories_followed(
    collector: Any, policy_weights: Mapping[Any, TensorDictBase], slots: int
) -> Iterator[dict[Any, WeightChannel]]:
    factories = collector.policy_factory
    collector.policy_factory = list(factories)
    channels = {}
    for worker, weights in policy_weights.items():
        channels[worker] = channel = WeightChannel.create(weights, slots=slots)
        for index in pipes.worker_indices(collector, worker):
            collector.policy_factory[index] = _Followed(factories[index], channel.handle)
    try:
        yield channels
    finally:
        collector.policy_factory = factories


@contextmanager
def _policy_followed(
    collector: Any, policy_weights: Mapping[Any, TensorDictBase], slots: int
) -> Iterator[dict[Any, WeightChannel]]:
    policy, channels, by_device = collector.policy, {}, {}
    for worker, weights in policy_weights.items():
        if weights.is_empty():  # the policy has no weights
            continue
        for index in pipes.worker_indices(collector, worker):
            device = collector.policy_device[index] or next(iter(policy.parameters())).device
            if device not in by_device:
                by_device[device] = channel = WeightChannel.create(weights, slots=slots)
                channel.layout.matched(policy)
                # Otherwise workers would start with shared memory that updates write in place.
                channel.publish(weights)
            channels[worker] = by_device[device]
    if not by_device:
        yield channels
        return
    handles = {device: channel.handle for device, channel in by_device.items()}
    hooks = _Calls(handles, shared=True).attach(policy)
    try:
        yield channels
    finally:
        for hook in hooks:
            hook.remove()
