"""What the checks of several ops use."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import torch

from fusedrl import native

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OFFSETS = torch.tensor([0, 3, 3, 4, 7])
# Packed with several sequences and with two, and padded: shape and offsets.
LAYOUTS = [((7,), OFFSETS), ((7,), torch.tensor([0, 4, 7])), ((2, 3), None)]
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # of stored gradients


def spread_rows(*shape: int) -> torch.Tensor:
    """Logits of which, in turn, every one counts, few do, and one is far below all others.

    In the first row a class that is left out or read twice shows. Relative to the last one's least
    logit exponents overflow, so that a wrong maximum shows.
    """
    rows = torch.randn(shape).view(-1, shape[-1])
    rows[::3] *= 0.3
    rows[1::3] *= 4
    rows[2::3, shape[-1] // 2] = -300
    return rows.view(shape)


def assert_rows_are_counted_once(outputs, leaves, mask: torch.Tensor) -> None:
    """A backward pass takes the forward pass's word for which rows are kept.

    The mask changes after it, which neither autograd nor a kernel of the backward pass notices.
    """
    kept = torch.autograd.grad(outputs.sum(), leaves, retain_graph=True)
    mask.numpy()[:] = True
    for got, want in zip(torch.autograd.grad(outputs.sum(), leaves), kept, strict=True):
        assert torch.equal(got, want)


def rows_counted_on_device() -> int:
    """How often the host has waited for the number of rows that are kept."""
    return _of_host("rows_counted").value


@contextlib.contextmanager
def tiles_of(elements: int) -> Iterator[None]:
    """Larger tiles of the linear heads, in which a thread has several packs of a row."""
    size = _of_host("tile_elements")
    before, size.value = size.value, elements
    try:
        yield
    finally:
        size.value = before


def _of_host(name: str) -> ctypes.c_int64:
    return ctypes.c_int64.in_dll(ctypes.CDLL(str(native.find("_C"))), name)
