"""Lets modules compute with the versions of a channel: what is loaded, and the calls of one."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from fusedrl._host import Held
from fusedrl.channel.adapters import has_adapters
from fusedrl.channel.layout import Layout, refuse_differences
from fusedrl.channel.tensors import (
    Weight,
    check_supported,
    described,
    facts,
    has_memory,
    is_dtensor,
    same_values,
    weights_in,
    weights_of,
)
from fusedrl.compat.torch import copy_all

logger = logging.getLogger("fusedrl")
# The channels of this process, by session, each with the template that it publishes.
PUBLISHED: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
FOLLOWERS: weakref.WeakSet[ModuleFollower] = weakref.WeakSet()
for known in (PUBLISHED, FOLLOWERS):  # a child has memory of its own, and locks nobody may unlock
    os.register_at_fork(after_in_child=known.clear)
# The storages that `alias` gave to modules, which nothing may write to.
_LENT: set[weakref.ref[torch.UntypedStorage]] = set()


class Target:
    """A module that the weights of a layout are loaded into, version after version.

    It may be within DistributedDataParallel or ``torch.compile``, and its parameters, buffers and
    submodules may be replaced. Names that the layout ties may be separate tensors. Views, one for
    each stored entry, are those that :meth:`Layout.views` makes.

    Raises:
        TypeError: an entry of the module is not a plain tensor.
        ValueError: names, shapes, kinds of dtype or ties differ; the message lists all differences.
    """

    def __init__(self, module: nn.Module, layout: Layout) -> None:
        self._module = weakref.ref(module)
        self.layout = layout
        self._held: Any = None
        self._plan(weights_in(module))

    @torch.no_grad()
    def alias(self, views: Sequence[Tensor], held: Any = None) -> None:
        """Make ``views`` the memory of the parameters, which then require no gradients.

        Buffers are copied, because a forward pass may write to them. The views must not be written
        to, and must stay valid meanwhile: ``held`` is kept until others are loaded.

        Raises:
            ValueError: another dtype or device, different values for one tensor, or a module of
                inference mode. Nothing has changed then.
        """
        buffers = self._check(views, aliases=True)
        memory = self._of(views, self.parameters)
        differences = [
            f"{name}: expected {described(view)} on {view.device}, got {described(tensor)} on "
            f"{tensor.device}"
            for (name, tensor), view in zip(self.parameters.items(), memory, strict=True)
            if tensor.dtype != view.dtype or tensor.device != view.device
        ]
        remedy = "make it of the channel's dtype and device, or load with mode='copy'"
        refuse_differences("module", differences, remedy)
        for parameter in self.parameters.values():
            if parameter.requires_grad:
                parameter.requires_grad_(False)
        copy_all([*buffers.values()], self._of(views, buffers))
        # One storage for all. It is forgotten in C, where no interrupt is lost.
        _LENT.add(weakref.ref(views[0].untyped_storage(), _LENT.discard))
        self._held = self._held, held  # an interrupt leaves both
        # In C, too: an interrupt comes before the first or behind the last.
        list(map(setattr, self.parameters.values(), repeat("data"), memory))
        self._held = held

    @torch.no_grad()
    def copy(self, views: Sequence[Tensor]) -> None:
        """Copy ``views`` into the parameters and buffers, which keep memory, dtype and device.

        Parameters that lie in a channel's memory get memory of their own first.

        Raises:
            ValueError: another shape, different values for one tensor, or a module of inference
                mode outside of it. Nothing has changed then.
        """
        tensors = self._check(views, aliases=False)
        self.own(torch.empty_like)
        copy_all([*tensors.values()], self._of(views, tensors))

    def own(self, copied: Callable[[Tensor], Tensor] = torch.clone) -> None:
        """Copy parameters that lie in a channel's memory, which has to be held, into their own."""
        storages = map(Tensor.untyped_storage, self.parameters.values())
        if _LENT and not _LENT.isdisjoint(map(weakref.ref, storages)):
            with torch.inference_mode(False):  # tensors made in that mode could not be trained
                for parameter in self.parameters.values():
                    if weakref.ref(parameter.untyped_storage()) in _LENT:
                        parameter.data = copied(parameter.data)
        self._held = None

    def _of(self, views: Sequence[Tensor], names: Iterable[str]) -> list[Tensor]:
        return [views[self.layout.view_of[name]] for name in names]

    def _check(self, views: Sequence[Tensor], aliases: bool) -> dict[str, Tensor]:
        """Check all that may have changed since the last load; the tensors to copy into."""
        found = weights_in(self._module())  # which the caller keeps alive
        if facts(found) != self._facts:
            self._plan(found)
        if self._inference and (aliases or not torch.is_inference_mode_enabled()):
            raise ValueError(
                f"module: {self._inference[0]}: expected a tensor that can be written, got one of "
                "inference mode; make the module outside of torch.inference_mode()"
            )
        tensors = self._buffers if aliases else self.parameters | self._buffers
        for name, tensor in tensors.items():
            if not has_memory(tensor):
                check_supported(name, tensor, "module")
        differences = [
            f"{name}: expected the values of {first}, since the module has one tensor for both, "
            "got others"
            for name, first, dtype in self._ties
            if not same_values(*self._of(views, (first, name)), dtype)
        ]
        remedy = "publish weights that are tied, or load into a model that is not"
        refuse_differences("module", differences, remedy)
        return tensors

    def _plan(self, found: Sequence[Weight]) -> None:
        """Find the tensor for each entry; if the module is refused, the former plan stays."""
        layout, weights = self.layout, {weight.name: weight for weight in found}
        if layout.merged and has_adapters(self._module()):
            raise ValueError(
                "module: expected a model without adapters for weights that they are merged into, "
                "got one with; load into the base model, or publish without merge_adapters"
            )
        _, differences = layout.compared(weights, "module", layout.stored)
        differences += [
            f"{entry.name}: expected {described(entry)}, got no such entry"
            for entry in layout.entries
            if entry.tied_to is not None and entry.name not in weights
        ]
        remedy = "load into a model of the published one's architecture"
        refuse_differences("module", differences, remedy)
        loaded = [weights[name] for name in layout.view_of]
        ties, first_of = [], {}
        for weight in loaded:
            if is_dtensor(weight.tensor):
                raise TypeError(
                    f"module: {weight.name}: expected a tensor of this process, got a DTensor; "
                    "load into a module that is not sharded"
                )
            # One tensor for two entries can only be loaded if the values of both are equal.
            first = first_of.setdefault(weight.identity(), weight.name)
            if layout.view_of[first] != layout.view_of[weight.name]:
                ties.append((weight.name, first, weight.tensor.dtype))
        self.parameters = {w.name: w.tensor for w in loaded if w.kind == "parameter"}
        self._buffers = {w.name: w.tensor for w in loaded if w.kind != "parameter"}
        self._inference = [weight.name for weight in loaded if weight.tensor.is_inference()]
        self._ties, self._facts = ties, facts(found)


