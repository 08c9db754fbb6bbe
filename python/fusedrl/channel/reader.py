"""The reading end of a weight channel."""

from __future__ import annotations

import faulthandler
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

from tensordict import TensorDict
from torch import Tensor, nn

from fusedrl import _host
from fusedrl.channel.checks import MAX_VERSION, count, seconds
from fusedrl.channel.cuda import CudaMemory
from fusedrl.channel.follow import FOLLOWERS, Follower, ModuleFollower, Target
from fusedrl.channel.layout import Layout
from fusedrl.channel.memory import HostMemory, Manifest, Memory

# Seconds within which a signal, or the end of the publisher, is noticed.
SLICE_S = 0.05
# What load_into() has loaded. A module that ends is forgotten in C, where no interrupt is lost.
_LOADED: dict[weakref.ref[nn.Module], Target] = {}


@dataclass(frozen=True)
class WeightHandle:
    """The address of a channel: small, picklable, without tensors.

    Only processes of the publisher's user, on its machine, can open it, and only while the
    publisher lives. It holds a secret that no other channel has: once the publisher is gone the
    handle opens nothing, even if another process has got the publisher's process id.
    """

    pid: int
    fd: int
    session: str = field(repr=False)

    def open(self) -> WeightReader:
        """Become a reader of the channel.

        Raises:
            RuntimeError: the publisher is gone or has another version of this package, this process
                cannot see it or may not, the channel has ``max_readers`` readers, or this process
                has too many open files. The message has the kernel's reason.
        """
        try:
            end = _host.Reader(self.pid, self.fd, self.session)
        except (OSError, ValueError) as error:
            raise RuntimeError(
                f"handle: expected a running publisher with pid {self.pid}, with its channel open, "
                f"of this user and seen by this process, got '{error}'; take a new handle from a "
                "publisher that runs, and let containers share process ids"
            ) from error
        try:
            return WeightReader(end, self.session)
        except BaseException:
            end.close()  # the traceback of the error would keep it open
            raise


class Lease(_host.Lease):
    """One complete version of the weights, unchanged for as long as the lease is held.

    It owns its slot from the moment in which it exists, and gives it back once: at
    :meth:`release`, at the end of its ``with`` block, or when it is dropped. Its weights do not
    keep it: use them within its block, as they may be overwritten after that.

    Attributes:
        version: the number of the version that :attr:`weights` are.
        held: whether it is not released yet, and its reader is open.
    """

    __slots__ = ("reader",)
    reader: WeightReader

    @property
    def weights(self) -> TensorDict:
        """Read-only views of the channel's memory, nested as the dots of the names say.

        Raises:
            RuntimeError: the lease is released, its reader is closed, or this is a forked child.
        """
        slot = self._slot()
        if slot.weights is None:
            slot.weights = self.reader.layout.tensordict(slot.views).lock_()
        return slot.weights

    @property
    def views(self) -> list[Tensor]:
        """As :attr:`weights`, a tensor for each stored entry of the layout, in its order."""
        return self._slot().views

    def _slot(self) -> _Slot:
        reader, slot = self.reader, self.slot  # read before another thread releases it
        reader.require_open()
        if not self.held:
            raise RuntimeError(
                f"lease: expected one that is held, got version {self.version} after its release; "
                "compute inside the with block, or clone what has to last"
            )
        known = reader._slots.get(slot)
        # Pickling a view for another process moves its storage into other shared memory.
        if known is None or known.flat.data_ptr() != known.address:
            flat = reader.memory.slot(slot)
            known = _Slot(flat, flat.data_ptr(), reader.layout.views(flat))
            reader._slots[slot] = known
        return known

    def share(self) -> Lease:
        """Another lease of the same version, which is released by itself."""
        other = Lease(of=self)
        other.reader = self.reader
        return other


@dataclass
class _Slot:
    """Tensors over a slot."""

    flat: Tensor
    address: int
    views: list[Tensor]
    weights: TensorDict | None = None


