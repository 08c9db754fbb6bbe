"""Slots in a GPU's memory: allocated by the publisher, mapped by readers of the same machine."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import queue
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedrl import _host
from fusedrl.channel.memory import Memory

__all__ = ["CudaMemory"]

# CUDA exports memory in whole blocks of this size, so each slot has blocks of its own.
_BLOCK = 2 << 20
# Seconds between two looks whether a GPU has finished with a slot.
_POLL_S = 0.0005
_GIVE_BACK_S = 5.0

_Poll = Callable[[], bool]
logger = logging.getLogger("fusedrl")


class _Driver(_host.CudaDriver):
    """The CUDA driver, and the stream that torch launches on."""

    def current_stream(self, device: int) -> int:
        return torch.cuda.current_stream(device).cuda_stream


_DRIVER = _Driver()


class CudaMemory(Memory):
    """The slots in a GPU's memory, as one process sees them.

    Copies and kernels are asynchronous: events order the streams of the publisher and the readers,
    and no thread that computes waits for a device. A slot stays mapped until the last tensor over
    it is freed, whatever was closed before; a thread unmaps it then.

    Example:
        >>> from fusedrl.channel.cuda import CudaMemory
        >>> memory = CudaMemory.create(torch.device("cuda"), 3, 1 << 30)  # doctest: +SKIP
        >>> there = CudaMemory.open(memory.manifest())  # in another process # doctest: +SKIP
    """

    asynchronous = True

    def __init__(self, driver: Any, ordinal: int, slots: Iterable[_Slot], nbytes: int) -> None:
        self._driver, self._ordinal, self._nbytes = driver, ordinal, nbytes
        self._slots = list(slots)
        self.count = len(self._slots)
        self._closed = False
        self._releases = Releases()
        # As torch names it, with the index, so that it compares equal to the device of parameters.
        self.device = self.slot(0).device

    @classmethod
    def create(
        cls, device: torch.device | str, slots: int, nbytes: int, *, driver: Any = None
    ) -> CudaMemory:
        """Allocate slots that other processes can open.

        The memory comes from the driver, not from torch's caching allocator, and is rounded up to
        2 MiB.

        Args:
            device: of the slots; without an index, the current one.
            slots: how many.
            nbytes: size of one slot in bytes.
            driver: replaces the CUDA driver, in tests.

        Raises:
            ValueError: a device that is not a CUDA device.
            RuntimeError: no CUDA driver, too little memory, or a device that cannot share memory.
        """
        driver = driver or _DRIVER
        device = torch.device(device)
        if device.type != "cuda":
            raise ValueError(f"device: expected a CUDA device, got {device}; name one as 'cuda:0'")
        index = device.index
        ordinal = torch.cuda.current_device() if index is None else index
        _wait_for_dropped_memory()
        made = [_Slot.allocate(driver, ordinal, nbytes) for _ in range(slots)]
        _slots.update({(_process(), _process(), slot.memory_handle): slot for slot in made})
        return cls(driver, ordinal, made, nbytes)

    @classmethod
    def open(cls, manifest: dict[str, Any], *, driver: Any = None) -> CudaMemory:
        """Open the slots that another process's ``manifest()`` describes.

        A slot that this process has open already is shared; one of its own is used as it is.

        Args:
            manifest: that of the publisher's memory.
            driver: replaces the CUDA driver, in tests.

        Raises:
            RuntimeError: a device that this process does not see, or a publisher that is gone.
        """
        driver = driver or _DRIVER
        ordinal = _ordinal(driver, manifest["uuid"])
        _wait_for_dropped_memory()
        slots = [
            _opened(driver, ordinal, manifest["process"], **each) for each in manifest["slots"]
        ]
        return cls(driver, ordinal, slots, manifest["nbytes"])

    def slot(self, index: int, lease: _host.Lease | None = None) -> Tensor:
        """The slot as a flat uint8 tensor, which may outlive this object and owns ``lease``."""
        slot = self._slot(index)
        capsule = self._driver.tensor(slot.address, self._nbytes, self._ordinal, (slot, lease))
        return torch.from_dlpack(capsule)

    def before_write(self, index: int) -> None:
        """The current stream waits for the slot's previous write, on whichever stream that was."""
        self._driver.stream_wait_event(self._ordinal, self._stream(), self._slot(index).written)

    def after_write(self, index: int) -> None:
        """Mark the slot as written once the current stream's work so far is done."""
        self._driver.record_event(self._ordinal, self._slot(index).written, self._stream())

    def before_read(self, index: int) -> None:
        """The current stream waits for the slot's last write; this thread does not."""
        self._driver.stream_wait_event(self._ordinal, self._stream(), self._slot(index).written)

    def after_read(self, index: int) -> _Poll:
        """A function that tells whether the current stream's work so far is done with the slot."""
        slot = self._slot(index)
        for poll in tuple(slot.in_flight):
            if poll():
                slot.in_flight.discard(poll)
        poll = _recorded(self._driver, self._ordinal, self._stream())
        slot.in_flight.add(poll)
        return poll

    def give_back(self, index: int, lease: int) -> None:
        """See :class:`Memory`."""
        self._releases.add(_Given(lease), self.after_read(index))

    def wait_for_reads(self) -> None:
        """See :class:`Memory`."""
        done = _recorded(self._driver, self._ordinal, self._stream())
        while not done() or self._releases.thread is not None:
            time.sleep(_POLL_S)

    def manifest(self) -> dict[str, Any]:
        """What another process needs to open the slots, in types that JSON has."""
        exports = [
            {"memory": slot.memory_handle.hex(), "event": slot.event_handle.hex()}
            for slot in self._slots
        ]
        uuid = self._driver.uuid(self._ordinal)
        return {
            "kind": "cuda",
            "uuid": uuid,
            "process": _process(),
            "nbytes": self._nbytes,
            "slots": exports,
        }

    def close(self, in_use_by: Sequence[int] = ()) -> None:
        """Give up the slots; each is unmapped, or freed, with the last tensor over it.

        Args:
            in_use_by: processes that may still compute with slots of this process. It would be
                undefined behaviour to free these, so they stay allocated until this process ends.
        """
        if in_use_by and self._slots:
            logger.warning(
                "%d slots of %d bytes on %s stay allocated until this process ends: the processes "
                "%s may still read them; close their readers first",
                *(len(self._slots), self._nbytes, self.device, ", ".join(map(str, in_use_by))),
            )
            _kept.extend(self._slots)
        self._closed = True
        self._slots.clear()

    def _slot(self, index: int) -> _Slot:
        if self._closed:
            raise RuntimeError(
                "memory: expected open slots, got closed ones; open the handle again"
            )
        return self._slots[index]

    def _stream(self) -> int:
        stream = self._driver.current_stream(self._ordinal)
        if self._driver.capturing(self._ordinal, stream):
            raise RuntimeError(
                "stream: expected one that is not capturing, got a CUDA graph's capture, which "
                "would keep a slot's address but not its lease; load with mode='copy' before the "
                "capture"
            )
        return stream


