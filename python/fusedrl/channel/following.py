"""Keeps a module at the newest version, so that each call computes with one complete version."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import nn

from fusedrl import _host
from fusedrl.channel.forking import renew_in_children
from fusedrl.channel.loading import Target

if TYPE_CHECKING:
    from fusedrl.channel.reader import Lease, WeightReader

logger = logging.getLogger("fusedrl")
_FOLLOWERS: weakref.WeakSet[Follower] = weakref.WeakSet()
_writes = attrgetter("_version")


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


class Following(Protocol):
    """What computes with one version in each ``with`` block, the newest when the block begins.

    Attributes:
        reader: of the channel.
        module: that computes.
        version: of the block that goes on, or of the last one; ``None`` before the first version.
    """

    reader: WeightReader
    module: nn.Module
    version: int | None

    def __enter__(self) -> int | None:
        """Begin a call; its version."""
        ...

    def __exit__(self, *error: object) -> None:
        """End it."""
        ...

    def load(self, timeout: float | None = None) -> int:
        """Load the newest version, and return its number."""
        ...

    def close(self, detach: bool = True) -> None:
        """Follow no more."""
        ...


class Follower(_host.Calls):
    """Keep a module at the newest version, between its calls and never during one.

    ``with follower as version:`` encloses a call: the version is chosen when the block begins and
    held until it ends. If nothing is new, that is a check without a copy. Overlapping calls of
    several threads, and calls within a call, share the version of the first. Before the first
    version is published, the module computes with the weights that it has, and the version is
    ``None``.

    Args:
        reader: a reader of the channel; :meth:`close` leaves it open.
        module: a module with the names and shapes of the channel; in alias mode also with its
            dtypes and device.
        mode: ``"alias"`` or ``"copy"``, as for :meth:`WeightReader.load_into`. In both modes the
            version is held during calls, and ``state_dict()`` of the module returns copies.
        keeps: in alias mode, hold the version between calls too, until the next one is loaded.
            Otherwise aliased weights may change between calls.

    Raises:
        TypeError: an entry of the module is not a plain tensor.
        ValueError: the module does not fit, or another follower has some of its parameters.

    Example:
        >>> import torch
        >>> from fusedrl import WeightChannel
        >>> from fusedrl.channel.following import Follower
        >>> trained, policy = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        >>> with WeightChannel.create(trained) as channel, channel.handle.open() as reader:
        ...     _ = channel.publish()
        ...     follower = Follower(reader, policy)
        ...     with follower as version:
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
        if mode not in ("alias", "copy"):
            raise ValueError(
                f"mode: expected 'alias' or 'copy', got {mode!r}; alias takes no memory, copy "
                "keeps the addresses of the parameters"
            )
        super().__init__()
        self.reader = reader
        self.module = module
        self.version: int | None = None
        self._target = Target(module, reader.layout)
        self._refuse_shared()
        self.mode: Literal["alias", "copy"] = mode
        self._aliases = mode == "alias"
        self.keeps = keeps and self._aliases
        self._loaded = False  # whether the module has the weights of `version`
        self._watched: list[Any] = []  # the parameters, and how often each had been written
        self._written: list[int] = []  # when it had got its weights
        # Re-entrant: a follower may be closed by what the garbage collector finds.
        self._lock = threading.RLock()
        renew_in_children(self, _lock=threading.RLock)
        self._warned = False
        take = Hook(self._take_loads)  # on every part, as state dicts of parts may be loaded too
        self._hooks = [
            module.register_state_dict_post_hook(Hook(self._give_copies)),
            *(part.register_load_state_dict_pre_hook(take) for part in module.modules()),
        ]
        _FOLLOWERS.add(self)

    def _refuse_shared(self) -> None:
        # Another follower would change the parameters during the calls of this one.
        ours = {id(parameter) for parameter, *_ in self._target._parameters}
        for other in list(_FOLLOWERS):
            if any(id(parameter) in ours for parameter, *_ in other._target._parameters):
                raise ValueError(
                    "module: expected parameters that nothing else loads, got some that follow a "
                    "channel already; publish a module that has all of them through one channel"
                )

    def load(self, timeout: float | None = None) -> int:
        """Load the newest version, and hold it until the next call has ended.

        Args:
            timeout: seconds to wait for the first version; the channel's own if ``None``.

        Raises:
            TimeoutError, RuntimeError: as for :meth:`WeightReader.lease`.
        """
        with self._lock:
            if self.running == 0:
                self._switch(timeout)
            assert self.version is not None
            return self.version

    def _begin(self) -> int | None:
        """The version of a call that begins, ``None`` before the first."""
        if self.running == 0 and self.reader.version is not None:
            self._switch(None)
        elif self.running == 0:
            self._refuse_written()
        return self.version

    def hold(self) -> Lease | None:
        """Hold the version of the current call beyond the end of the call.

        Returns:
            A lease of it; ``None`` before the first version.
        """
        with self._lock:
            return None if self.held is None else self.held.share()

    def _switch(self, timeout: float | None) -> None:
        # An interrupt at any point leaves what the next call begins with: another load of all.
        with self.reader.lease(timeout=timeout) as lease:
            if lease.version == self.version and self._loaded:
                self._refuse_written()
                self.held = lease.share()
                return
            self._loaded = False
            lease.load(self._target, self.mode)
            self.held = lease.share()
            self.version = lease.version
            self._watch()
            self._loaded = True

    def _watch(self) -> None:
        """Note how often each parameter was written, as each write in place counts."""
        read_only = self.held is not None and self._aliases and self.reader.device.type == "cpu"
        # Tensors that were made in inference mode do not count.
        watched = [] if read_only else self._target.parameters
        self._watched = [p for p in watched if not p.is_inference()]
        self._written = list(map(_writes, self._watched))

    def _refuse_written(self) -> None:
        if not self._watched and self.version is None:
            self._watch()
        elif self._written != list(map(_writes, self._watched)):
            raise RuntimeError(
                f"policy: expected the weights of version {self.version or 0}, got some that were "
                "written since, as by an optimiser step that is not published; publish each step, "
                "or let a copy of the trained module follow the channel"
            )

    def _give_copies(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        # A view would change later. Pickling it for another process would also move its storage out
        # of the channel's memory.
        with self:
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
        with self._lock:
            if self._aliases and self._loaded:
                self._own()
            self._loaded, self._watched, self._written = False, [], []

    def _own(self) -> None:
        if self.held is not None and (self.running or self.keeps):
            self.held.load(self._target, "copy")
            return
        with self.reader.lease() as lease:
            lease.load(self._target, "copy")

    def close(self, detach: bool = True) -> None:
        """Stop following the channel.

        Args:
            detach: whether to leave the module with a version in memory of its own: the newest,
                that of a call which still runs, or the one that is kept. Pass ``False`` if the
                module is not used any more.
        """
        with self._lock:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
            if detach and self._aliases and self._loaded:
                self._own()
            self._loaded = self.keeps = False  # a call that still runs releases its version itself
            if self.running == 0:
                self.held = None
        _FOLLOWERS.discard(self)


@contextmanager
def one_version(model: nn.Module) -> Iterator[None]:
    """Keep every follower of a model, or of parts of it, at one version within this block.

    Args:
        model: a model that followers keep at the newest version, in whole or in part, or a part of
            such a model. Other models are left alone.
    """
    calls: list[_host.Entered] = []
    try:
        if followers := list(_FOLLOWERS):
            parts = set(map(id, model.modules()))
            for follower in followers:
                theirs = map(id, follower.module.modules())
                if id(follower.module) in parts or not parts.isdisjoint(theirs):
                    calls.append(_host.Entered(follower))
        yield
    finally:
        calls.clear()


def version_of(policy: Any) -> int | None:
    """The version of a policy's current call, or of its last call.

    Args:
        policy: a module, or an object with a ``module``, which a :class:`Follower` keeps in whole
            or in part.

    Returns:
        The version; ``None`` if nothing follows a channel or nothing is loaded yet.
    """
    module = policy if isinstance(policy, nn.Module) else getattr(policy, "module", None)
    if not isinstance(module, nn.Module):
        return None
    followers = {id(follower.module): follower for follower in list(_FOLLOWERS)}
    for part in module.modules():
        if id(part) in followers:
            return followers[id(part)].version
    return None
