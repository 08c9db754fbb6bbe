"""Slots in GPU memory: allocated by the publisher, mapped by readers on the same machine."""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from ctypes import byref, c_int, c_size_t, c_void_p
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from fusedrl import _host

# CUDA exports whole blocks of this size, so no two slots share a block.
_BLOCK = 2 << 20
_RELAXED = 2  # capture mode: calls do not invalidate graph captures of other threads
_LAZY_PEER_ACCESS = 1
_REMEDY = "open the handle while its publisher runs, in the same IPC namespace (containers), or "

logger = logging.getLogger("fusedrl")


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 64),)


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    if code := getattr(_library(), name)(*arguments):
        text = ctypes.c_char_p()
        _library().cuGetErrorString(code, byref(text))
        why = f"{name} failed with error {code} ({(text.value or b'').decode()})"
        remedy = _REMEDY if name == "cuIpcOpenMemHandle_v2" else ""
        raise RuntimeError(f"CUDA driver: {why}; {remedy}use host memory, device='cpu'")


@cache
def _context(device: int) -> c_void_p:
    context = c_void_p()  # shared with torch; retained once, until the process ends
    _call("cuDevicePrimaryCtxRetain", byref(context), device)
    return context


class _Driver:
    """The calls of the CUDA driver, loaded at the first call, and of torch that slots need."""

    def call(self, device: int, name: str, *arguments: Any) -> None:
        """Call a driver function, also on a thread that has not used the device yet."""
        mode = c_int(_RELAXED)
        with torch.cuda.device(device):
            _call("cuCtxSetCurrent", _context(device))
            try:
                _call("cuThreadExchangeStreamCaptureMode", byref(mode))
                _call(name, *arguments)
            finally:
                if mode.value != _RELAXED:  # an interrupt may come before the exchange
                    _call("cuThreadExchangeStreamCaptureMode", byref(mode))

    def uuids(self) -> list[str]:
        devices = range(torch.cuda.device_count())
        return [str(torch.cuda.get_device_properties(i).uuid) for i in devices]

    def tensor(self, device: int, address: int, nbytes: int, owner: object) -> Tensor:
        return torch.from_dlpack(_host.device_tensor(device, address, nbytes, owner))

    def current_stream(self, device: int) -> int:
        return torch.cuda.current_stream(device).cuda_stream

    def waiting(self, device: int) -> Callable[[], None]:
        """A wait for the current stream, in C alone: no signal handler runs meanwhile."""
        return partial(torch.Stream.synchronize, torch.cuda.current_stream(device))

    def synchronize(self, device: int) -> None:
        torch.cuda.synchronize(device)

    def capturing(self, device: int) -> bool:
        with torch.cuda.device(device):
            return torch.cuda.is_current_stream_capturing()


_DRIVER = _Driver()


class _Slot:
    """Device memory, freed with the last tensor over it."""

    def __init__(self, device: int, free: str, allocate: str, *arguments: Any) -> None:
        self.address = c_size_t()
        held = _DRIVER, device, self.address
        self.finalizer = weakref.finalize(self, _free, free, os.getpid(), *held)
        self.finalizer.atexit = False  # tensors may still be in use; the driver frees all memory
        _DRIVER.call(device, allocate, byref(self.address), *arguments)


def _free(function: str, pid: int, driver: _Driver, device: int, address: c_size_t) -> None:
    # A forked child has no CUDA, and a capture cannot wait: then the memory is not freed.
    if address and pid == os.getpid() and not driver.capturing(device):
        driver.synchronize(device)
        driver.call(device, function, address)


# The slots that this process has allocated: CUDA does not let it open its handles to them.
_allocated: weakref.WeakValueDictionary[bytes, _Slot] = weakref.WeakValueDictionary()


