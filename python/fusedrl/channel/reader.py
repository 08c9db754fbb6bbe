"""The reading end of a weight channel."""

from __future__ import annotations

import faulthandler
import logging
import threading
import time
import weakref
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from fusedrl import _host
from fusedrl.channel.checks import MAX_VERSION, count, seconds
from fusedrl.channel.forking import renew_in_children
from fusedrl.channel.loading import Target, own
from fusedrl.channel.memory import Manifest, Memory

logger = logging.getLogger("fusedrl")

# Seconds within which a signal, or the end of the publisher, is noticed.
SLICE_S = 0.05


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
        return self.reader._weights(self._held_slot())

    @property
    def views(self) -> list[Tensor]:
        """As :attr:`weights`, a tensor for each stored entry of the layout, in its order."""
        return self.reader._views(self._held_slot())

    def _held_slot(self) -> int:
        if not self.held:
            raise RuntimeError(
                f"lease: expected one that is held, got version {self.version} after its release; "
                "compute inside the with block, or clone what has to last"
            )
        self.reader.require_open()
        return self.slot

    def share(self) -> Lease:
        """Another lease of the same version, which is released by itself."""
        other = Lease(self)
        other.reader = self.reader
        return other

    def load(self, target: Target, mode: str, keeps: bool = False) -> None:
        """Make a module compute with this version.

        Args:
            target: the module.
            mode: ``"alias"`` or ``"copy"``, as for :meth:`WeightReader.load_into`.
            keeps: in alias mode, lease the version for as long as a parameter lies in its memory.
                Otherwise it has to be held while the module computes.
        """
        if mode not in ("alias", "copy"):
            raise ValueError(
                f"mode: expected 'alias' or 'copy', got {mode!r}; alias takes no memory, copy "
                "keeps the addresses of the parameters"
            )
        if mode == "copy":
            target.copy(self.reader._views(self.slot))
        elif keeps:
            self.reader._keep(self, target)
        else:
            target.alias(self.reader._views(self.slot))


class _SlotViews(NamedTuple):
    """Tensors over a slot, and the address at which they lie in the channel's memory."""

    flat: Tensor
    address: int
    views: list[Tensor]
    weights: list[TensorDict]  # one, once it is asked for


