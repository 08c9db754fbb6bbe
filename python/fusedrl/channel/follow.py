"""Lets modules compute with the versions of a channel: what is loaded, and the calls of one."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from itertools import repeat
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from fusedrl._host import Held, Lease
from fusedrl.channel import tensors
from fusedrl.channel.adapters import has_adapters
from fusedrl.channel.layout import Layout, refuse_differences
from fusedrl.channel.tensors import Weight, described, weights_in
from fusedrl.compat.torch import children_of, copy_all, parameters_of

logger = logging.getLogger("fusedrl")
# The channels of this process, by session, each with the template that it publishes.
PUBLISHED: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
FOLLOWERS: weakref.WeakSet[ModuleFollower] = weakref.WeakSet()
# A child has memory of its own, and locks that nobody may unlock there.
os.register_at_fork(after_in_child=lambda: (PUBLISHED.clear(), FOLLOWERS.clear()))
# The storages that `alias` gave to modules, which nothing may write to.
_LENT: set[weakref.ref[torch.UntypedStorage]] = set()


class Target:
    """A module that the weights of a layout are loaded into, version after version.

    It may be within DistributedDataParallel or ``torch.compile``, and what it has may be replaced.
    A ``TypeError`` or ``ValueError`` about it comes before anything changes.
    """

    def __init__(self, module: nn.Module, reader: Any, mode: str) -> None:
        if mode not in ("alias", "copy"):
            raise ValueError(
                f"mode: expected 'alias' or 'copy', got {mode!r}; alias takes no memory, copy "
                "keeps the addresses of the parameters"
            )
        self.layout: Layout = reader.layout
        self.mode, self.module = mode, weakref.ref(module)
        self._session, self._device = reader.session, reader.device
        self.freezes = mode == "alias"
        self._held: Any = None  # the lease of what parameters lie in
        self.left: dict[int, Any] | None = None  # where load() has left the tensors, if it has
        # Then: all parameters of the module, their addresses, and the storages of its own.
        self._known: tuple[list[Tensor], list[int], list[Any]] = [], [], []
        self._plan(weights_in(module))

    def is_as_loaded(self) -> bool:
        """Whether no parameter was replaced, or got other memory, since the last load."""
        found, places, storages = self._known
        own = self._own_parameters()
        return (
            self.left is not None
            and len(found) == len(own)
            and all(map(is_, found, own))
            and places == [*map(Tensor.data_ptr, own)]
            and all(storage() is not None for storage in storages)
        )

    def _own_parameters(self) -> list[Tensor]:
        # In half the time of weights_in(), as each call asks.
        parts: list[Any] = [self.module()]
        for part in parts:  # which grow
            parts += [child for child in children_of(part).values() if child is not None]
        homes = map(parameters_of, parts)
        return [p for home in homes for p in home.values() if p is not None]

    @torch.no_grad()
    def load(self, views: Sequence[Tensor], lease: Any = None) -> None:
        """Give the module the values of ``views``, which has one for each stored entry.

        By alias, they become the memory of its parameters, which then require no gradients, and a
        ``lease`` is shared as long. Buffers are copied, because a forward pass may write to them.
        """
        found, left = weights_in(self.module()), self.left
        stays = tensors.facts(found) == self._facts and self._stay(self._copied.values())
        if not stays:
            self._plan(found)
        differences = [
            f"{name}: expected the values of {first}, since the module has one tensor for both, "
            "got others"
            for name, i, first, j, dtype in self._ties
            if not tensors.same_values(views[i], views[j], dtype)
        ]
        remedy = "publish weights that are tied, or load into a model that is not"
        refuse_differences("module", differences, remedy)
        if self.freezes:
            self.freeze()
        if self.mode == "copy" and not stays:
            self.own(torch.empty_like)
        self.left = None
        copy_all([*self._copied.values()], self._of(views, self._copied))
        if self.mode == "alias":
            # One storage for all. It is forgotten in C, where no interrupt is lost.
            _LENT.add(weakref.ref(views[0].untyped_storage(), _LENT.discard))
            self._held = self._held, lease and Lease(of=lease)  # an interrupt leaves both
            # In C, too: an interrupt comes before the first or behind the last.
            memory = self._of(views, self.parameters)
            list(map(setattr, self.parameters.values(), repeat("data"), memory))
            self._held = self._held[1]
        if not stays or self.mode == "alias":
            own, loaded = self._own_parameters(), self.parameters | self._copied
            left = {id(tensor): self._place(tensor) for tensor in loaded.values()}
            # Memory of its own may be freed, and that of another tensor then.
            storages = [weakref.ref(p.untyped_storage()) for p in own if self.mode == "copy"]
            self._known = own, [*map(Tensor.data_ptr, own)], storages
        self.left = left

    def freeze(self) -> None:
        """Let no parameter require gradients."""
        for parameter in self.parameters.values():
            parameter.requires_grad_(False)

    def own(self, copied: Callable[[Tensor], Tensor] = torch.clone) -> None:
        """Copy parameters that lie in a channel's memory, which has to be held, into their own."""
        self.left = None
        storages = map(Tensor.untyped_storage, self.parameters.values())
        if _LENT and not _LENT.isdisjoint(map(weakref.ref, storages)):
            with torch.inference_mode(False):  # tensors made in that mode could not be trained
                for parameter in self.parameters.values():
                    if weakref.ref(parameter.untyped_storage()) in _LENT:
                        parameter.data = copied(parameter.data)
        self._held = None

    def _of(self, views: Sequence[Any], names: Iterable[str]) -> list[Any]:
        return [views[self.layout.view_of[name]] for name in names]

    def _stay(self, tensors: Iterable[Tensor]) -> bool:
        """Whether tensors are where load() has left them."""
        left = self.left
        return left is not None and all(left.get(id(t)) == self._place(t) for t in tensors)

    def _place(self, tensor: Tensor) -> tuple[int, Any]:
        # Memory of its own may be freed, and that of another tensor then.
        return tensor.data_ptr(), self.mode == "copy" and weakref.ref(tensor.untyped_storage())

    def _plan(self, found: Sequence[Weight]) -> None:
        """Find the tensor for each entry; if the module is refused, the former plan stays."""
        self._refuse_others(found)
        layout, weights = self.layout, {weight.name: weight for weight in found}
        if layout.merged and has_adapters(self.module()):
            raise ValueError(
                "module: expected a model without adapters for weights that they are merged into, "
                "got one with; load into the base model, or publish without merge_adapters"
            )
        missing = [entry for entry in layout.entries if entry.name not in weights]
        _, differences = layout.compared(weights, "module", missing)
        remedy = "load into a model of the published one's architecture"
        refuse_differences("module", differences, remedy)
        loaded = [weights[name] for name in layout.view_of]
        ties, first_of = [], {}
        for weight, index in zip(loaded, layout.view_of.values(), strict=True):
            if tensors.is_dtensor(weight.tensor):
                raise TypeError(
                    f"module: {weight.name}: expected a tensor of this process, got a DTensor; "
                    "load into a module that is not sharded"
                )
            # One tensor for two entries can only be loaded if the values of both are equal.
            first = first_of.setdefault(weight.identity(), weight.name)
            if (other := layout.view_of[first]) != index:
                ties.append((weight.name, index, first, other, weight.tensor.dtype))
        parameters = {w.name: w.tensor for w in loaded if w.kind == "parameter"}
        if self.mode == "alias":
            memory = self._of(layout.stored, parameters)
            differences = [
                f"{n}: expected {described(m)} on {self._device}, got {described(p)} on {p.device}"
                for (n, p), m in zip(parameters.items(), memory, strict=True)
                if p.dtype != m.dtype or p.device != self._device
            ]
            remedy = "make it of the channel's dtype and device, or load with mode='copy'"
            refuse_differences("module", differences, remedy)
        self.parameters = parameters
        copied = [w for w in loaded if self.mode == "copy" or w.kind != "parameter"]
        self._copied = {w.name: w.tensor for w in copied}
        self._ties, self._facts = ties, tensors.facts(found)

    def _refuse_others(self, found: Sequence[Weight]) -> None:
        """Refuse parameters that something else of this process writes to."""
        parameters = [weight for weight in found if weight.kind == "parameter"]
        others = (f.target for f in [*FOLLOWERS] if f.target is not self)
        followed = {id(p) for other in others for p in other.parameters.values()}
        # Another follower would change them during the calls of this one.
        if any(id(weight.tensor) in followed for weight in parameters):
            raise ValueError(
                "module: expected parameters that nothing else loads, got some that follow a "
                "channel already; close their follower, or follow one channel that has all of them"
            )
        # A step of a trainer that is not published yet would be lost at the next load, or computed
        # with under the number of an older version. By alias, it would end the process.
        channel = PUBLISHED.get(self._session)
        published = tensors.weights_of(channel.template if channel else {}).values()
        trained = {weight.identity() for weight in published}
        for weight in parameters if trained else ():
            if weight.identity() in trained:
                raise ValueError(
                    "module: expected weights of its own, got those that this process trains and "
                    f"publishes, such as {weight.name}; load into copy.deepcopy(module), or "
                    "collect without a channel and call increment_version() after each step"
                )


