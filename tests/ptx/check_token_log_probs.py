"""token_log_probs by its compiled kernels."""

from __future__ import annotations

import itertools

import pytest
import torch
from ptx.values import DTYPES, LAYOUTS, TOLERANCE, spread_rows

from fusedrl import token_log_probs


def compare_log_probs(logits, tokens, **options):
    """Forward and backward beside the reference on the same values in float64."""
    for entropy in (True, False):
        upstream, results = torch.randn(2, *tokens.shape), []
        for x, impl in ((logits, "cpu"), (logits.double(), "reference")):
            leaf = x.detach().requires_grad_()
            out = token_log_probs(leaf, tokens, entropy=entropy, impl=impl, **options)
            outputs = [x for x in out if x is not None]
            given = [up.to(y) for up, y in zip(upstream, outputs, strict=False)]
            results.append((outputs, *torch.autograd.grad(outputs, leaf, given)))
        (mine, grad), (exact, exact_grad) = results
        for got, want in zip(mine, exact, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=3e-6, atol=1e-5)
        tol = TOLERANCE[logits.dtype]
        torch.testing.assert_close(grad.double(), exact_grad, rtol=tol, atol=1e-6)
        assert torch.equal(grad.any(-1), exact_grad.to(grad).any(-1))  # zero rows are zero


def check_sizes_and_dtypes():
    """Around packs, warps and batches of packs; rows and gradients start at other boundaries."""
    sizes = [1, 2, 7, 8, 17, 129, 1001, 2603, 4095, 4096, 4097, 4099]
    for dtype, classes in itertools.product(DTYPES, sizes):
        logits = spread_rows(3, classes + 1).to(dtype)[:, classes % 2 :][:, :classes]
        compare_log_probs(logits, torch.randint(0, classes, (3,)), temperature=0.7)


def check_shifts_and_masks():
    """Packed and padded, with dropped rows that hold NaN and tokens that are no class."""
    for dtype, shift, (shape, offsets) in itertools.product(DTYPES, [False, True], LAYOUTS):
        logits, tokens = torch.randn(*shape, 65).to(dtype), torch.randint(0, 65, shape)
        mask = torch.arange(tokens.numel()).view(shape) % 3 != 0
        rows = mask.flatten().roll(-1).view(shape) if shift else mask
        logits[~rows] = float("nan")
        options = {"mask": mask, "offsets": offsets, "shift": shift}
        compare_log_probs(logits, tokens.masked_fill(~mask, -100), **options)


def check_infinities():
    """A tile of -inf, logits far below 0, a row of -inf, NaN and +inf."""
    logits, tokens = torch.randn(5, 9001), torch.randint(8000, 8900, (5,))
    logits[0, :4000] = -torch.inf
    logits[1, :8900] = -torch.inf
    logits[1, 8950] = 1.0
    tokens[1] = 8950
    compare_log_probs(logits[:2], tokens[:2])
    compare_log_probs(-logits[2:].abs() - 300, tokens[2:])
    logits[2], logits[3, 17], logits[4, 8999] = -torch.inf, torch.nan, torch.inf
    mine = token_log_probs(logits, tokens, impl="cpu").log_probs
    assert mine.isnan().tolist() == [False, False, True, True, True]


def check_misaligned_views():
    """A row's bits do not depend on where it starts."""
    for dtype in DTYPES:
        row, token = torch.randn(1, 1001).to(dtype), torch.tensor([500])
        alone = token_log_probs(row, token).log_probs
        for before in range(8):
            among = torch.zeros(before + 3 * 1001, dtype=dtype)[before:].view(3, 1001)
            among[1] = row
            assert torch.equal(token_log_probs(among, token.expand(3)).log_probs[1], alone[0])


def check_offsets_beyond_int32():
    """Rows that lie more than 2^31 elements apart; the pages between them are never touched."""
    apart = 2**31 + 24
    storage = torch.empty(apart + 2 * 33, dtype=torch.bfloat16)
    logits = storage.as_strided((2, 2, 33), (apart, 33, 1))
    logits.copy_(torch.randn(2, 2, 33))
    tokens = torch.randint(0, 33, (2, 2))
    mine = token_log_probs(logits, tokens, shift=True).log_probs
    assert torch.equal(mine, token_log_probs(logits.contiguous(), tokens, shift=True).log_probs)


def check_wrong_tokens_stop_the_kernel():
    """The device-side check of a kept token, in rows of one block and of several."""
    for dtype, classes, entropy in itertools.product(DTYPES, (5, 8200), (False, True)):
        for token in (-1, classes):
            with pytest.raises(RuntimeError, match="tokens: expected values in"):
                token_log_probs(
                    torch.zeros(2, classes, dtype=dtype), torch.tensor([1, token]), entropy=entropy
                )


def check_bits_of_few_and_many_rows():
    """Rows that several blocks share have the bits of rows with a block each.

    They end in each of the packs that a thread of the second block has in flight.
    """
    for dtype, packs in itertools.product(DTYPES, [1000, 2100, 2700, 3200, 3700]):
        classes = packs * 16 // dtype.itemsize + 3
        logits = spread_rows(8, classes).to(dtype)
        tokens, upstream = torch.randint(0, classes, (8,)), torch.randn(8)

        def results(rows, logits=logits, tokens=tokens, upstream=upstream):
            leaf = logits[:rows].clone().requires_grad_()
            out = token_log_probs(leaf, tokens[:rows], entropy=True)
            ((out.log_probs - out.entropy) * upstream[:rows]).sum().backward()
            return *out, leaf.grad

        for few, many in zip(results(4), results(8), strict=True):
            assert torch.equal(few, many[:4])
        without_entropy = token_log_probs(logits[:4], tokens[:4]).log_probs
        assert torch.equal(without_entropy, results(4)[0])
