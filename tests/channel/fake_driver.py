"""A CUDA driver whose device memory is memory of the host, and whose streams are threads.

It keeps the order of what is launched on a stream, and no other: what the code under test does not
order by events runs in whatever order the delays give. Memory that was closed holds ``POISON``.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import queue
import secrets
import struct
import threading
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.utils import dlpack
from torch.utils._python_dispatch import TorchDispatchMode

POISON = 0xDD
DEFAULT_STREAM = 0
_HANDLE = struct.Struct("<IIQ16s32x")  # pid, file descriptor, size, the file's name
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_PRIVATE, _FIXED, _ANONYMOUS = 0x02, 0x10, 0x20


class FakeDriver:
    """A process's driver; another instance is another process's, also in the same process.

    Args:
        devices: the UUIDs of the devices, in this process's order.
    """

    def __init__(self, devices=("gpu-a", "gpu-b")):
        self.devices = list(devices)
        self.calls = Counter()
        self.violations: list[str] = []
        self.is_capturing = False
        self._files: dict[int, tuple[int, bytes, int, str]] = {}  # fd, name, size, UUID by address
        self._opened: dict[bytes, list[int]] = {}  # handle: address, count
        self._events: dict[int, ctypes.Array] = {}  # recorded, done
        self._numbers = itertools.count(1)
        self._streams: dict[int, queue.SimpleQueue] = {}
        self._busy: list[tuple[int, int]] = []  # what launched copies touch
        self._local = threading.local()

    # What the driver has.

    def version(self):
        return 13000

    def device_count(self):
        return len(self.devices)

    def uuid(self, device):
        return self.devices[device]

    def allocate(self, device, nbytes):
        self.calls["allocate"] += 1
        return self._new_file(nbytes, self.devices[device])

    def free(self, device, address):
        self.calls["free"] += 1
        fd, _, size, uuid = self._files.pop(address)
        assert uuid == self.devices[device]
        os.close(fd)
        self._unmap(address, size)

    def export_memory(self, device, address):
        fd, name, size, uuid = self._files[address]
        assert uuid == self.devices[device]
        return _HANDLE.pack(os.getpid(), fd, size, name)

    def open_memory(self, device, handle):
        self.calls["open"] += 1
        if handle in self._opened:
            self._opened[handle][1] += 1
            return self._opened[handle][0]
        address, _ = self._map_other(handle)
        self._opened[handle] = [address, 1]
        return address

    def close_memory(self, device, address):
        self.calls["close"] += 1
        (handle,) = [each for each, (known, _) in self._opened.items() if known == address]
        self._opened[handle][1] -= 1
        if not self._opened[handle][1]:
            del self._opened[handle]
            self._unmap(address, _HANDLE.unpack(handle)[2])

    def create_event(self, device, interprocess):
        self.calls["create_event"] += 1
        return self._new_event(self._new_file(16, self.devices[device]))

    def export_event(self, device, event):
        return self.export_memory(device, ctypes.addressof(self._events[event]))

    def open_event(self, device, handle):
        self.calls["open_event"] += 1
        return self._new_event(self._map_other(handle)[0])

    def destroy_event(self, device, event):
        self.calls["destroy_event"] += 1
        address = ctypes.addressof(self._events.pop(event))
        if address in self._files:
            os.close(self._files.pop(address)[0])

    def record_event(self, device, event, stream):
        state = self._events[event]
        state[0] += 1
        self._launch(stream, lambda number=state[0]: state.__setitem__(1, number))

    def stream_wait_event(self, device, stream, event):
        state = self._events[event]
        number = state[0]  # of the last record so far: later ones are not waited for

        def wait():
            while state[1] < number:
                time.sleep(0.001)

        self._launch(stream, wait)

    def event_done(self, device, event):
        recorded, done = self._events[event]
        return done >= recorded

    def capturing(self, device, stream):
        return self.is_capturing

    def tensor(self, address, nbytes, device, owner):
        buffer = (ctypes.c_uint8 * max(nbytes, 1)).from_address(address)
        buffer.owner = owner
        return dlpack.to_dlpack(torch.frombuffer(buffer, dtype=torch.uint8)[:nbytes])

    # What torch has.

    def current_stream(self, device):
        return getattr(self._local, "stream", DEFAULT_STREAM)

    @contextmanager
    def stream(self, stream):
        before, self._local.stream = self.current_stream(0), stream
        try:
            yield
        finally:
            self._local.stream = before

    def copy(self, to: Tensor, source: Tensor, seconds=0.0):
        """Launch a copy on the current stream: its first half, a delay, its second half."""
        span = to.data_ptr(), source.data_ptr()
        self._busy.extend((each, each + to.numel()) for each in span)

        def work():
            half = to.numel() // 2
            to[:half].copy_(source[:half])
            time.sleep(seconds)
            to[half:].copy_(source[half:])
            for each in span:
                self._busy.remove((each, each + to.numel()))

        self._launch(self.current_stream(0), work)

    def launch(self, work):
        """Run ``work()`` on the current stream, after all that was launched on it before."""
        self._launch(self.current_stream(0), work)

    # What a test asks.

    def drain(self):
        """Wait for all that was launched; only tests may."""
        for stream in tuple(self._streams):
            done = threading.Event()
            self._launch(stream, done.set)
            assert done.wait(30), f"stream {stream} never ends"

    def balance(self):
        """What was allocated, opened or created and not given back."""
        calls = self.calls
        created = calls["create_event"] + calls["open_event"] - calls["destroy_event"]
        return calls["allocate"] - calls["free"], calls["open"] - calls["close"], created

    def _launch(self, stream, work):
        if stream not in self._streams:
            self._streams[stream] = queue.SimpleQueue()
            threading.Thread(target=self._run, args=(self._streams[stream],), daemon=True).start()
        self._streams[stream].put(work)

    @staticmethod
    def _run(work):
        while True:
            work.get()()

    def _new_file(self, nbytes, uuid):
        name = secrets.token_hex(8).encode()
        fd = os.memfd_create(name.decode())
        os.ftruncate(fd, nbytes)
        address = _map(None, nbytes, mmap.MAP_SHARED, fd)
        self._files[address] = fd, name, nbytes, uuid
        return address

    def _map_other(self, handle):
        pid, fd, size, name = _HANDLE.unpack(handle)
        if name in (known for _, known, _, _ in self._files.values()):
            raise RuntimeError("fake driver: a process may not open its own export")
        path = Path(f"/proc/{pid}/fd/{fd}")
        try:
            if name.decode() not in path.readlink().name:
                raise FileNotFoundError(path)
            other = os.open(path, os.O_RDWR)
        except OSError as error:
            raise RuntimeError(f"fake driver: the export is gone ({error})") from error
        try:
            return _map(None, size, mmap.MAP_SHARED, other), size
        finally:
            os.close(other)

    def _unmap(self, address, size):
        if any(start < address + size and end > address for start, end in self._busy):
            self.violations.append("memory was given back under a copy that is not done")
        _map(address, size, _PRIVATE | _FIXED | _ANONYMOUS, -1)
        ctypes.memset(address, POISON, size)

    def _new_event(self, address):
        number = next(self._numbers)
        self._events[number] = (ctypes.c_uint64 * 2).from_address(address)
        return number


class Launched(TorchDispatchMode):
    """Fused copies are launched on the driver's current stream, a tensor at a time with delays."""

    def __init__(self, driver, seconds=0.0):
        super().__init__()
        self.driver, self.seconds = driver, seconds

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten._foreach_copy_.default:
            return func(*args, **(kwargs or {}))

        def work():
            for target, source in zip(args[0], args[1], strict=True):
                target.copy_(source)
                time.sleep(self.seconds)

        self.driver.launch(work)
        return None


def _map(address, nbytes, flags, fd):
    mapped = _LIBC.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    assert mapped not in (None, 2**64 - 1), os.strerror(ctypes.get_errno())
    return mapped
