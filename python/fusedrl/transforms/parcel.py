"""Tensordicts on the way to another process: one pickle, and one buffer a dtype.

The rows of a ragged column are views of one storage, which a pickle of its own would carry once a
row; and each tensor in a pickle costs as much as a small message.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Parcel(NamedTuple):
    """``structure`` is a pickle that refers to tensors by number; ``shapes`` has theirs.

    ``device`` is where the first tensor was; ``None`` without one.
    """

    structure: bytes
    shapes: list[tuple[torch.dtype, torch.Size]]
    buffers: dict[torch.dtype, np.ndarray[Any, Any]]
    device: torch.device | None


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is not Tensor or obj.layout != torch.strided or obj.is_nested:
            return None  # what holds others is taken apart
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._numbers[id(obj)]

    def reducer_override(self, obj: Any) -> Any:
        # torch's own restores a view of the storage from its start, whatever it was a view of.
        if type(obj) is Tensor and obj.is_nested and obj.layout == torch.strided:
            return _strided, (obj.unbind(),)
        return NotImplemented


def _strided(rows: tuple[Tensor, ...]) -> Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.strided)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> Tensor:
        return self._tensors[pid]


def pack(value: Any) -> Parcel:
    """``value`` with its dense tensors copied to the CPU, without their gradient graphs."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    flat: dict[torch.dtype, list[Tensor]] = {}
    for tensor in pickler.tensors:
        flat.setdefault(tensor.dtype, []).append(tensor.detach().reshape(-1))
    buffers = {
        dtype: torch.cat(parts).cpu().view(torch.uint8).numpy() for dtype, parts in flat.items()
    }
    shapes = [(tensor.dtype, tensor.shape) for tensor in pickler.tensors]
    device = pickler.tensors[0].device if pickler.tensors else None
    return Parcel(file.getvalue(), shapes, buffers, device)


def unpack(parcel: Parcel) -> Any:
    """What was packed; tensors of one dtype are views of one buffer."""
    parts = {}
    for dtype, buffer in parcel.buffers.items():
        # The memory of a message is read-only, hence a copy.
        values = (
            torch.frombuffer(bytearray(buffer), dtype=dtype)
            if len(buffer)
            else torch.empty(0, dtype=dtype)
        )
        sizes = [shape.numel() for other, shape in parcel.shapes if other == dtype]
        parts[dtype] = iter(values.split_with_sizes(sizes))
    tensors = [next(parts[dtype]).view(shape) for dtype, shape in parcel.shapes]
    return _Unpickler(io.BytesIO(parcel.structure), tensors).load()