class Follower:
    """What computes with one version in each call, the newest when the call begins.

    ``with follower.call() as version:`` encloses a call. Calls within a call, and overlapping ones
    of several threads, share the version of the first. Before the first version is published,
    weights stay as they are, and the version is ``None``.

    Attributes:
        version: of the call that goes on, or of the last one.
    """

    def __init__(self, reader: Any, module: nn.Module) -> None:
        self.reader, self.module = reader, module
        self.version: int | None = None
        # What the calls that run share, and its value holds their version. It is gone with them.
        self._running: Callable[[], Held | None] = lambda: None
        self._loaded: Held | None = None  # a call of load()
        # Re-entrant: a follower may be closed by what the garbage collector finds.
        self._lock = threading.RLock()

    def call(self) -> Held:
        """A call that begins: a block with the version, ``None`` before the first.

        The version is held from here until the block ends, or what this returns is dropped.
        """
        self.reader.require_open()
        with self._lock:
            self._loaded = None
            running = self._running()
            if running is None:
                running = Held(None if self.reader.version is None else self._switch())
                self._running = weakref.ref(running)
            if running.value is None or not self.reader.on_gpu:
                return Held(self.version, running)
            # Each call's own lease waits, when it is given back, for the work on its own stream.
            return Held(self.version, running, running.value.share())

    def load(self, timeout: float | None = None) -> int:
        """Load the newest version, unless a call runs, and hold it until the next begins.

        Args:
            timeout: seconds to wait for the first version; the channel's own if ``None``.

        Raises:
            TimeoutError, RuntimeError: as for :meth:`WeightReader.lease`.
        """
        self.reader.wait_for(0, timeout)
        self._loaded = call = self.call()
        return call.value

    def _switch(self) -> Any:
        """Load the newest version, which no call computes with yet; the lease that holds it."""
        raise NotImplementedError

    def close(self, detach: bool = True) -> None:
        """Follow no more.

        With ``detach`` a module is left with a version in memory of its own: that of a call which
        still runs, the one that it keeps, or the newest.
        """
        raise NotImplementedError


