"""What the checks of several ops use."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import torch

from fusedrl import native

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OFFSETS = torch.tensor([0, 3, 3, 4, 7])
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # of stored gradients


@contextlib.contextmanager
def tiles_of(elements: int) -> Iterator[None]:
    """Larger tiles of the linear heads, in which a thread has several packs of a row."""
    size = ctypes.c_int64.in_dll(ctypes.CDLL(str(native.find("_C"))), "tile_elements")
    before, size.value = size.value, elements
    try:
        yield
    finally:
        size.value = before
