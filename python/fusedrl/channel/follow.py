"""Keeps modules at the versions of a channel: one version per load, and one per call."""

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
# The channels that this process publishes, by session.
PUBLISHED: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
FOLLOWERS: weakref.WeakSet[ModuleFollower] = weakref.WeakSet()
# A forked child has its own copy of the modules, and may inherit locks that stay locked.
os.register_at_fork(after_in_child=lambda: (PUBLISHED.clear(), FOLLOWERS.clear()))
# The storages of slots that modules alias; nothing may write to them.
_ALIASED: set[weakref.ref[torch.UntypedStorage]] = set()


class Target:
    """A module that versions of a layout are loaded into.

    It may be wrapped by DistributedDataParallel or ``torch.compile``, and its tensors may be
    replaced. A ``TypeError`` or ``ValueError`` about it is raised before anything changes.
    """

    def __init__(self, module: nn.Module, reader: Any, mode: str) -> None:
        if mode not in ("alias", "copy"):
            raise ValueError(
                f"mode: expected 'alias' or 'copy', got {mode!r}; 'alias' uses no extra memory, "
                "'copy' keeps the addresses of the parameters"
            )
        self.layout: Layout = reader.layout
        self.mode, self.module = mode, weakref.ref(module)
        self._session, self._device = reader.session, reader.device
        self.freezes = mode == "alias"
        self._held: Any = None  # the lease of the memory that parameters alias
        self.loaded: dict[int, Any] | None = None  # after load(): the place of each tensor
        # After load(): all parameters of the module, their addresses, and their storages.
        self._after_load: tuple[list[Tensor], list[int], list[Any]] = [], [], []
        self._plan(weights_in(module))

    def is_as_loaded(self) -> bool:
        """Whether no parameter was replaced or moved to other memory since the last load."""
        found, places, storages = self._after_load
        now = self._module_parameters()
        return (
            self.loaded is not None
            and len(found) == len(now)
            and all(map(is_, found, now))
            and places == [*map(Tensor.data_ptr, now)]
            and all(storage() is not None for storage in storages)
        )

    def _module_parameters(self) -> list[Tensor]:
        # Each call runs this; weights_in() would take twice as long.
        parts: list[Any] = [self.module()]
        for part in parts:  # grows during the loop
            parts += [child for child in children_of(part).values() if child is not None]
        homes = map(parameters_of, parts)
        return [p for home in homes for p in home.values() if p is not None]

    @torch.no_grad()
    def load(self, views: Sequence[Tensor], lease: Any = None) -> None:
        """Load ``views``, one for each stored entry, into the module.

        In alias mode parameters use their memory and require no gradients, and the module shares
        the ``lease``. Buffers are copied, because a forward pass may write to them.
        """
        found, loaded_at = weights_in(self.module()), self.loaded
        is_same = tensors.fingerprint(found) == self._fingerprint
        is_unchanged = is_same and self._are_unmoved(self._copied.values())
        if not is_unchanged:
            self._plan(found)
        differences = [
            f"{name}: expected the values of {first}, since the module has one tensor for both, "
            "got other values"
            for name, i, first, j, dtype in self._ties
            if not tensors.same_values(views[i], views[j], dtype)
        ]
        remedy = "publish tied weights, or load into a model without ties"
        refuse_differences("module", differences, remedy)
        if self.freezes:
            self.freeze()
        if self.mode == "copy" and not is_unchanged:
            self.copy_aliased(torch.empty_like)
        self.loaded = None
        copy_all([*self._copied.values()], self._select(views, self._copied))
        if self.mode == "alias":
            # All views share one storage. It is forgotten in C, where no interrupt is lost.
            _ALIASED.add(weakref.ref(views[0].untyped_storage(), _ALIASED.discard))
            self._held = self._held, lease and Lease(of=lease)  # both, in case of an interrupt
            # In C, too, so that an interrupt comes before the first or after the last.
            memory = self._select(views, self.parameters)
            list(map(setattr, self.parameters.values(), repeat("data"), memory))
            self._held = self._held[1]
        if not is_unchanged or self.mode == "alias":
            parameters = self._module_parameters()
            loaded = {**self.parameters, **self._copied}.values()
            loaded_at = {id(tensor): self._place(tensor) for tensor in loaded}
            # Freed memory may become that of another tensor, at the same address.
            storages = [weakref.ref(p.untyped_storage()) for p in parameters if self.mode == "copy"]
            self._after_load = parameters, [*map(Tensor.data_ptr, parameters)], storages
        self.loaded = loaded_at

    def freeze(self) -> None:
        """Stop all parameters from requiring gradients."""
        for parameter in self.parameters.values():
            parameter.requires_grad_(False)

    def copy_aliased(self, copied: Callable[[Tensor], Tensor] = torch.clone) -> None:
        """Copy parameters that alias a channel, whose version has to be held, to other memory."""
        self.loaded = None
        storages = map(Tensor.untyped_storage, self.parameters.values())
        if _ALIASED and not _ALIASED.isdisjoint(map(weakref.ref, storages)):
            with torch.inference_mode(False):  # inference tensors could not be trained
                for parameter in self.parameters.values():
                    if weakref.ref(parameter.untyped_storage()) in _ALIASED:
                        parameter.data = copied(parameter.data)
        self._held = None

    def _select(self, views: Sequence[Any], names: Iterable[str]) -> list[Any]:
        return [views[self.layout.view_of[name]] for name in names]

    def _are_unmoved(self, tensors: Iterable[Tensor]) -> bool:
        """Whether tensors are where the last load left them."""
        places = self.loaded
        return places is not None and all(places.get(id(t)) == self._place(t) for t in tensors)

    def _place(self, tensor: Tensor) -> tuple[int, Any]:
        # Freed memory may become that of another tensor, at the same address.
        return tensor.data_ptr(), self.mode == "copy" and weakref.ref(tensor.untyped_storage())

    def _plan(self, found: Sequence[Weight]) -> None:
        """Assign a tensor to each entry; if the module is refused, the previous plan stays."""
        self._refuse_others(found)
        layout, weights = self.layout, {weight.name: weight for weight in found}
        if layout.merged and has_adapters(self.module()):
            raise ValueError(
                "module: expected a model without adapters, since the weights have them merged in, "
                "got one with adapters; load into the base model, or publish without merge_adapters"
            )
        missing = [entry for entry in layout.entries if entry.name not in weights]
        _, differences = layout.compared(weights, "module", missing)
        remedy = "load into a model of the published architecture"
        refuse_differences("module", differences, remedy)
        loaded = [weights[name] for name in layout.view_of]
        ties, first_of = [], {}
        for weight, index in zip(loaded, layout.view_of.values(), strict=True):
            if tensors.is_dtensor(weight.tensor):
                raise TypeError(
                    f"module: {weight.name}: expected a plain tensor, got a DTensor; "
                    "load into a module that is not sharded"
                )
            # Two entries with one tensor can only be loaded if their values are equal.
            first = first_of.setdefault(weight.identity(), weight.name)
            if (other := layout.view_of[first]) != index:
                ties.append((weight.name, index, first, other, weight.tensor.dtype))
        parameters = {w.name: w.tensor for w in loaded if w.kind == "parameter"}
        if self.mode == "alias":
            memory = self._select(layout.stored, parameters)
            differences = [
                f"{n}: expected {described(m)} on {self._device}, got {described(p)} on {p.device}"
                for (n, p), m in zip(parameters.items(), memory, strict=True)
                if p.dtype != m.dtype or p.device != self._device
            ]
            remedy = "convert it to the channel's dtype and device, or load with mode='copy'"
            refuse_differences("module", differences, remedy)
        self.parameters = parameters
        copied = [w for w in loaded if self.mode == "copy" or w.kind != "parameter"]
        self._copied = {w.name: w.tensor for w in copied}
        self._ties, self._fingerprint = ties, tensors.fingerprint(found)

    def _refuse_others(self, found: Sequence[Weight]) -> None:
        """Refuse parameters that follow another channel, or that this process trains."""
        parameters = [weight for weight in found if weight.kind == "parameter"]
        others = (f.target for f in [*FOLLOWERS] if f.target is not self)
        followed = {id(p) for other in others for p in other.parameters.values()}
        # The other follower would change them during this one's calls.
        if any(id(weight.tensor) in followed for weight in parameters):
            raise ValueError(
                "module: expected parameters that nothing else loads, got some that follow a "
                "channel already; close their follower, or follow one channel that has all of them"
            )
        # A training step that is not published yet would be overwritten by the next load, or used
        # under an older version's number. In alias mode it would crash the process.
        channel = PUBLISHED.get(self._session)
        published = tensors.weights_of(channel.template if channel else {}).values()
        trained = {weight.identity() for weight in published}
        for weight in parameters if trained else ():
            if weight.identity() in trained:
                raise ValueError(
                    "module: expected weights that this process does not train, got those that it "
                    f"publishes, such as {weight.name}; load into copy.deepcopy(module), or "
                    "collect without a channel and call increment_version() after each step"
                )