class _Slot:
    """Device memory and the event of its last write; tensors over it keep it alive."""

    def __init__(self, address: int, written: int, handles: tuple[bytes, bytes]) -> None:
        self.address, self.written = address, written
        self.memory_handle, self.event_handle = handles
        self.in_flight: set[_Poll] = set()  # reads of this process that may not be done

    @classmethod
    def allocate(cls, driver: Any, ordinal: int, nbytes: int) -> _Slot:
        address = driver.allocate(ordinal, max(-(-nbytes // _BLOCK), 1) * _BLOCK)
        try:
            written = driver.create_event(ordinal, True)
        except BaseException:
            driver.free(ordinal, address)
            raise
        try:
            handles = driver.export_memory(ordinal, address), driver.export_event(ordinal, written)
        except BaseException:
            driver.destroy_event(ordinal, written)
            driver.free(ordinal, address)
            raise
        slot = cls(address, written, handles)
        slot._on_drop(driver, ordinal, driver.free, lambda: driver.event_done(ordinal, written))
        return slot

    @classmethod
    def open(cls, driver: Any, ordinal: int, memory: bytes, event: bytes) -> _Slot:
        address = driver.open_memory(ordinal, memory)
        try:
            written = driver.open_event(ordinal, event)
        except BaseException:
            driver.close_memory(ordinal, address)
            raise
        slot = cls(address, written, (memory, event))
        slot._on_drop(driver, ordinal, driver.close_memory)
        return slot

    def _on_drop(
        self, driver: Any, ordinal: int, give_back: Callable[[int, int], None], *writes: _Poll
    ) -> None:
        address, written, reads = self.address, self.written, self.in_flight

        def close() -> bool:
            if not all(poll() for poll in (*writes, *reads)):
                return False
            give_back(ordinal, address)
            driver.destroy_event(ordinal, written)
            return True

        # Not at exit: tensors may still be in use then, and the driver frees all memory anyway.
        weakref.finalize(self, _dropped.put, close).atexit = False


# The slots that this process has, whose handles CUDA does not let it open again: by this process,
# the one that has allocated them, and handle. An entry disappears with the last tensor over its
# slot, and a forked child has none.
_slots: weakref.WeakValueDictionary[tuple[str, str, bytes], _Slot] = weakref.WeakValueDictionary()
_opening = threading.Lock()
_kept: list[_Slot] = []
# What gives back the memory of each slot that is dropped, or tells that its device works with it. A
# thread calls it: the driver may wait for the device there, and a slot is dropped anywhere.
_dropped: queue.SimpleQueue[_Poll | None] = queue.SimpleQueue()
_giver: threading.Thread | None = None
# Events that have completed and can be recorded again, by driver and device.
_events: weakref.WeakKeyDictionary[Any, dict[int, list[int]]] = weakref.WeakKeyDictionary()
_TOKEN = secrets.token_hex(8)


def _renew() -> None:
    global _opening, _dropped, _giver
    _opening, _dropped, _giver = threading.Lock(), queue.SimpleQueue(), None


# In a child, the lock may belong to a thread that does not exist there.
os.register_at_fork(after_in_child=_renew)


def _process() -> str:
    """A name of this process: other containers reuse the pid, and forked children the token."""
    return f"{os.getpid()}-{_TOKEN}"


def _opened(driver: Any, ordinal: int, process: str, memory: str, event: str) -> _Slot:
    handles = bytes.fromhex(memory), bytes.fromhex(event)
    key = (_process(), process, handles[0])
    with _opening:
        slot = _slots.get(key)
        if slot is None and process == _process():
            raise RuntimeError(
                "handle: expected an open channel, got one that this process has closed; open the "
                "handle of a new channel"
            )
        if slot is None:
            slot = _slots[key] = _Slot.open(driver, ordinal, *handles)
    return slot


def _ordinal(driver: Any, uuid: str) -> int:
    """The index of the device with that UUID in this process, by its CUDA_VISIBLE_DEVICES."""
    seen = [driver.uuid(ordinal) for ordinal in range(driver.device_count())]
    if uuid not in seen:
        raise RuntimeError(
            f"device: expected the publisher's, with the UUID {uuid}, got {seen or 'none'} in this "
            "process; add it to CUDA_VISIBLE_DEVICES, or create the channel with device='cpu'"
        )
    return seen.index(uuid)


def _give_back(dropped: queue.SimpleQueue[_Poll | None]) -> None:
    """Give back what is dropped, once its device has finished with it; ``None`` ends the thread."""
    while (close := dropped.get()) is not None:
        try:
            done = close()
        except Exception:  # or the slots that are dropped after this one would stay, too
            logger.exception("a slot's memory on a GPU stays allocated until this process ends")
            continue
        if not done:
            dropped.put(close)
            time.sleep(_POLL_S)


def _wait_for_dropped_memory() -> None:
    """Wait until what was dropped is given back, but for memory that a device works with.

    For some seconds at most: the driver may not return, and no thread is left where Python exits.
    """
    global _giver
    with _opening:
        if _giver is None:
            giver = threading.Thread(target=_give_back, args=(_dropped,), daemon=True)
            giver.start()
            _giver = giver
            # It should not be in a call of the driver when the interpreter is gone.
            atexit.register(giver.join, _GIVE_BACK_S)
            atexit.register(_dropped.put, None)
    tried = threading.Event()
    _dropped.put(lambda: tried.set() is None)
    tried.wait(_GIVE_BACK_S)


def _recorded(driver: Any, ordinal: int, stream: int) -> _Poll:
    """A function that tells whether the stream's work so far is done; it returns its event then."""
    free = _events.setdefault(driver, {}).setdefault(ordinal, [])
    try:
        event = free.pop()
    except IndexError:
        event = driver.create_event(ordinal, False)
    driver.record_event(ordinal, event, stream)
    held = [event]

    def done() -> bool:
        try:
            if not driver.event_done(ordinal, held[0]):
                return False
            free.append(held.pop())
        except IndexError:  # an earlier call, maybe on another thread, has seen that it is done
            pass
        return True

    return done


class _Given:
    """A lease that is given back when this is dropped, by its address."""

    _give_back = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_host.give_back)

    def __init__(self, lease: int) -> None:
        self._lease = lease

    def __del__(self) -> None:
        self._give_back(self._lease)


class Releases:
    """Holds slots until their readers' computation has ended.

    A thread polls for as long as there are any.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[Any, Callable[[], bool]]] = deque()
        # Re-entrant: the garbage collector may run while the lock is held, and release leases.
        self._lock = threading.RLock()
        self.thread: threading.Thread | None = None  # that gives back what is pending

    def add(self, hold: Any, done: Callable[[], bool]) -> None:
        """Keep ``hold``, which releases its slot when it is dropped, until ``done()`` is true."""
        if done():
            return
        with self._lock:
            self._pending.append((hold, done))
            if self.thread is None:
                thread = threading.Thread(target=self._poll, daemon=True)
                thread.start()
                self.thread = thread

    def _poll(self) -> None:
        while True:
            with self._lock:
                for _ in range(len(self._pending)):
                    hold, done = self._pending.popleft()
                    if not done():
                        self._pending.append((hold, done))
                    del hold
                if not self._pending:
                    self.thread = None
                    break
            time.sleep(_POLL_S)
