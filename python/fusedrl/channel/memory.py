"""The memory of a channel's slots, and the manifest that describes it to readers."""

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
    """Slots in the channel's shared-memory file; they are read-only for readers."""

    manifest: ClassVar = {"kind": "host"}
    device: torch.device = torch.device("cpu")

    def __init__(self, end: Any, nbytes: int) -> None:
        self._end: Any = end
        self._nbytes = nbytes

    def slot(self, index: int) -> Tensor:
        """A slot as a flat uint8 tensor, mapped until the last view is freed."""
        return torch.from_dlpack(self._end.slot_tensor(index, self._nbytes))

    def close(self, in_use_by: Sequence[int] = ()) -> None:
        """Drop this reference: tensors over the memory keep it mapped."""
        self._end = None


Memory = HostMemory | CudaMemory


class Closed:
    """Replaces a publisher or reader that is closed, which would keep memory mapped."""

    def __init__(self, version: int) -> None:
        self.version, self.is_open = lambda: version, lambda: False

    def __getattr__(self, name: str) -> Any:
        """Raise ``RuntimeError`` for every other method."""
        raise RuntimeError(
            "weight channel: expected an open one, got one that is closed; make or open another"
        )


def read_manifest(manifest: bytes) -> tuple[Layout, float, dict[str, Any]]:
    """The layout, the timeout, and the description of the slots' memory."""
    layout, timeout, memory = json.loads(manifest)
    return Layout.from_json(layout), timeout, memory


def reserved(
    layout: Layout, device: torch.device, slots: int, max_readers: int, timeout: float
) -> tuple[Memory, _host.Publisher, str]:
    """Reserve a channel's memory; returns it with the publisher and a unique session id."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"device: expected cpu or cuda, got {device}; pass device='cpu' for host memory"
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
            f"'{getattr(error, 'strerror', None) or error}'; use fewer slots (at least 2), "
            "a narrower dtype such as torch.bfloat16, or raise the limit (ulimit -n for files; "
            "ulimit -v, or the container's, for memory)"
        ) from error
    return memory or HostMemory(end, size), end, session