class Follower:
    """Computes each call with one version, the newest when the call begins.

    Nested calls, and overlapping calls of several threads, share the version of the first. Before
    the first version is published, the weights stay as they are and the version is ``None``.
    ``version`` is that of the running call, or of the last one.
    """

    def __init__(self, reader: Any, module: nn.Module) -> None:
        self.reader, self.module = reader, module
        self.version: int | None = None
        # A weak reference to what the running calls share, with the lease as its value.
        self._running: Callable[[], Held | None] = lambda: None
        self._loaded: Held | None = None  # the call that load() keeps open
        # Re-entrant: the garbage collector may close a follower within a call.
        self._lock = threading.RLock()

    def call(self) -> Held:
        """Begin a call: a ``with`` block whose value is the version.

        The version is held from here until the block ends or the returned object is dropped.
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
                # A lease per call, since its release waits for the work on that call's stream.
                return Held(self.version, running, Lease(of=running.value))
            finally:
                running = None  # an interrupt's traceback would keep it

    def load(self, timeout: float | None = None) -> int | None:
        """Load the newest version, hold it until the next call begins, and return its number.

        It waits for the first version, and fails as :meth:`WeightReader.lease` does. If a call is
        running, its version stays, which is ``None`` if it began before the first.
        """
        self.reader.wait_for(0, timeout)
        self._loaded = call = self.call()
        return call.value

    close: Callable[..., None]
    _switch: Callable[[], Any]  # loads the newest version; returns what holds it, or None


class ModuleFollower(Follower):
    """Keeps a module at a reader's newest version; :meth:`WeightReader.follow` makes one."""

    def __init__(self, reader: Any, module: nn.Module, mode: str, between_calls: bool) -> None:
        super().__init__(reader, module)
        self.mode, self.between_calls = mode, between_calls
        self.target = Target(module, reader, mode)
        self._warned, self.target.freezes = False, True
        self.target.freeze()
        self._hooks = [module.register_state_dict_post_hook(_Hook(self._copy_state))]
        self._hooked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._install_load_hooks()
        FOLLOWERS.add(self)

    def _install_load_hooks(self) -> None:
        """Hook the module and its parts, for state dicts that are loaded into them."""
        hook = _Hook(self._before_load_state_dict)
        for part in {*self.module.modules()} - {*self._hooked}:
            self._hooks.append(part.register_load_state_dict_pre_hook(hook))
            self._hooked.add(part)

    def _switch(self) -> Any:
        if self not in FOLLOWERS:
            raise RuntimeError(
                "follower: expected an open one, got one that is closed; call "
                "reader.follow(module) again"
            )
        # After an interrupt at any point, the next call loads everything again.
        lease = self.reader.lease()
        try:
            # With a replaced parameter, the module no longer has that version.
            if lease.version != self.version or not self.target.is_as_loaded():
                self._install_load_hooks()  # parts may have been replaced
                self.target.load(lease.views, lease if self.between_calls else None)
                self.version = lease.version
            return lease
        except BaseException:
            lease.release()  # the error's traceback would keep it
            raise

    def _copy_state(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        if self not in FOLLOWERS:  # an interrupted __init__() or close() leaves its hooks
            return
        # A view would change with the next version, and pickling it would move its storage.
        with self.call():
            for name, parameter in module.named_parameters(remove_duplicate=False):
                if prefix + name in state:
                    state[prefix + name] = parameter.detach().clone()

    def _before_load_state_dict(self, *_: Any) -> None:
        if self not in FOLLOWERS:
            return
        if not self._warned:
            self._warned = True
            logger.warning(
                "load_state_dict: expected weights through the channel, got a state dict; the next "
                "call loads the newest published version again: publish these weights to keep them"
            )
        self._detach()

    def _detach(self) -> None:
        """Copy aliased parameters to other memory; the next call loads everything again."""
        self.reader.require_open()
        with self._lock:
            if self.target.loaded is not None:
                is_held = self.between_calls or self.mode == "copy"
                try:
                    call = nullcontext() if is_held else self.call()  # else it may be overwritten
                except (TypeError, ValueError):  # the module has changed, and no version fits it
                    call = nullcontext()
                with call:
                    self.target.copy_aliased()

    def close(self, detach: bool = True) -> None:
        """Stop following; with ``detach``, the module keeps a version, in other memory."""
        if self.reader.is_open:  # not in a forked child
            with self._lock:  # no call of another thread loads a version after this
                try:
                    if detach:
                        self._detach()
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
    """The followers of a model, of parts of it, or of a module that it is a part of."""
    followers = [*FOLLOWERS]
    parts = {*model.modules()} if followers else set()
    return [each for each in followers if not parts.isdisjoint(each.module.modules())]


def one_version(model: nn.Module) -> Held:
    """A block in which a model that follows a channel, in whole or in part, has one version."""
    return Held(None, *(follower.call() for follower in followers_of(model)))
