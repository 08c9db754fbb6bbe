"""linear_policy_loss by its compiled kernels, in blocks of a few rows."""

from __future__ import annotations

import itertools

import pytest
import torch
from ptx.values import DTYPES, OFFSETS, TOLERANCE, tiles_of

from fusedrl import linear_policy_loss, linear_token_log_probs


def head(rows, classes, width, dtype):
    """Hidden states, weight, bias and tokens. Exponents relative to one class overflow."""
    tensors = torch.randn(rows, width), torch.randn(classes, width) * 0.7, torch.randn(classes)
    tensors[2][0] = -300
    return (*(x.to(dtype) for x in tensors), torch.randint(min(1, classes - 1), classes, (rows,)))


def compare(hidden, weight, bias, tokens, mask=None, **options):
    """Values and all gradients beside the reference on the same values in float64."""
    logits = {"bias": bias, "shift": options.get("shift", False), "offsets": OFFSETS}
    log_probs = linear_token_log_probs(hidden, weight, tokens, mask, **logits).log_probs
    old, ref = log_probs + torch.randn(len(tokens)) * 0.3, log_probs + torch.randn(len(tokens))
    advantages = torch.randn(len(OFFSETS) - 1)
    results = []
    for impl, dtype in (("cpu", hidden.dtype), ("reference", torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight, bias)]
        out = linear_policy_loss(
            *(*leaves[:2], tokens, advantages, mask), old_log_probs=old, ref_log_probs=ref,
            bias=leaves[2], offsets=OFFSETS, impl=impl, **options,
        )  # fmt: skip
        results.append((out, torch.autograd.grad(out.loss * 3, leaves)))
    (mine, grads), (exact, exact_grads) = results
    without_gradients = linear_policy_loss(
        *(hidden, weight, tokens, advantages, mask), old_log_probs=old, ref_log_probs=ref,
        bias=bias, offsets=OFFSETS, **options,
    )  # fmt: skip
    assert torch.equal(without_gradients.loss, mine.loss.detach())
    for name in ("loss", "kl", "entropy", "log_probs"):
        got, want = getattr(mine, name), getattr(exact, name)
        if want is None:
            assert got is None
            continue
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    tol = max(TOLERANCE[hidden.dtype], 1e-5)
    for got, want in zip(grads, exact_grads, strict=True):
        assert got.dtype == hidden.dtype
        torch.testing.assert_close(got.double(), want, rtol=tol, atol=tol * want.abs().max().item())
    assert torch.equal(grads[0].any(-1), exact_grads[0].any(-1))


def check_losses():
    """Every loss, with and without the entropy that its kernel may leave out."""
    for loss, coeff in itertools.product(("grpo", "cispo", "reinforce", "gspo"), (0.0, 0.1)):
        compare(*head(7, 19, 5, torch.float32), loss=loss, kl_coeff=0.1, entropy_coeff=coeff)


def check_sizes_and_dtypes():
    """Blocks of a row and of several, most not full; a class, a pack and an odd number."""
    cases = [(1, torch.float32), (70, torch.float32), *((n, x) for n in (16, 35) for x in DTYPES)]
    for classes, dtype in cases:
        options = {"entropy_coeff": 0.1 if classes == 35 else 0.0, "softcap": 5.0, "scale": 1.5}
        compare(*head(7, classes, 3, dtype), temperature=0.7, **options)


def check_long_rows():
    """So many classes that threads of sixteen warps have several packs."""
    mask, options = torch.arange(7) % 3 == 1, {"kl_coeff": 0.1, "softcap": 5.0}
    with tiles_of(2 * 8200):
        for dtype, coeff in itertools.product(DTYPES, (0.0, 0.1)):
            compare(*head(7, 8200, 2, dtype), mask, entropy_coeff=coeff, **options)


def check_shifts_and_masks():
    """Dropped rows that hold NaN, and tokens that are no class."""
    for dtype, shift in itertools.product(DTYPES, [False, True]):
        hidden, weight, bias, tokens = head(7, 19, 5, dtype)
        mask = torch.arange(7) % 3 != 0
        hidden[~(mask.roll(-1) if shift else mask)] = torch.nan
        compare(hidden, weight, bias, tokens.masked_fill(~mask, -100), mask, shift=shift)
    nothing = torch.zeros(7, dtype=torch.bool)
    compare(*head(7, 19, 5, torch.float32), nothing)


def check_wrong_tokens_stop_the_kernel():
    """A token outside the vocabulary."""
    for dtype, coeff, token in itertools.product(DTYPES, (0.0, 0.1), (-1, 5)):
        hidden, weight, _, _ = head(2, 5, 3, dtype)
        tokens, options = torch.tensor([1, token]), {"entropy_coeff": coeff}
        with pytest.raises(RuntimeError, match="tokens: expected values in"):
            linear_policy_loss(hidden, weight, tokens, torch.ones(2), **options)
