"""The reading end of a weight channel."""

from __future__ import annotations

import faulthandler
import logging
import threading
import time
import weakref
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from fusedrl import _host
from fusedrl.channel.checks import MAX_VERSION, count, seconds
from fusedrl.channel.cuda import CudaMemory
from fusedrl.channel.layout import Layout
from fusedrl.channel.loading import Target, own
from fusedrl.channel.memory import HostMemory, Memory, described

logger = logging.getLogger("fusedrl")

# Seconds within which a signal, or the end of the publisher, is noticed.
SLICE_S = 0.05


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
        return self._tensors().weights

    @property
    def views(self) -> list[Tensor]:
        """As :attr:`weights`, a tensor for each stored entry of the layout, in its order."""
        return self._tensors().views

    def _tensors(self) -> _SlotTensors:
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
            known = reader._slots[slot] = _SlotTensors(reader.memory.slot(slot), reader.layout)
        return known

    def share(self) -> Lease:
        """Another lease of the same version, which is released by itself."""
        other = Lease(of=self)
        other.reader = self.reader
        return other

    def load(self, target: Target, mode: str, keeps: bool = False) -> None:
        """Make a module compute with this version, by ``mode="alias"`` or ``"copy"``.

        An alias has a lease of its own if it ``keeps`` the version; else hold this one meanwhile.
        """
        if mode not in ("alias", "copy"):
            raise ValueError(
                f"mode: expected 'alias' or 'copy', got {mode!r}; alias takes no memory, copy "
                "keeps the addresses of the parameters"
            )
        if mode == "copy":
            target.copy(self.views)
        elif not keeps:
            target.alias(self.views)
        else:
            flat = self.reader.memory.slot(self.slot, self.share())
            with torch.inference_mode(False):
                target.alias(self.views, flat)
            kept = weakref.ref(flat.untyped_storage()), [*map(weakref.ref, target.parameters)]
            with self.reader._lock:
                self.reader._kept = [kept, *(k for k in self.reader._kept if k[0]() is not None)]


class _SlotTensors:
    """Tensors over a slot."""

    def __init__(self, flat: Tensor, layout: Layout) -> None:
        self.flat, self.address, self._layout = flat, flat.data_ptr(), layout
        self.views = layout.views(flat)

    @cached_property
    def weights(self) -> TensorDict:
        return self._layout.tensordict(self.views).lock_()


class WeightReader:
    """Reads complete versions of a channel's weights. :meth:`WeightHandle.open` makes one.

    Threads may share a reader. A forked child may not: it opens the handle again.

    Attributes:
        applied: the version that :meth:`load_into` loaded last.
    """

    def __init__(self, end: _host.Reader, session: str) -> None:
        self.layout, self._timeout, memory = described(end.manifest())
        if not faulthandler.is_enabled():  # shows what has written to memory that is read-only
            faulthandler.enable(file=2)
        self._end = end
        self.session = session
        self.on_gpu = memory["kind"] == "cuda"
        self.memory: Memory = (
            CudaMemory.open(memory) if self.on_gpu else HostMemory(end, self.layout.nbytes)
        )
        self.device = self.memory.device
        self._slots: dict[int, _SlotTensors] = {}
        self._targets: weakref.WeakKeyDictionary[nn.Module, Target] = weakref.WeakKeyDictionary()
        # Memory that owns a lease, and the parameters that were made to lie there.
        self._kept: list[tuple[weakref.ref[torch.UntypedStorage], list[weakref.ref[Tensor]]]] = []
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
        is held until the next one is loaded: on a GPU, load that on a stream that waits for those
        that compute with this one. On the CPU that memory is read-only: a process that writes to a
        parameter ends with SIGSEGV, and faulthandler, which every reader enables, shows the line.
        With ``"copy"`` the version is copied into the module's own memory, which keeps its
        addresses (CUDA graphs), dtypes and gradients. Nothing is held afterwards.

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
        target = self._targets.get(module)
        target = target or self._targets.setdefault(module, Target(module, self.layout))
        self.wait_for(0 if min_version is None else min_version, timeout)
        # Threads load one after the other, none an older version than the last.
        with self._lock, self.lease(min_version, timeout) as lease:
            lease.load(target, mode, keeps=True)
            self.applied = lease.version
            return lease.version

    def close(self) -> None:
        """End all leases. Modules that were loaded by alias get copies of their own.

        Other tensors over their memory, such as ``parameter.data``, may be overwritten from then
        on; a warning is logged if there are any. On a GPU it waits for the device if a lease is
        held. In a forked child it does nothing.
        """
        if not self.is_open:
            return
        with self._lock:
            is_used = False
            for storage, references in self._kept:
                parameters = [p for reference in references if (p := reference()) is not None]
                own([p for p in parameters if p.untyped_storage() is storage()])
                # Parameters that are being freed are gone before their memory is.
                is_used |= storage() is not None and len(parameters) == len(references)
            if is_used:
                logger.warning(
                    "close: expected no tensors over a version but parameters, got some made of "
                    "them, which may be overwritten now; clone such tensors, or close the reader "
                    "after their last use"
                )
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
            "channel: expected a WeightHandle to send to another process, got a "
            f"{type(self).__name__}; send channel.handle and open it there"
        )