class ModuleFollower(Follower):
    """Gives a module what is leased. :meth:`WeightReader.follow` makes one."""

    def __init__(self, reader: Any, module: nn.Module, mode: str, keeps: bool) -> None:
        super().__init__(reader, module)
        self.mode, self.keeps = mode, keeps
        self.target = Target(module, reader.layout)
        parameters = self.target.parameters.values()
        _refuse_used(reader.session, parameters)
        self._is_current = False  # whether the module has the weights of `version`
        self._warned = False
        for parameter in parameters:
            parameter.requires_grad_(False)
        take = _Hook(self._take_loads)  # on every part, as state dicts of parts may be loaded too
        self._hooks = [
            module.register_state_dict_post_hook(_Hook(self._give_copies)),
            *(part.register_load_state_dict_pre_hook(take) for part in module.modules()),
        ]
        FOLLOWERS.add(self)

    def _switch(self) -> Any:
        # An interrupt at any point leaves what the next call begins with: another load of all.
        with self.reader.lease() as lease:
            if lease.version != self.version or not self._is_current:
                self._is_current = False
                if self.mode == "alias":
                    self.target.alias(lease.views, lease.share() if self.keeps else None)
                else:
                    self.target.copy(lease.views)
                self.version = lease.version
                self._is_current = True
            return lease.share()

    def _give_copies(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        # A view would change later. Pickling it for another process would also move its storage out
        # of the channel's memory.
        with self.call():
            for name, parameter in module.named_parameters(remove_duplicate=False):
                if prefix + name in state:
                    state[prefix + name] = parameter.detach().clone()

    def _take_loads(self, *_: Any) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "load_state_dict: expected weights through the channel, got a state dict; the next "
                "call computes with the newest published version: publish what it shall have"
            )
        self._leave()

    def _leave(self) -> None:
        """Give the module memory of its own to write to; the next call loads all again."""
        self.reader.require_open()
        with self._lock:
            if self._is_current and self.mode == "alias":
                with nullcontext() if self.keeps else self.call():  # what is not held may be gone
                    self.target.own()
            self._is_current = False

    def close(self, detach: bool = True) -> None:
        """Follow no more, as :meth:`Follower.close` says."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        FOLLOWERS.discard(self)
        if self.reader.is_open:  # not in a forked child
            if detach:
                self._leave()
            self._loaded, self._is_current = None, False


class _Hook:
    """A hook of one module, which does nothing in copies of the module."""

    def __init__(self, run: Callable[..., None] = lambda *_: None) -> None:
        self._run = run

    def __call__(self, *args: Any) -> None:
        self._run(*args)

    def __reduce__(self) -> Any:
        return _Hook, ()


def _refuse_used(session: str, parameters: Collection[Tensor]) -> None:
    """Raise ``ValueError`` if something else writes to parameters that are to follow a channel."""
    known = {*map(id, parameters), *map(Tensor.data_ptr, parameters)} - {0}
    # Another follower would change them during the calls of this one.
    if any(id(p) in known for other in [*FOLLOWERS] for p in other.target.parameters.values()):
        raise ValueError(
            "module: expected parameters that nothing else loads, got some that follow a channel "
            "already; publish a module that has all of them through one channel"
        )
    # A step of a trainer that is not published yet would be lost at the next load, or computed with
    # under the number of an older version. In alias mode, it would end the process.
    channel = PUBLISHED.get(session)
    for name, weight in weights_of({} if channel is None else channel.template).items():
        tensor = weight.tensor
        if id(tensor) in known or (
            isinstance(tensor, Tensor) and not is_dtensor(tensor) and tensor.data_ptr() in known
        ):
            raise ValueError(
                "policy: expected weights of its own, got those that this process trains and "
                f"publishes, such as {name}; let copy.deepcopy(policy) follow the channel, or "
                "collect without a channel and call increment_version() after each step"
            )


def followers_of(model: Any) -> list[ModuleFollower]:
    """The followers that keep a model, or parts of it, or what it is a part of."""
    followers = [*FOLLOWERS]
    parts = set(map(id, model.modules())) if followers else set()
    return [
        follower
        for follower in followers
        if id(follower.module) in parts or not parts.isdisjoint(map(id, follower.module.modules()))
    ]


def one_version(model: nn.Module) -> Held:
    """A block that keeps a model at one version, as a whole, a part, or what has followers in it.

    A model that follows no channel is left alone.
    """
    return Held(None, *(follower.call() for follower in followers_of(model)))