class CudaMemory:
    """The GPU slots of a channel, as one process sees them.

    A version is published when its copies are complete, so readers do not synchronise. A lease ends
    when the stream that is current at its release has finished the work queued on it.
    """

    def __init__(self, device: int, slots: list[_Slot], manifest: dict[str, Any]) -> None:
        self._driver, self._device, self._slots, self.manifest = _DRIVER, device, slots, manifest
        # With its index, so that it compares equal to the device of a parameter.
        self.device = self.slot(0).device

    @classmethod
    def create(cls, device: torch.device, slots: int, nbytes: int) -> CudaMemory:
        """Allocate slots that other processes can open, outside torch's caching allocator."""
        index = torch.cuda.current_device() if device.index is None else device.index
        size = c_size_t(max(-(-nbytes // _BLOCK), 1) * _BLOCK)
        made: dict[bytes, _Slot] = {}
        for _ in range(slots):
            slot, handle = _Slot(index, "cuMemFree_v2", "cuMemAlloc_v2", size), _Handle()
            _DRIVER.call(index, "cuIpcGetMemHandle", byref(handle), slot.address)
            made[bytes(handle)] = slot
        _allocated.update(made)
        manifest = {"kind": "cuda", "uuid": _DRIVER.uuids()[index], "pid": os.getpid()}
        manifest |= {"nbytes": nbytes, "slots": [handle.hex() for handle in made]}
        return cls(index, list(made.values()), manifest)

    @classmethod
    def open(cls, manifest: dict[str, Any]) -> CudaMemory:
        """Open the slots of a manifest; in the publisher's process, use them directly."""
        uuid, uuids = manifest["uuid"], _DRIVER.uuids()
        if uuid not in uuids:
            raise RuntimeError(
                f"device: expected the publisher's, with the UUID {uuid}, got {uuids or 'none'}; "
                "add it to CUDA_VISIBLE_DEVICES, or create the channel with device='cpu'"
            )
        index, handles = uuids.index(uuid), map(bytes.fromhex, manifest["slots"])
        if manifest["pid"] == os.getpid():
            return cls(index, [_allocated[handle] for handle in handles], manifest)
        opened = partial(_Slot, index, "cuIpcCloseMemHandle", "cuIpcOpenMemHandle_v2")
        exported = map(_Handle.from_buffer_copy, handles)
        return cls(index, [opened(each, _LAZY_PEER_ACCESS) for each in exported], manifest)

    def slot(self, index: int) -> Tensor:
        """The slot as a flat uint8 tensor, which may outlive this object."""
        slot, nbytes = self._slots[index], self.manifest["nbytes"]
        return self._driver.tensor(self._device, slot.address.value, nbytes, slot)

    def refuse_capture(self) -> None:
        """Raise ``RuntimeError`` while the current stream captures a CUDA graph."""
        if self._driver.capturing(self._device):
            raise RuntimeError(
                "stream: expected one that is not capturing, got a CUDA graph capture, which "
                "records addresses of slots but holds no lease; load with mode='copy' before it"
            )

    def copying(self) -> Callable[[], None]:
        """A wait for the copies into slots that are queued on the current stream."""
        self.refuse_capture()
        return self._driver.waiting(self._device)

    def give_back(self, lease: int) -> None:
        """Release a lease, given by its address, after the work queued on the current stream."""
        self.refuse_capture()
        stream = self._driver.current_stream(self._device)
        arguments = map(c_void_p, (stream, _host.give_back, lease))
        self._driver.call(self._device, "cuLaunchHostFunc", *arguments)

    def synchronize(self) -> None:
        """Wait for the device, and so for releases that are queued on its streams."""
        self._driver.synchronize(self._device)

    def close(self, in_use_by: Sequence[int] = ()) -> None:
        """Drop the slots; each is freed with the last tensor over it."""
        if in_use_by:  # to free them would be undefined behaviour
            logger.warning(
                "slots of %d bytes on %s stay allocated until this process ends: the processes %s "
                "may still read them; close their readers first",
                *(self.manifest["nbytes"], self.device, ", ".join(map(str, in_use_by))),
            )
            for slot in self._slots:
                slot.finalizer.detach()
        self._slots = []
