"""top_k_kl by its compiled kernels."""

from __future__ import annotations

import itertools

import pytest
import torch
from ptx.values import DTYPES, LAYOUTS, TOLERANCE, spread_rows

from fusedrl import top_k_kl


def known(rows, classes, k=5):
    """Ids of each row in any order, and log-probs of a teacher."""
    log_probs, ids = (torch.randn(*rows, classes) * 3).log_softmax(-1).topk(min(k, classes))
    return ids.flip(-1), log_probs.flip(-1)


def compare(logits, ids, teacher, **options):
    """Forward and backward beside the reference on the same values in float64."""
    results = []
    for x, impl in ((logits, "cpu"), (logits.double(), "reference")):
        leaf = x.detach().requires_grad_()
        out = top_k_kl(leaf, ids, teacher, impl=impl, **options)
        (out * torch.linspace(0.5, 1.0, out.numel()).view_as(out)).sum().backward()
        results.append((out.detach(), leaf.grad))
    (mine, grad), (exact, exact_grad) = results
    torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert torch.equal(mine == 0, exact == 0)
    rtol = max(TOLERANCE[logits.dtype], 1e-5)
    torch.testing.assert_close(grad.double(), exact_grad, rtol=rtol, atol=1e-6, equal_nan=True)
    assert torch.equal(grad.any(-1), exact_grad.to(grad).any(-1))


def check_sizes_and_dtypes():
    """Around packs, warps and batches of packs; rows and gradients start at other boundaries."""
    for dtype, classes in itertools.product(DTYPES, [1, 2, 7, 8, 17, 129, 3592, 4099]):
        logits = spread_rows(3, classes).to(dtype)
        apart = torch.cat([logits[:, :1], logits], 1)[:, 1:]
        compare(apart, *known((3,), classes), temperature=0.7)
        compare(logits, *known((3,), classes), direction="forward")


def check_more_classes_than_bits():
    """Ids on both sides of where the next window of bits begins."""
    for dtype, classes in itertools.product(DTYPES, [2**17 + 70, 2**17 + 72]):
        ids = torch.tensor([[2**17 - 1, 3, 2**17, classes - 1, -1, 2**17 - 64]])
        compare(torch.randn(1, classes).to(dtype), ids, torch.full((1, 6), -3.0))


def check_many_ids():
    """More of them than a block has threads, and all classes."""
    compare(torch.randn(4, 700), *known((4,), 700, 300), direction="jensen_shannon")
    compare(torch.randn(4, 60), *known((4,), 60, 60), tail="renormalize")


def check_shifts_and_masks():
    """Packed and padded, with dropped rows that hold NaN, ids that are no class, and gaps."""
    for dtype, shift, (shape, offsets) in itertools.product(DTYPES, [False, True], LAYOUTS):
        logits, (ids, teacher) = torch.randn(*shape, 65).to(dtype), known(shape, 65)
        mask = torch.arange(shape[0] * (1 if len(shape) == 1 else shape[1])).view(shape) % 3 != 0
        rows = mask.flatten().roll(-1).view(shape) if shift else mask
        logits[~rows] = float("nan")
        ids[..., 2], ids[~mask], teacher[~mask] = -1, 10**9, float("nan")
        compare(logits, ids, teacher, mask=mask, offsets=offsets, shift=shift)


def check_many_tokens():
    """More than the threads of all blocks that finish them, of which few are kept."""
    ids, teacher = known((120,), 9)
    mask = torch.arange(120) % 23 == 3
    compare(torch.randn(120, 9), ids, teacher, mask=mask)


def check_infinities():
    """Ids and whole batches of packs with a logit of -inf, no rest, a row of -inf, NaN, +inf."""
    for dtype, direction in itertools.product(DTYPES, ("reverse", "jensen_shannon")):
        logits, (ids, teacher) = torch.randn(6, 9001).to(dtype), known((6,), 9001)
        ids[:], teacher[:] = torch.arange(8900, 8905), torch.tensor(0.15).log()
        logits[0, :4000] = logits[1, 8901] = -torch.inf
        logits[2, :8900] = logits[2, 8905:] = -torch.inf
        compare(logits[:3], ids[:3], teacher[:3], direction=direction)
        logits[3], logits[4, 17], logits[5, 8999] = -torch.inf, torch.nan, torch.inf
        mine = top_k_kl(logits, ids, teacher, impl="cpu")
        assert mine.isnan().tolist() == [False, False, False, True, True, True]


def check_misaligned_views():
    """A row's bits do not depend on where it starts."""
    ids, teacher = known((1,), 1001)
    for dtype in DTYPES:
        row = torch.randn(1, 1001).to(dtype)
        alone = top_k_kl(row, ids, teacher)
        for before in range(8):
            among = torch.zeros(before + 3 * 1001, dtype=dtype)[before:].view(3, 1001)
            among[1] = row
            assert torch.equal(
                top_k_kl(among, ids.expand(3, -1), teacher.expand(3, -1))[1], alone[0]
            )


def check_wrong_ids_stop_the_kernel():
    """The device-side checks of a kept token's ids."""
    teacher = torch.full((2, 2), -2.0)
    for ids, message in (([[1, 0], [4, 5]], "values below V"), ([[1, 0], [4, 4]], "at most once")):
        for dtype, classes in itertools.product(DTYPES, (5, 8)):
            kept = torch.tensor(ids).where(torch.tensor(ids) < 5, classes)
            with pytest.raises(RuntimeError, match=f"ids: expected .*{message}"):
                top_k_kl(torch.zeros(2, classes, dtype=dtype), kept, teacher)
