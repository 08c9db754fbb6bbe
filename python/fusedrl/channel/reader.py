"""The reading end of a weight channel."""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from types import TracebackType
from typing import Any

from tensordict import TensorDict
from torch import Tensor, nn

from fusedrl import _host
from fusedrl.channel.alias_leases import AliasLeases
from fusedrl.channel.checks import MAX_VERSION, count, seconds
from fusedrl.channel.forking import renew_in_children
from fusedrl.channel.loading import Target
from fusedrl.channel.manifest import Manifest
from fusedrl.channel.memory import Memory, checksum, open_memory
from fusedrl.channel.releases import Releases

# Seconds within which a signal, or the end of the publisher, is noticed.
SLICE_S = 0.05


class Lease:
    """One complete version of the weights, unchanged for as long as the lease is held.

    Attributes:
        version: the number of the version that :attr:`weights` are.
    """

    __slots__ = ("__weakref__", "_reader", "_slot", "version")

    def __init__(self, reader: WeightReader, slot: int, version: int) -> None:
        self._reader: WeightReader | None = reader
        self._slot = slot
        self.version = version

    @property
    def weights(self) -> TensorDict:
        """Read-only views of the channel's memory, nested as the dots of the names say.

        Raises:
            RuntimeError: the lease is released, its reader is closed, or this is a forked child.
        """
        if self._reader is None:
            raise RuntimeError(
                f"lease: expected one that is held, got version {self.version} after its release; "
                "compute inside the with block, or clone what has to last"
            )
        self._reader._end.require_open()
        return self._reader._weights(self._slot)

    def release(self) -> None:
        """Give the slot back to the publisher, once the computation so far has ended.

        On a GPU the slot is free when the work that the current stream has so far is done. Order
        work on other streams before it.
        """
        if self._reader is not None:
            self._reader._release(self._slot)
            self._reader = None

    def __enter__(self) -> Lease:
        """The lease."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Release it."""
        self.release()

    def __del__(self) -> None:
        """Warn of a lease that nobody can release any more."""
        # Its weights may still be in use, so the slot stays locked.
        if self._reader is not None:
            warnings.warn(
                f"a lease of version {self.version} was dropped without release(): its slot stays "
                "taken; use it as a context manager",
                ResourceWarning,
                stacklevel=2,
            )


