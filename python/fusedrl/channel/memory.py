"""The memory of a channel's slots, as one process sees it, and what describes it to others."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from fusedrl import _host
from fusedrl.channel.cuda import CudaMemory
from fusedrl.channel.layout import Layout


class HostMemory:
    """The slots of a channel in its file in host memory; those of a reader are read-only."""

    manifest: ClassVar = {"kind": "host"}
    device: torch.device = torch.device("cpu")

    def __init__(self, end: Any, nbytes: int) -> None:
        self._end: Any = end
        self._nbytes = nbytes

    def slot(self, index: int) -> Tensor:
        """The bytes of a slot, mapped until the last view is freed."""
        return torch.from_dlpack(self._end.slot_tensor(index, self._nbytes))

    def close(self, in_use_by: Sequence[int] = ()) -> None:
        """Leave the memory to the tensors over it."""
        self._end = None


Memory = HostMemory | CudaMemory


class Closed:
    """What is left of an end that is closed, in its place: the end itself keeps memory mapped."""

    def __init__(self, version: int) -> None:
        self.version, self.is_open = lambda: version, lambda: False

    def __getattr__(self, name: str) -> Any:
        """Raise ``RuntimeError`` for all other methods."""
        raise RuntimeError(
            "weight channel: expected an open one, got one that is closed; make or open another"
        )


def read_manifest(manifest: bytes) -> tuple[Layout, float, dict[str, Any]]:
    """What a channel's memory says of it: its layout, its timeout, and how its slots are opened."""
    layout, timeout, memory = json.loads(manifest)
    return Layout.from_json(layout), timeout, memory


def reserved(
    layout: Layout, device: torch.device, slots: int, max_readers: int, timeout: float
) -> tuple[Memory, _host.Publisher, str]:
    """The memory of a new channel, the publisher's end of it, and a name that no other one has."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"device: expected cpu or cuda, got {device}; device='cpu' serves any machine"
        )
    size, memory, session = layout.nbytes, None, secrets.token_hex(16)
    try:
        if device.type == "cuda":
            memory = CudaMemory.create(device, slots, size)
        manifest = json.dumps([layout.to_json(), timeout, (memory or HostMemory).manifest])
        end = _host.Publisher(slots, 0 if memory else size, max_readers, session, manifest.encode())
    except (OSError, RuntimeError) as error:
        raise RuntimeError(
            f"channel: expected {slots} slots of {size} bytes ({slots * size}) on {device}, got "
            f"'{getattr(error, 'strerror', None) or error}'; take fewer slots, down to 2, or "
            "half the width (dtype=torch.bfloat16), or raise the limit (ulimit -n of open files; "
            "ulimit -v, or a container's, of memory)"
        ) from error
    return memory or HostMemory(end, size), end, session
