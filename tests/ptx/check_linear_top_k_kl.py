"""linear_top_k_kl by its compiled kernels, in tiles of a few rows and classes."""

from __future__ import annotations

import itertools

import pytest
import torch
from ptx.values import DTYPES, LAYOUTS, TOLERANCE, assert_rows_are_counted_once, tiles_of

from fusedrl import linear_top_k_kl


def batch(rows, classes, width, dtype, k=4):
    """Hidden states, weight, bias, ids and a teacher's log-probs."""
    tensors = torch.randn(*rows, width), torch.randn(classes, width) * 0.7, torch.randn(classes)
    log_probs, ids = (torch.randn(*rows, classes) * 3).log_softmax(-1).topk(min(k, classes))
    return (*(x.to(dtype) for x in tensors), ids.flip(-1), log_probs.flip(-1))


def compare(hidden, weight, bias, ids, teacher, batch_invariant=False, **options):
    """Forward and all gradients beside the reference on the same values in float64."""
    inputs = [x for x in (hidden, weight, bias) if x is not None]
    upstream = torch.rand(ids.shape[:-1]) + 0.5
    results = []
    for impl, dtype in (("cpu", hidden.dtype), ("reference", torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        out = linear_top_k_kl(
            *(*leaves[:2], ids, teacher), bias=leaves[2] if bias is not None else None, impl=impl,
            batch_invariant=batch_invariant and impl == "cpu", **options,
        )  # fmt: skip
        results.append((out, torch.autograd.grad(out, leaves, upstream.to(out))))
    (mine, grads), (exact, exact_grads) = results
    torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=2e-5)
    # Half gradients of products are rounded before they are summed.
    tol = max(TOLERANCE[hidden.dtype], 2e-5)
    for got, want in zip(grads, exact_grads, strict=True):
        assert got.dtype == hidden.dtype
        size = want.abs().max().item() if want.numel() else 0.0
        torch.testing.assert_close(got.double(), want, rtol=tol, atol=tol * (1 + size))
    assert torch.equal(grads[0].any(-1), exact_grads[0].any(-1))  # zero rows are zero


def check_sizes_and_dtypes():
    """Less than a tile, whole ones, and parts of the last; one row, a block, and a part."""
    for rows, classes in [(1, 5), (9, 16), (1, 35), (9, 35)]:
        compare(*batch((rows,), classes, 3, torch.float32), temperature=0.7)
    for dtype in DTYPES[1:]:
        compare(*batch((9,), 16, 3, dtype), temperature=0.7)


def check_long_tiles():
    """Two tiles, one of so many classes that threads of sixteen warps have several packs."""
    with tiles_of(2 * 4200):
        for dtype in DTYPES:
            compare(*batch((2,), 6100, 2, dtype, k=40), softcap=3.0)


def check_options():
    """Bias, softcap and scale, each with and without; blocks of a fixed size; both tails."""
    for dtype, biased, softcap in itertools.product(DTYPES, [False, True], [None, 3.0]):
        hidden, weight, bias, *known = batch((7,), 21, 6, dtype)
        options = {"softcap": softcap, "scale": 1.5 if softcap else None}
        options["tail"] = "bucket" if biased else "renormalize"
        compare(
            *(hidden, weight, bias if biased else None, *known),
            batch_invariant=biased != (softcap is None), direction="forward", **options,
        )  # fmt: skip


def check_shifts_and_masks():
    """Packed, padded and strided, with dropped rows that hold NaN, ids of no class, and gaps."""
    for dtype, shift, (shape, offsets) in itertools.product(DTYPES, [False, True], LAYOUTS):
        wide = (*shape[:-1], 2 * shape[-1])
        hidden, weight, bias, ids, teacher = batch(wide, 19, 5, dtype)
        hidden, ids, teacher = (x[..., ::2, :] for x in (hidden, ids, teacher))  # every other row
        ids, teacher = ids.clone(), teacher.clone()
        mask = torch.arange(torch.Size(shape).numel()).view(shape) % 3 != 0
        rows = mask.flatten().roll(-1).view(shape) if shift else mask
        hidden[~rows] = torch.nan
        ids[..., 1], ids[~mask], teacher[~mask] = -1, 10**9, torch.nan
        compare(hidden, weight, bias, ids, teacher, mask=mask, offsets=offsets, shift=shift)
    nothing = batch((7,), 19, 5, torch.float32)
    compare(*nothing, mask=torch.zeros(7, dtype=torch.bool), batch_invariant=True)
    compare(*batch((0,), 19, 5, torch.float32))


def check_rows_are_counted_once():
    """The host need not wait for their number a second time."""
    hidden, weight, _, *known = batch((7,), 19, 5, torch.float32)
    leaves, mask = [hidden.requires_grad_(), weight.requires_grad_()], torch.arange(7) % 3 != 0
    assert_rows_are_counted_once(linear_top_k_kl(*leaves, *known, mask), leaves, mask)


def check_many_tokens():
    """More than the threads of a grid, few of them kept; rows wider than four blocks."""
    for dtype in DTYPES:
        hidden, weight, bias, *known = batch((120,), 9, 150, dtype)
        compare(hidden, weight, bias, *known, mask=torch.arange(120) % 37 == 3)


def check_banned_classes():
    """Tiles of banned classes, ids among them, and no rest at all."""
    for banned in (slice(0, 16), slice(16, 32), slice(4, 35)):
        hidden, weight, bias, ids, teacher = batch((6,), 35, 4, torch.float32)
        bias[banned] = -torch.inf
        ids[:], teacher[:] = torch.tensor([0, 1, 2, 20]), torch.tensor(0.2).log()
        compare(hidden, weight, bias, ids, teacher)


def check_bits_of_a_row():
    """Alone, in a batch and shuffled, where blocks have a fixed size."""
    for dtype in DTYPES:
        hidden, weight, bias, ids, teacher = batch((8,), 35, 6, dtype)
        options = {"bias": bias, "batch_invariant": True}
        whole = linear_top_k_kl(hidden, weight, ids, teacher, **options)
        for rows in (torch.randperm(8), torch.tensor([5]), torch.arange(2, 6)):
            part = linear_top_k_kl(hidden[rows], weight, ids[rows], teacher[rows], **options)
            assert torch.equal(part, whole[rows])


def check_wrong_ids_stop_the_kernel():
    """The device-side checks of a kept token's ids."""
    wrong = (([[1, 0], [4, 5]], "values below V"), ([[1, 0], [4, 4]], "at most once"))
    for dtype, (ids, message) in itertools.product(DTYPES, wrong):
        hidden, weight, _, _, teacher = batch((2,), 5, 3, dtype, k=2)
        with pytest.raises(RuntimeError, match=f"ids: expected .*{message}"):
            linear_top_k_kl(hidden, weight, torch.tensor(ids), teacher)