class WeightReader:
    """Reads complete versions of a channel's weights. :meth:`WeightHandle.open` makes one.

    Threads may share a reader. A forked child may not: it opens the handle again.
    """

    def __init__(self, end: _host.Reader, session: str) -> None:
        manifest = Manifest.of(end.manifest())
        if not faulthandler.is_enabled():  # shows what has written to memory that is read-only
            faulthandler.enable(file=2)
        self._end = end
        self.session = session
        self.layout = manifest.layout
        self._timeout = manifest.timeout
        self.memory: Memory = _opened(manifest, end)
        self.device = self.memory.device
        self._slots: dict[int, _SlotViews] = {}
        self._targets: weakref.WeakKeyDictionary[nn.Module, Target] = weakref.WeakKeyDictionary()
        # Memory that owns a lease, and the parameters that were made to lie there.
        self._kept: list[tuple[weakref.ref[torch.UntypedStorage], list[weakref.ref[Tensor]]]] = []
        # Re-entrant: a reader may be closed by what the garbage collector finds.
        self._lock = threading.RLock()
        renew_in_children(self, _lock=threading.RLock)
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
        got = "got none" if self.version is None else f"got {self.version}"
        if state == _host.PublisherState.open:
            return TimeoutError(
                f"version: expected {version} or later within {limit} s, {got}; {publisher} runs: "
                "call publish() there, or raise timeout"
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
            RuntimeError: there is no such version and the publisher has ended.
        """
        return self._lease(min_version, timeout, apply=True)

    def _lease(self, min_version: int | None, timeout: float | None, apply: bool) -> Lease:
        limit = self._timeout if timeout is None else seconds("timeout", timeout)
        deadline = time.monotonic() + limit
        newest = self.wait_for(0 if min_version is None else min_version, limit)
        while not (lease := Lease(self._end, apply)).held:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"timeout: expected to hold a version within {limit} s, got a publisher (pid "
                    f"{self._end.publisher_pid()}) that writes them faster, {newest} and later; "
                    "publish less often, or create the channel with more slots"
                )
        try:
            self.memory.before_read(lease.slot)
        except BaseException:
            lease.release()  # the traceback of the error would keep it
            raise
        if self.memory.asynchronous:
            lease.before_release = self._release_later
        lease.reader = self
        return lease

    def _of_slot(self, slot: int) -> _SlotViews:
        known = self._slots.get(slot)
        # Pickling a view for another process moves its storage into other shared memory.
        if known is None or known.flat.data_ptr() != known.address:
            flat = self.memory.slot(slot)
            known = _SlotViews(flat, flat.data_ptr(), self.layout.views(flat), [])
            self._slots[slot] = known
        return known

    def _views(self, slot: int) -> list[Tensor]:
        return self._of_slot(slot).views

    def _keep(self, lease: Lease, target: Target) -> None:
        """Make a module's parameters lie in memory that owns a lease of its own."""
        views, flat = self._views(lease.slot), self.memory.slot(lease.slot, lease.share())
        with torch.inference_mode(False):
            target.alias(views, flat)
        with self._lock:
            parameters = list(map(weakref.ref, target.parameters))
            self._kept = [kept for kept in self._kept if kept[0]() is not None]
            self._kept.append((weakref.ref(flat.untyped_storage()), parameters))

    def _weights(self, slot: int) -> TensorDict:
        known = self._of_slot(slot)
        if not known.weights:
            known.weights.append(self.layout.tensordict(known.views).lock_())
        return known.weights[0]

    def _release_later(self, slot: int) -> None:
        """Hold a slot until the work that the current stream has so far is done."""
        self.memory.keep_while_read(slot, _host.Lease(self._end, slot))

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
        require gradients. The version is held until the next one is loaded. On a GPU, load the next
        one on a stream that waits for those that compute with this one. On the CPU that memory
        is read-only: a process that writes to a parameter ends with SIGSEGV, and faulthandler,
        which every reader enables, shows the line that wrote. Buffers are copied, because a
        forward pass may write to them.
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
        target = self._targets.get(module)
        if target is None:
            target = self._targets[module] = Target(module, self.layout)
        self.wait_for(0 if min_version is None else min_version, timeout)
        # Threads load one after the other, none an older version than the last.
        with self._lock, self._lease(min_version, timeout, apply=False) as lease:
            lease.load(target, mode, keeps=True)
            self._end.applied(lease.version)
            self._applied = lease.version
            return lease.version

    def close(self) -> None:
        """End all leases. Modules that were loaded by alias get copies of their own.

        Other tensors over their memory, such as ``parameter.data``, may be overwritten from then
        on; a warning is logged if there are any.
        """
        with self._lock:
            for storage, references in self._kept:
                parameters = [p for reference in references if (p := reference()) is not None]
                own([p for p in parameters if p.untyped_storage() is storage()])
            # Parameters that are being freed are gone before their memory is.
            if self._end.leased() and any(
                storage() is not None and all(reference() is not None for reference in references)
                for storage, references in self._kept
            ):
                logger.warning(
                    "close: expected no tensors over a version but parameters, got some made of "
                    "them, which may be overwritten now; clone such tensors, or close the reader "
                    "after their last use"
                )
            if self.memory.asynchronous:
                for slot in self._end.leased():
                    self._release_later(slot)
            self._end.end_leases()
            self.memory.when_read(self._end.close)
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


def _opened(manifest: Manifest, end: _host.Reader) -> Memory:
    """The slots that a channel's manifest describes, in a reader's process."""
    if manifest.memory["kind"] == "cuda":
        from fusedrl.channel.cuda import CudaMemory

        return CudaMemory.open(manifest.memory)
    return Memory(end, end.slot_count(), manifest.layout.nbytes)