class WeightReader:
    """Reads complete versions of a channel's weights. :meth:`WeightHandle.open` makes one.

    Threads may share a reader. A forked child may not: it opens the handle again.

    Attributes:
        applied: the version that :meth:`load_into` loaded last.
    """

    def __init__(self, end: _host.Reader, session: str) -> None:
        manifest = Manifest.of(end.manifest())
        if not faulthandler.is_enabled():  # shows what has written to memory that is read-only
            faulthandler.enable(file=2)
        self._end = end
        self.session = session
        self.layout = manifest.layout
        self._timeout = manifest.timeout
        self.on_gpu = manifest.memory["kind"] == "cuda"
        self.memory: Memory = (
            CudaMemory.open(manifest.memory) if self.on_gpu else HostMemory(end, self.layout.nbytes)
        )
        self.device = self.memory.device
        self._slots: dict[int, _Slot] = {}
        # Re-entrant: a reader may be closed by what the garbage collector finds.
        self._lock = threading.RLock()
        self.applied: int | None = None

    @property
    def version(self) -> int | None:
        """The newest version that is published, ``None`` before the first."""
        version = self._end.version()
        return None if version < 0 else version

    @property
    def is_open(self) -> bool:
        """Whether it is not closed, and was opened by this process."""
        return self._end.is_open()

    def require_open(self) -> None:
        """Raise ``RuntimeError`` if this is closed, or was opened by a parent of this process."""
        self._end.require_open()

    def wait_for(self, version: int, timeout: float | None = None) -> int:
        """Wait until ``version`` or a later one is published, and return the newest.

        Args:
            version: at least 0.
            timeout: seconds; the channel's own if ``None``.

        Raises:
            TimeoutError: it was not published in time.
            RuntimeError: the publisher has ended; the message names its process id.
        """
        count("version", version, 0, MAX_VERSION)
        limit = self._timeout if timeout is None else seconds("timeout", timeout)
        deadline = time.monotonic() + limit
        while (newest := self._end.version()) < version:
            ended = self._end.ended()
            remaining = deadline - time.monotonic()
            if ended is None and remaining > 0:
                self._end.wait(version, min(remaining, SLICE_S))
            elif (newest := self._end.version()) < version:
                raise (TimeoutError if ended is None else RuntimeError)(
                    f"version: expected {version} or later within {limit} s, "
                    f"got {'none' if newest < 0 else newest}, and the publisher "
                    f"(pid {self._end.publisher_pid()}) {ended or 'runs'}; call publish() there or "
                    "raise timeout, or open the handle of a new channel where it has ended"
                )
        return newest

    def lease(self, min_version: int | None = None, timeout: float | None = None) -> Lease:
        """Lease the newest version: it does not change until the lease is released.

        Args:
            min_version: wait for this version or a later one; for the first version if ``None``.
            timeout: seconds to wait; the channel's own if ``None``.

        Raises:
            TimeoutError: no such version was published in time.
            RuntimeError: there is no such version and the publisher has ended; or the current
                stream captures a CUDA graph.
        """
        self.require_open()
        if isinstance(self.memory, CudaMemory):
            self.memory.refuse_capture()
        self.wait_for(0 if min_version is None else min_version, timeout)
        while not (lease := Lease(self._end)).held:
            pass  # the publisher has published another meanwhile
        lease.reader = self
        if isinstance(self.memory, CudaMemory):
            lease.before_release = self.memory.give_back
        return lease

    def follow(self, module: nn.Module, mode: str = "alias", keeps: bool = False) -> Follower:
        """Keep a module at the newest version, between its calls and never during one.

        ``with follower.call() as version:`` encloses a call, such as the policy's in a turn of a
        rollout. A module has one follower for a reader: a second call returns the first one.
        ``state_dict()`` of the module returns copies, and its parameters require no gradients:
        training it would change what a version stands for.

        Args:
            module: as for :meth:`load_into`.
            mode: ``"alias"`` or ``"copy"``, as for :meth:`load_into`. Both hold the version in
                calls alone, so that aliased weights may change between them.
            keeps: in alias mode, hold the version until the next one is loaded.

        Raises:
            TypeError: an entry of the module is not a plain tensor.
            ValueError: the module does not fit, or follows in another mode; another follower has
                some of its parameters; or this process publishes them in the channel.

        Example:
            >>> import torch
            >>> from fusedrl import WeightChannel
            >>> trained, policy = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
            >>> with WeightChannel.create(trained) as channel, channel.handle.open() as reader:
            ...     _ = channel.publish()
            ...     with reader.follow(policy).call() as version:
            ...         print(version, bool((policy.weight == trained.weight).all()))
            1 True
        """
        self.require_open()
        _check_mode(mode)
        for follower in [*FOLLOWERS]:
            if follower.module is module and follower.reader is self:
                if (follower.mode, follower.keeps) != (mode, keeps):
                    raise ValueError(
                        f"mode: expected {follower.mode!r} with keeps={follower.keeps}, as the "
                        f"module follows already, got {mode!r} with keeps={keeps}; close its "
                        "follower first"
                    )
                return follower
        return ModuleFollower(self, module, mode, keeps)

    def load_into(
        self,
        module: nn.Module,
        mode: str = "alias",
        *,
        min_version: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """Load the newest version into a module, and return its number.

        With ``"alias"`` the parameters point to the channel's memory, without a copy, and no longer
        require gradients; buffers are copied, because a forward pass may write to them. The version
        is held until the next one is loaded, the module is gone or the reader closed: on a GPU,
        load on a stream that waits for those that compute with the former one. Other tensors made
        of a parameter do not hold it: clone what has to last. On the CPU that memory is read-only:
        a process that writes to a parameter ends with SIGSEGV, and faulthandler, which every reader
        enables, shows the line. With ``"copy"`` the version is copied into the module's own memory,
        which keeps its addresses (CUDA graphs), dtypes and gradients. Nothing is held afterwards.

        A version that is loaded already is loaded again; compare :attr:`version` with
        :attr:`applied` to avoid it.

        Args:
            module: a module with the names and shapes that the channel was created with; in alias
                mode also with its dtypes and device.
            mode: ``"alias"`` or ``"copy"``.
            min_version, timeout: as for :meth:`lease`.

        Raises:
            ValueError: the module does not fit; the message lists the differences, and the module
                keeps the version that it has.
            TimeoutError, RuntimeError: as for :meth:`lease`.
        """
        self.require_open()
        _check_mode(mode)
        self.wait_for(0 if min_version is None else min_version, timeout)
        # Threads load one after the other, none an older version than the last.
        with self._lock, self.lease(min_version, timeout) as lease:
            target = _LOADED.get(weakref.ref(module))
            if target is None or target.layout is not self.layout:
                former, target = target, Target(module, self.layout)
                if former is not None:
                    former.own()
                _LOADED[weakref.ref(module, _LOADED.pop)] = target
            if mode == "alias":
                target.alias(lease.views, lease.share())
            else:
                target.copy(lease.views)
            self.applied = lease.version
            return lease.version

    def close(self) -> None:
        """End all leases and followers. Modules with aliases get copies of their own.

        Other tensors over their memory, such as ``parameter.data``, may be overwritten from then
        on. On a GPU it waits for the device if a lease is held. In a forked child it does nothing.
        """
        if not self.is_open:
            return
        for follower in [*FOLLOWERS]:
            if follower.reader is self:
                follower.close()
        with self._lock:
            for target in _LOADED.copy().values():
                if target.layout is self.layout:
                    target.own()
            if isinstance(self.memory, CudaMemory) and self._end.leases():
                self.memory.synchronize()
            self._end.close()
            self.memory.close()

    def __enter__(self) -> WeightReader:
        """The reader."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.close()

    def __reduce__(self) -> Any:
        """Refuse to be pickled: only a handle can be sent to another process."""
        raise TypeError(
            "reader: expected a WeightHandle to send to another process, got a WeightReader; send "
            "channel.handle and open it there"
        )


def _check_mode(mode: str) -> None:
    if mode not in ("alias", "copy"):
        raise ValueError(
            f"mode: expected 'alias' or 'copy', got {mode!r}; alias takes no memory, copy keeps the "
            "addresses of the parameters"
        )