class WeightReader:
    """Reads complete versions of a channel's weights. :meth:`WeightHandle.open` makes one.

    Threads may share a reader. A forked child may not: it opens the handle again.
    """

    def __init__(self, end: _host.Reader) -> None:
        manifest = Manifest.of(end.manifest())
        self._end = end
        self.layout = manifest.layout
        self._timeout = manifest.timeout
        self._checksum = manifest.checksum
        self._memory: Memory = open_memory(manifest.memory, end, self.layout.nbytes)
        self._reports_writes = False
        self.device = self._memory.device
        self._flat_of: dict[int, tuple[Tensor, int]] = {}
        self._views_of: dict[int, list[Tensor]] = {}
        self._weights_of: dict[int, TensorDict] = {}
        self._verified: dict[int, int] = {}
        self._targets: weakref.WeakKeyDictionary[nn.Module, Target] = weakref.WeakKeyDictionary()
        self._alias_leases = AliasLeases()
        self._leases: weakref.WeakSet[Lease] = weakref.WeakSet()
        # Re-entrant: a reader may be closed by what the garbage collector finds.
        self._lock = threading.RLock()
        renew_in_children(self, _lock=threading.RLock)
        self._releases = Releases(end.release)
        self._applied: int | None = None

    @property
    def version(self) -> int | None:
        """The newest version that is published, ``None`` before the first."""
        version = self._end.version()
        return None if version < 0 else version

    @property
    def applied(self) -> int | None:
        """The version that :meth:`load_into` loaded last."""
        return self._applied

    def is_publisher_dead(self) -> bool:
        """Whether the publisher has ended without closing the channel."""
        return self._end.publisher() == _host.PublisherState.dead

    def wait_for(self, version: int, timeout: float | None = None) -> int:
        """Wait until ``version`` or a later one is published, and return the newest.

        Args:
            version: at least 0.
            timeout: seconds; the channel's own if ``None``.

        Raises:
            TimeoutError: it was not published in time.
            RuntimeError: the publisher has ended (the message names its process id), or the
                channel's memory is damaged.
        """
        count("version", version, 0, MAX_VERSION)
        limit = self._timeout if timeout is None else seconds("timeout", timeout)
        deadline = time.monotonic() + limit
        while (newest := self._end.version()) < version:
            state = self._end.publisher()
            remaining = deadline - time.monotonic()
            if state == _host.PublisherState.open and remaining > 0:
                self._end.wait(version, min(remaining, SLICE_S))
            elif self._end.version() < version:
                raise self._waited_in_vain(version, limit, state)
        return newest

    def _waited_in_vain(
        self, version: int, limit: float, state: _host.PublisherState
    ) -> RuntimeError | TimeoutError:
        publisher = f"the publisher (pid {self._end.publisher_pid()})"
        got = f"got {self.version}" if self.version is not None else "got none"
        if state == _host.PublisherState.open and self.version is None:
            return TimeoutError(
                f"version: expected {f'{version} or later' if version else 'a first one'} within "
                f"{limit} s, got none; {publisher} runs and has published nothing yet: call "
                "publish() there, or raise timeout"
            )
        if state == _host.PublisherState.open:
            return TimeoutError(
                f"version: expected {version} or later within {limit} s, {got}; {publisher} runs: "
                "raise timeout, or see what it waits for"
            )
        ended = "closed the channel" if state == _host.PublisherState.closed else "is dead"
        return RuntimeError(
            f"version: expected {version} or later, {got}, and {publisher} {ended}; what was "
            "published can still be leased: open the handle of a new channel for more"
        )

    def lease(self, min_version: int | None = None, timeout: float | None = None) -> Lease:
        """Lease the newest version: it does not change until the lease is released.

        Args:
            min_version: wait for this version or a later one; for the first version if ``None``.
            timeout: seconds to wait; the channel's own if ``None``.

        Raises:
            TimeoutError: no such version was published in time.
            RuntimeError: there is no such version and the publisher has ended, the bytes do not
                have the checksum that the publisher wrote, or the channel's memory is damaged.
        """
        return self._lease(min_version, timeout, apply=True)

    def _lease(self, min_version: int | None, timeout: float | None, apply: bool) -> Lease:
        limit = self._timeout if timeout is None else seconds("timeout", timeout)
        deadline = time.monotonic() + limit
        newest = self.wait_for(0 if min_version is None else min_version, limit)
        while (leased := self._end.lease(apply)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"timeout: expected to hold a version within {limit} s, got a publisher (pid "
                    f"{self._end.publisher_pid()}) that writes them faster, {newest} and later; "
                    "publish less often, or create the channel with more slots"
                )
        slot, version = leased
        try:
            self._memory.before_read(slot)
            if self._checksum and self._verified.get(slot) != version:
                self._verify(slot, version)
        except BaseException:
            self._end.release(slot)
            raise
        lease = Lease(self, slot, version)
        with self._lock:
            self._leases.add(lease)
        return lease

    def _verify(self, slot: int, version: int) -> None:
        written, read = self._end.checksum(slot), checksum(self._memory.slot(slot))
        if written != read:
            raise RuntimeError(
                f"checksum: expected {written:#x} for version {version}, got {read:#x}; something "
                "else writes into the channel's memory, or the memory is faulty"
            )
        self._verified[slot] = version

    def _views(self, slot: int) -> list[Tensor]:
        flat, address = self._flat_of.get(slot, (None, 0))
        # Pickling a view for another process moves its storage into other shared memory.
        if flat is None or flat.data_ptr() != address:
            flat = self._memory.slot(slot)
            self._flat_of[slot] = flat, flat.data_ptr()
            self._views_of[slot] = self.layout.views(flat)
            self._weights_of.pop(slot, None)
        return self._views_of[slot]

    def _lent(self, slot: int) -> list[Tensor]:
        """As :meth:`_views`, for use outside: a write to them fails with a report that says why."""
        if not self._reports_writes:
            self._end.report_writes([(e.offset, e.name) for e in self.layout.stored])
            self._reports_writes = True
        return self._views(slot)

    def _weights(self, slot: int) -> TensorDict:
        views = self._lent(slot)
        weights = self._weights_of.get(slot)
        if weights is None:
            weights = self._weights_of[slot] = self.layout.tensordict(views).lock_()
        return weights

    def _release(self, slot: int) -> None:
        self._releases.add(slot, self._memory.after_read(slot))

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
        require gradients. The version is held until the next one is loaded. On the CPU that memory
        is read-only: a process that writes to a parameter ends with SIGSEGV, after a line on stderr
        that names the parameter. Buffers are copied, because a forward pass may write to them.
        With ``"copy"`` the version is copied into the module's own memory, which keeps its
        addresses (CUDA graphs), dtypes and gradients. Nothing is held afterwards.

        A version that is loaded already is loaded again; compare :attr:`version` with
        :attr:`applied` to avoid it.

        Args:
            module: a module with the names and shapes that the channel was created with; in alias
                mode also with its dtypes and device.
            mode: ``"alias"`` or ``"copy"``.
            min_version: as for :meth:`lease`.
            timeout: as for :meth:`lease`.

        Raises:
            ValueError: the module does not fit; the message lists the differences, and the module
                keeps the version that it has.
            TimeoutError, RuntimeError: as for :meth:`lease`.
        """
        if mode not in ("alias", "copy"):
            raise ValueError(
                f"mode: expected 'alias' or 'copy', got {mode!r}; alias takes no memory, copy "
                "keeps the addresses of the parameters"
            )
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"module: expected a module, got {type(module).__name__}; pass the torch.nn.Module "
                "that computes with the weights"
            )
        target = self._targets.get(module)
        if target is None:
            target = self._targets[module] = Target(module, self.layout)
        self.wait_for(0 if min_version is None else min_version, timeout)
        with self._lock:  # threads load one after the other, none an older version than the last
            lease = self._lease(min_version, timeout, apply=False)
            try:
                if mode == "alias":
                    target.alias(self._lent(lease._slot))
                else:
                    target.copy(self._views(lease._slot))
            except BaseException:
                lease.release()
                raise
            if mode == "alias":
                self._alias_leases.hold(target.parameters, lease.release)
            else:
                self._alias_leases.forget(target.parameters)
                lease.release()
            self._end.applied(lease.version)
            self._applied = lease.version
            return lease.version

    def close(self) -> None:
        """End all leases. Modules that were loaded by alias get copies of their own."""
        with self._lock:
            self._alias_leases.close()
            for lease in list(self._leases):
                lease.release()
            self._releases.close(self._end.close)
            self._memory.close()

    def __enter__(self) -> WeightReader:
        """The reader."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    def __reduce__(self) -> Any:
        """Refuse to be pickled: only a handle can be sent to another process."""
        raise TypeError(
            "reader: expected a WeightHandle to send to another process, got a WeightReader; send "
            "channel.handle and open it there"
        )