class Follower:
    """What computes with one version in each call, the newest when the call begins.

    Calls within a call, and overlapping ones of several threads, share the version of the first.
    Before the first version is published, weights stay as they are, and the version is ``None``.
    ``version`` is that of the call that goes on, or of the last one.
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
        """A call that begins: a ``with`` block, which is given the version.

        It is held from here until the block ends, or what this returns is dropped.
        """
        self.reader.require_open()
        with self._lock:
            self._loaded = None
            running = self._running()
            try:
                if running is None:
                    is_first = self.version is None and self.reader.version is None
                    running = Held(None if is_first else self._switch())
                    self._running = weakref.ref(running)
                if running.value is None or not self.reader.on_gpu:
                    return Held(self.version, running)
                # Each call's own lease waits, when it is given back, for the work on its stream.
                return Held(self.version, running, Lease(of=running.value))
            finally:
                running = None  # which the traceback of an interrupt would keep

    def load(self, timeout: float | None = None) -> int | None:
        """Load the newest version, and hold it until the next call begins.

        It waits for the first version, and fails, as :meth:`WeightReader.lease` does. If a call
        runs, its version stays, which is ``None`` if it began before the first.
        """
        self.reader.wait_for(0, timeout)
        self._loaded = call = self.call()
        return call.value

    close: Callable[..., None]
    _switch: Callable[[], Any]  # loads the newest version, and returns what holds it, if anything


class ModuleFollower(Follower):
    """Gives a module what is leased. :meth:`WeightReader.follow` makes one."""

    def __init__(self, reader: Any, module: nn.Module, mode: str, between_calls: bool) -> None:
        super().__init__(reader, module)
        self.mode, self.between_calls = mode, between_calls
        self.target = Target(module, reader, mode)
        self._warned, self.target.freezes = False, True
        self.target.freeze()
        self._hooks = [module.register_state_dict_post_hook(_Hook(self._give_copies))]
        self._watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._watch()
        FOLLOWERS.add(self)

    def _watch(self) -> None:
        """Hear of state dicts that are loaded into the module or a part of it."""
        take = _Hook(self._take_loads)
        for part in {*self.module.modules()} - {*self._watched}:
            self._hooks.append(part.register_load_state_dict_pre_hook(take))
            self._watched.add(part)

    def _switch(self) -> Any:
        if self not in FOLLOWERS:
            raise RuntimeError(
                "follower: expected an open one, got one that is closed; let reader.follow(module) "
                "make another"
            )
        # An interrupt at any point leaves what the next call begins with: another load of all.
        lease = self.reader.lease()
        try:
            # If a parameter was replaced, it is not the version any more.
            if lease.version != self.version or not self.target.is_as_loaded():
                self._watch()  # parts that were replaced
                self.target.load(lease.views, lease if self.between_calls else None)
                self.version = lease.version
            return lease
        except BaseException:
            lease.release()  # which the traceback of the error would keep
            raise

    def _give_copies(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        if self not in FOLLOWERS:  # an interrupt of __init__() or close() leaves its hooks
            return
        # A view would change later, and to pickle it would move its storage out of the channel.
        with self.call():
            for name, parameter in module.named_parameters(remove_duplicate=False):
                if prefix + name in state:
                    state[prefix + name] = parameter.detach().clone()

    def _take_loads(self, *_: Any) -> None:
        if self not in FOLLOWERS:
            return
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
            if self.target.left is not None:
                is_held = self.between_calls or self.mode == "copy"
                try:
                    call = nullcontext() if is_held else self.call()  # else it may be overwritten
                except (TypeError, ValueError):  # the module has changed, and no version fits it
                    call = nullcontext()
                with call:
                    self.target.own()

    def close(self, detach: bool = True) -> None:
        """Follow no more; if it detaches, leave the module a version in memory of its own."""
        if self.reader.is_open:  # not in a forked child
            with self._lock:  # no call of another thread loads a version after this
                try:
                    if detach:
                        self._leave()
                finally:
                    FOLLOWERS.discard(self)
                    self._loaded = None
        for hook in self._hooks:
            hook.remove()


class _Hook:
    """A hook of one module, which does nothing in copies of the module."""

    def __init__(self, run: Callable[..., None] = lambda *_: None) -> None:
        self._run = run

    def __call__(self, *args: Any) -> None:
        self._run(*args)

    def __reduce__(self) -> Any:
        return _Hook, ()


def followers_of(model: Any) -> list[ModuleFollower]:
    """The followers that keep a model, or parts of it, or what it is a part of."""
    followers = [*FOLLOWERS]
    parts = {*model.modules()} if followers else set()
    return [each for each in followers if not parts.isdisjoint(each.module.modules())]


def one_version(model: nn.Module) -> Held:
    """A block in which a model that follows a channel, in whole or in part, keeps one version."""
    return Held(None, *(follower.call() for follower in followers_of(model)))
