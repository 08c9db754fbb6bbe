"""A CUDA driver whose device memory is memory of the host, and whose streams are threads.

It keeps the order of what is launched on a stream, and no other: the rest runs in whatever order
the delays give. Memory that was closed holds ``POISON``.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import secrets
import struct
import threading
import time
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
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
        self.room = 1 << 40  # bytes that can be allocated
        self.calls = Counter()
        self.violations: list[str] = []
        self.is_capturing = False
        self._files: dict[int, tuple[int, bytes, int, str]] = {}  # fd, name, size, UUID by address
        self._opened: dict[bytes, list[int]] = {}  # handle: address, count
        self._streams: dict[int, queue.SimpleQueue] = {}
        self._busy: list[tuple[int, int]] = []  # what launched copies touch
        self._local = threading.local()

    # What CUDA's driver has.

    def call(self, device, name, *arguments):
        self.calls[name] += 1
        getattr(self, name)(device, *arguments)

    def cuMemAlloc_v2(self, device, address, nbytes):
        if nbytes.value > self.room:
            raise RuntimeError("fake driver: out of memory")
        self.room -= nbytes.value
        name = secrets.token_hex(8).encode()
        fd = os.memfd_create(name.decode())
        os.ftruncate(fd, nbytes.value)
        address._obj.value = _map(None, nbytes.value, mmap.MAP_SHARED, fd)
        self._files[address._obj.value] = fd, name, nbytes.value, self.devices[device]

    def cuMemFree_v2(self, device, address):
        fd, _, size, uuid = self._files.pop(address.value)
        assert uuid == self.devices[device]
        self.room += size
        os.close(fd)
        self._unmap(address.value, size)

    def cuIpcGetMemHandle(self, device, handle, address):
        fd, name, size, uuid = self._files[address.value]
        assert uuid == self.devices[device]
        exported = _HANDLE.pack(os.getpid(), fd, size, name)
        ctypes.memmove(ctypes.addressof(handle._obj), exported, len(exported))

    def cuIpcOpenMemHandle_v2(self, device, address, handle, flags):
        assert flags == 1
        exported = bytes(handle)
        if exported not in self._opened:
            self._opened[exported] = [self._map_other(exported), 0]
        self._opened[exported][1] += 1
        address._obj.value = self._opened[exported][0]

    def cuIpcCloseMemHandle(self, device, address):
        [handle] = [h for h, (known, _) in self._opened.items() if known == address.value]
        self._opened[handle][1] -= 1
        if not self._opened[handle][1]:
            del self._opened[handle]
            self._unmap(address.value, _HANDLE.unpack(handle)[2])

    def cuLaunchHostFunc(self, device, stream, function, argument):
        run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function.value)
        self._launch(stream.value or DEFAULT_STREAM, lambda: run(argument.value))

    # What torch has.

    def uuids(self):
        return self.devices

    def tensor(self, device, address, nbytes, owner):
        buffer = (ctypes.c_uint8 * max(nbytes, 1)).from_address(address)
        buffer.owner = owner
        return torch.frombuffer(buffer, dtype=torch.uint8)[:nbytes]

    def current_stream(self, device):
        return getattr(self._local, "stream", DEFAULT_STREAM)

    def waiting(self, device):
        return partial(self._wait, self.current_stream(device))

    def synchronize(self, device):
        for stream in tuple(self._streams):
            if stream != getattr(self._local, "runs", None):  # which has dropped a slot
                self._wait(stream)

    def capturing(self, device):
        return self.is_capturing

    @contextmanager
    def stream(self, stream):
        before, self._local.stream = self.current_stream(0), stream
        try:
            yield
        finally:
            self._local.stream = before

    def copy(self, to: Tensor, source: Tensor, seconds=0.0):
        """Launch a copy of bytes on the current stream: one half, a delay, the other half.

        As on a GPU, it keeps no tensor alive.
        """
        nbytes, at = to.numel(), (to.data_ptr(), source.data_ptr())
        spans = [(each, each + nbytes) for each in at]
        self._busy.extend(spans)

        def work():
            half = nbytes // 2
            ctypes.memmove(*at, half)
            time.sleep(seconds)
            ctypes.memmove(*(each + half for each in at), nbytes - half)
            for span in spans:
                self._busy.remove(span)

        self._launch(self.current_stream(0), work)

    def launch(self, work):
        """Run ``work()`` on the current stream, after all that was launched on it before."""
        self._launch(self.current_stream(0), work)

    # What a test asks.

    def balance(self):
        """What was allocated or opened and not given back."""
        return len(self._files), sum(count for _, count in self._opened.values())

    def _wait(self, stream):
        done = threading.Event()
        self._launch(stream, done.set)
        assert done.wait(30), f"stream {stream} never ends"

    def _launch(self, stream, work):
        if stream not in self._streams:
            self._streams[stream] = queue.SimpleQueue()
            threading.Thread(target=self._run, args=(stream,), daemon=True).start()
        self._streams[stream].put(work)

    def _run(self, stream):
        self._local.runs = stream
        while True:
            self._streams[stream].get()()

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
            return _map(None, size, mmap.MAP_SHARED, other)
        finally:
            os.close(other)

    def _unmap(self, address, size):
        if any(start < address + size and end > address for start, end in self._busy):
            self.violations.append("memory was given back under a copy that is not done")
        _map(address, size, _PRIVATE | _FIXED | _ANONYMOUS, -1)
        ctypes.memset(address, POISON, size)


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
