"""Keeps a module at the newest version, so that each call computes with one complete version."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from fusedrl.channel.loading import Target, own
from fusedrl.channel.tensors import Weight, is_dtensor, weights_of

if TYPE_CHECKING:
    from fusedrl.channel.channel import WeightChannel
    from fusedrl.channel.reader import Lease, WeightReader

logger = logging.getLogger("fusedrl")
# The channels whose template this process publishes, by session.
PUBLISHERS: weakref.WeakValueDictionary[str, WeightChannel] = weakref.WeakValueDictionary()
os.register_at_fork(after_in_child=PUBLISHERS.clear)  # a child has memory of its own
_FOLLOWERS: weakref.WeakSet[Follower] = weakref.WeakSet()
os.register_at_fork(after_in_child=_FOLLOWERS.clear)  # their locks may be held there for ever


class Hook:
    """A hook of one module, which does nothing in copies of the module.

    Args:
        run: the function that the hook calls, if any.
    """

    def __init__(self, run: Callable[..., None] | None = None) -> None:
        self._run = run

    def __call__(self, *args: Any) -> None:
        """Run the hook with the arguments of the module."""
        if self._run is not None:
            self._run(*args)

    def __reduce__(self) -> Any:
        """A copy of the hook does nothing."""
        return Hook, ()


class Held:
    """What a ``with`` block holds, until the block ends, at the latest until this is dropped.

    Args:
        value: what the block is given.
        things: what is held, each of which gives itself up when it is dropped.
    """

    __slots__ = ("_things", "value")

    def __init__(self, value: Any, *things: Any) -> None:
        self.value = value
        self._things = list(things)

    def __enter__(self) -> Any:
        """The value."""
        return self.value

    def __exit__(self, *error: object) -> None:
        """Give up what is held."""
        while self._things:
            self._things.pop()


class _Version:
    """What the calls that run share: the version that all of them compute with.

    It is dropped with the last of them, and gives back its lease then.
    """

    __slots__ = ("__weakref__", "lease")

    def __init__(self, lease: Lease | None) -> None:
        self.lease = lease


def _no_call() -> None:
    """No call runs, as a reference to a version that is gone says."""


class Following:
    """What computes with one version in each call, the newest when the call begins.

    ``with following.call() as version:`` encloses a call: the version is chosen when the call
    begins and stays until it ends. Overlapping calls of several threads, and calls within a call,
    share the version of the first. Before the first version is published, the weights stay as they
    are, and the version is ``None``.

    Args:
        reader: of the channel; :meth:`close` leaves it open.
        module: that computes.

    Attributes:
        version: of the call that goes on, or of the last one; ``None`` before the first version.
    """

    def __init__(self, reader: WeightReader, module: nn.Module) -> None:
        self.reader = reader
        self.module = module
        self.version: int | None = None
        self._running: Callable[[], _Version | None] = _no_call
        self._loaded_for: Lease | None = None  # holds what load() has loaded for the next call
        # Re-entrant: a follower may be closed by what the garbage collector finds.
        self._lock = threading.RLock()

    def call(self) -> Held:
        """A call that begins: a block with the version, ``None`` before the first.

        The version is held from here until the block ends, or what this returns is dropped.
        """
        self.reader.require_open()
        with self._lock:
            running = self._running()
            if running is None:
                has_version = self.reader.version is not None
                running = _Version(self._switch(None) if has_version else None)
                self._running = weakref.ref(running)
                self._loaded_for = None
            if running.lease is None or not self.reader.on_gpu:
                return Held(self.version, running)
            # Each call's own lease waits, when it is given back, for the work on its own stream.
            return Held(self.version, running, running.lease.share())

    def load(self, timeout: float | None = None) -> int:
        """Load the newest version, unless a call is running, and hold it until the next begins.

        Args:
            timeout: seconds to wait for the first version; the channel's own if ``None``.

        Returns:
            The version that is loaded.

        Raises:
            TimeoutError, RuntimeError: as for :meth:`WeightReader.lease`.
        """
        self.reader.require_open()
        with self._lock:
            if not self.is_running:
                self._loaded_for = self._switch(timeout)
            assert self.version is not None
            return self.version

    @property
    def is_running(self) -> bool:
        """Whether a call goes on."""
        return self._running() is not None

    def _switch(self, timeout: float | None) -> Lease | None:
        """Load the newest version, which no call computes with yet; what holds it, if anything."""
        raise NotImplementedError

    def close(self, detach: bool = True) -> None:
        """Follow no more."""
        raise NotImplementedError


class Follower(Following):
    """Keep a module at the newest version, between its calls and never during one.

    If nothing is new when a call begins, that is a check without a copy.

    Args:
        reader: a reader of the channel; :meth:`close` leaves it open.
        module: a module with the names and shapes of the channel; in alias mode also with its
            dtypes and device.
        mode: ``"alias"`` or ``"copy"``, as for :meth:`WeightReader.load_into`. In both modes the
            version is held during calls, ``state_dict()`` of the module returns copies, and its
            parameters require no gradients: training it would change what a version stands for.
        keeps: in alias mode, hold the version between calls too, until the next one is loaded.
            Otherwise aliased weights may change between calls.

    Raises:
        TypeError: an entry of the module is not a plain tensor.
        ValueError: the module does not fit, another follower has some of its parameters, or they
            are those that this process publishes in the channel.

    Example:
        >>> import torch
        >>> from fusedrl import WeightChannel
        >>> from fusedrl.channel.following import Follower
        >>> trained, policy = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        >>> with WeightChannel.create(trained) as channel, channel.handle.open() as reader:
        ...     _ = channel.publish()
        ...     follower = Follower(reader, policy)
        ...     with follower.call() as version:
        ...         print(version, bool((policy.weight == trained.weight).all()))
        ...     follower.close()
        1 True
    """

    def __init__(
        self,
        reader: WeightReader,
        module: nn.Module,
        mode: Literal["alias", "copy"] = "alias",
        keeps: bool = False,
    ) -> None:
        super().__init__(reader, module)
        self.target = Target(module, reader.layout)
        self._refuse_shared()
        publisher = PUBLISHERS.get(reader.session)
        if publisher is not None:
            self.refuse_trained(weights_of(publisher.template).values())
        self.mode: Literal["alias", "copy"] = mode
        self._aliases = mode == "alias"
        self.keeps = keeps and self._aliases
        self._loaded = False  # whether the module has the weights of `version`
        self._warned = False
        for parameter in self.target.parameters:
            parameter.requires_grad_(False)
        take = Hook(self._take_loads)  # on every part, as state dicts of parts may be loaded too
        self._hooks = [
            module.register_state_dict_post_hook(Hook(self._give_copies)),
            *(part.register_load_state_dict_pre_hook(take) for part in module.modules()),
        ]
        _FOLLOWERS.add(self)

    def _refuse_shared(self) -> None:
        # Another follower would change the parameters during the calls of this one.
        own = set(map(id, self.target.parameters))
        for other in list(_FOLLOWERS):
            if not own.isdisjoint(map(id, other.target.parameters)):
                raise ValueError(
                    "module: expected parameters that nothing else loads, got some that follow a "
                    "channel already; publish a module that has all of them through one channel"
                )

    def refuse_trained(self, places: Iterable[Weight]) -> None:
        """Raise ``ValueError`` if the module has tensors that are published, or their memory.

        A step that is not published yet would be lost at the next load, or computed with under the
        number of an older version. In alias mode, a step would end the process.

        Args:
            places: of the weights that this process publishes in the channel.
        """
        own = self.target.parameters
        known = {*map(id, own), *map(Tensor.data_ptr, own)} - {0}
        for place in places:
            tensor = place.tensor
            if id(tensor) in known or (
                isinstance(tensor, Tensor) and not is_dtensor(tensor) and tensor.data_ptr() in known
            ):
                raise ValueError(
                    f"policy: expected weights of its own, got those that this process trains "
                    f"and publishes, such as {place.name}; let copy.deepcopy(policy) follow the "
                    "channel, or collect without a channel and call increment_version() after "
                    "each step"
                )

    def _switch(self, timeout: float | None) -> Lease:
        # An interrupt at any point leaves what the next call begins with: another load of all.
        with self.reader.lease(timeout=timeout) as lease:
            if lease.version != self.version or not self._loaded:
                self._loaded = False
                lease.load(self.target, self.mode, self.keeps)
                self.version = lease.version
                self._loaded = True
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
        # Give the module memory of its own, as the channel's must not be written to. The next call
        # loads the channel's weights again.
        if not self._warned:
            self._warned = True
            logger.warning(
                "load_state_dict: expected weights through the channel, got a state dict; the next "
                "call computes with the newest published version: publish what it shall have"
            )
        self.reader.require_open()
        with self._lock:
            if self._aliases and self._loaded:
                self._own()
            self._loaded = False

    def _own(self) -> None:
        if self.is_running or self.keeps:
            own(self.target.parameters)
            return
        with self.reader.lease() as lease:
            lease.load(self.target, "copy")

    def close(self, detach: bool = True) -> None:
        """Stop following the channel.

        Args:
            detach: whether to leave the module with a version in memory of its own: the newest,
                that of a call which still runs, or the one that is kept. Pass ``False`` if the
                module is not used any more.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        _FOLLOWERS.discard(self)
        if not self.reader.is_open:  # also in a forked child
            return
        with self._lock:
            if detach and self._aliases and self._loaded:
                self._own()
            self._loaded = False
            self._loaded_for = None  # a call that still runs holds its version itself


def refuse_followed(session: str, places: Collection[Weight]) -> None:
    """Raise ``ValueError`` if a follower of a channel would load what is published there."""
    for follower in list(_FOLLOWERS):
        if follower.reader.session == session:
            follower.refuse_trained(places)


def followers_of(model: Any) -> list[Follower]:
    """The followers that keep a model, or parts of it, or what it is a part of."""
    followers = list(_FOLLOWERS)
    parts = set(map(id, model.modules())) if followers else set()
    return [
        follower
        for follower in followers
        if id(follower.module) in parts or not parts.isdisjoint(map(id, follower.module.modules()))
    ]


def one_version(model: nn.Module) -> Held:
    """Keep every follower of a model, or of parts of it, at one version within a ``with`` block.

    Args:
        model: a model that followers keep at the newest version, in whole or in part, or a part of
            such a model. Other models are left alone.
    """
    return Held(None, *(follower.call() for follower in followers_of(model)))
