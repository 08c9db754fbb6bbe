"""linear_token_log_probs by its compiled kernels, in tiles of a few rows and classes."""

from __future__ import annotations

import itertools

import pytest
import torch
from ptx.values import (
    DTYPES,
    LAYOUTS,
    OFFSETS,
    TOLERANCE,
    assert_rows_are_counted_once,
    rows_counted_on_device,
    tiles_of,
)

from fusedrl import VocabPart, linear_token_log_probs

NOTHING_STORED = torch.empty(0), torch.empty(0, dtype=torch.int64)


def head(rows, classes, width, dtype):
    """Hidden states, weight, bias and tokens. Exponents relative to one class overflow."""
    tensors = torch.randn(rows, width), torch.randn(classes, width) * 0.7, torch.randn(classes)
    tensors[2][classes // 2] = -300
    return (*(x.to(dtype) for x in tensors), torch.randint(0, classes, (rows,)))


def compare_linear(hidden, weight, bias, tokens, batch_invariant=False, **options):
    """Forward and all gradients beside the reference on the same values in float64."""
    for entropy in (True, False):
        compare_results(hidden, weight, bias, tokens, batch_invariant, entropy, **options)


def compare_results(hidden, weight, bias, tokens, batch_invariant, entropy, **options):
    upstream = torch.randn(2, *tokens.shape)
    inputs = [x for x in (hidden, weight, bias) if x is not None]
    results = []
    for impl, dtype in (("cpu", hidden.dtype), ("reference", torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        out = linear_token_log_probs(
            *(*leaves[:2], tokens), bias=leaves[2] if bias is not None else None, entropy=entropy,
            impl=impl, batch_invariant=batch_invariant and impl == "cpu", **options,
        )  # fmt: skip
        outputs = [x for x in out if x is not None]
        given = [up.to(x) for up, x in zip(upstream, outputs, strict=False)]
        results.append((outputs, torch.autograd.grad(outputs, leaves, given)))
    (mine, grads), (exact, exact_grads) = results
    for got, want in zip(mine, exact, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=3e-6, atol=1e-5)
        assert torch.equal(got == 0, want == 0)
    # Half gradients of products are rounded before they are summed.
    tol = TOLERANCE[hidden.dtype]
    for got, want in zip(grads, exact_grads, strict=True):
        assert got.dtype == hidden.dtype
        atol = max([1e-5, *(tol * want.abs().flatten()).tolist()])
        torch.testing.assert_close(got.double(), want, rtol=max(tol, 1e-5), atol=atol)
    assert torch.equal(grads[0].any(-1), exact_grads[0].any(-1))  # zero rows are zero


def check_sizes_and_dtypes():
    """Less than a tile, whole ones, and parts of the last; one row, a block, and a part."""
    for rows, classes in [(1, 1), (9, 16), (1, 35), (9, 35)]:
        compare_linear(*head(rows, classes, 3, torch.float32), temperature=0.7)
    for dtype in DTYPES[1:]:
        compare_linear(*head(9, 16, 3, dtype), temperature=0.7)
    compare_linear(*head(5, 18, 1, torch.bfloat16))


def check_long_tiles():
    """Two tiles, one of so many classes that threads of sixteen warps have several packs."""
    with tiles_of(2 * 4200):
        for dtype in DTYPES:
            hidden, weight, bias, tokens = head(2, 6100, 2, dtype)
            compare_linear(hidden, weight, bias, tokens, softcap=3.0)
            mine = linear_token_log_probs(hidden, weight, tokens, bias=bias, softcap=3.0).log_probs
            exact = linear_token_log_probs(
                hidden.double(), weight.double(), tokens, bias=bias.double(), softcap=3.0
            ).log_probs
            torch.testing.assert_close(mine.double(), exact, rtol=3e-6, atol=1e-5)


def check_options():
    """Bias, softcap and scale, each with and without; blocks of a fixed size."""
    for dtype, biased, softcap in itertools.product(DTYPES, [False, True], [None, 3.0]):
        hidden, weight, bias, tokens = head(7, 21, 6, dtype)
        options = {"softcap": softcap, "scale": 1.5 if softcap else None}
        compare_linear(
            *(hidden, weight, bias if biased else None, tokens),
            batch_invariant=biased != (softcap is None),
            **options,
        )


def check_shifts_and_masks():
    """Packed, padded and strided, with dropped rows that hold NaN and tokens that are no class."""
    for dtype, shift, (shape, offsets) in itertools.product(DTYPES, [False, True], LAYOUTS):
        hidden, weight, bias, tokens = head(14 if len(shape) == 1 else 12, 19, 5, dtype)
        hidden = hidden.view(*shape[:-1], 2 * shape[-1], 5)[..., ::2, :]  # every other row
        tokens = tokens[: torch.Size(shape).numel()].view(shape)
        mask = torch.arange(tokens.numel()).view(shape) % 3 != 0
        rows = mask.flatten().roll(-1).view(shape) if shift else mask
        hidden[~rows] = torch.nan
        compare_linear(
            *(hidden, weight, bias, tokens.masked_fill(~mask, -100)),
            mask=mask,
            offsets=offsets,
            shift=shift,
        )
    for mask in (torch.zeros(7, dtype=torch.bool), torch.ones(7, dtype=torch.bool)):
        compare_linear(*head(7, 19, 5, torch.float32), mask=mask, batch_invariant=True)
    compare_linear(*head(0, 19, 5, torch.float32))


def check_rows_that_a_shift_drops_are_counted_on_the_host():
    """Of padded rows, few and many: no token is flagged. Offsets and masks are on the device."""
    for shape, options, counted in [
        ((3, 4), {}, False),
        ((100, 5), {}, False),
        ((12, 1), {}, False),
        ((12,), {"offsets": torch.tensor([0, 5, 12])}, True),
        ((3, 4), {"mask": torch.ones(3, 4, dtype=torch.bool)}, True),
    ]:
        hidden, weight, bias, tokens = head(torch.Size(shape).numel(), 5, 3, torch.float32)
        before = rows_counted_on_device()
        rows = hidden.view(*shape, 3), weight, bias, tokens.view(shape)
        compare_results(*rows, batch_invariant=False, entropy=True, shift=True, **options)
        assert (rows_counted_on_device() > before) == counted


def check_rows_are_counted_once():
    """The host need not wait for their number a second time."""
    hidden, weight, _, tokens = head(7, 19, 5, torch.float32)
    leaves, mask = [hidden.requires_grad_(), weight.requires_grad_()], torch.arange(7) % 3 != 0
    assert_rows_are_counted_once(
        linear_token_log_probs(*leaves, tokens, mask).log_probs, leaves, mask
    )


def check_many_tokens():
    """More than the threads of a grid, few of them kept; rows wider than four blocks.

    All, some or few of the rows start where packs do, and threads have several batches of these.
    """
    mask = torch.arange(120) % 37 == 3
    options = {"mask": mask, "shift": True, "offsets": torch.tensor([0, 120])}
    for dtype, (width, first) in itertools.product(DTYPES, [(1040, 0), (150, 0), (1040, 1)]):
        hidden, *others = head(120, 9, width, dtype)
        hidden = torch.zeros(120, first + width, dtype=dtype)[:, first:].copy_(hidden)
        compare_linear(hidden, *others, **options)


def check_infinities():
    """Tiles of banned classes; a row that is NaN, and no other."""
    for banned in (slice(0, 16), slice(16, 32), slice(0, 33)):
        hidden, weight, bias, tokens = head(6, 35, 4, torch.float32)
        bias[banned] = -torch.inf
        tokens[:] = torch.tensor([33, 34, 33, 34, 33, 34])
        compare_linear(hidden, weight, bias, tokens)
    hidden[2, 1] = torch.nan
    mine = linear_token_log_probs(hidden, weight, tokens, bias=bias).log_probs
    assert mine.isnan().tolist() == [False, False, True, False, False, False]


def check_bits_of_a_row():
    """Alone, in a batch and shuffled, where blocks have a fixed size."""
    for dtype in DTYPES:
        hidden, weight, bias, tokens = head(8, 35, 6, dtype)
        options = {"bias": bias, "entropy": True, "batch_invariant": True}
        whole = torch.stack(linear_token_log_probs(hidden, weight, tokens, **options))
        for chosen in (torch.randperm(8), torch.tensor([5]), torch.arange(2, 6)):
            part = linear_token_log_probs(hidden[chosen], weight, tokens[chosen], **options)
            assert torch.equal(torch.stack(part), whole[:, chosen])


def check_sums_of_a_frozen_head():
    """What is summed beside the softmax, over tiles whose largest logits rise, fall or are none."""
    for dtype, shift, (shape, offsets) in itertools.product(DTYPES, [False, True], LAYOUTS):
        count = torch.Size(shape).numel()
        hidden, weight, bias, tokens = head(count, 35, 6, dtype)
        weight *= torch.linspace(0.2, 3, 35, dtype=dtype)[:, None].flip(0 if shift else 1)
        bias[:16] = -torch.inf if shift else bias[:16]
        tokens = (tokens % 19 + 16).view(shape)
        mask = torch.arange(count).view(shape) % 3 != 0
        options = {"offsets": offsets, "shift": shift, "softcap": 3.0 if shift else None}
        upstream, results = torch.randn(shape), []
        for impl, of in (("cpu", dtype), ("reference", torch.float64)):
            leaf = hidden.to(of).view(*shape, 6).requires_grad_()
            found = linear_token_log_probs(
                *(leaf, weight.to(of), tokens, mask), bias=bias.to(of), scale=0.8, temperature=0.7,
                impl=impl, **options,
            ).log_probs  # fmt: skip
            results.append(torch.autograd.grad(found, leaf, upstream.to(found))[0])
        got, want = results
        tol = max(TOLERANCE[dtype], 1e-5)
        atol = tol * want.abs().max().item()
        torch.testing.assert_close(got.double(), want, rtol=tol, atol=atol)
        assert torch.equal(got.any(-1), want.any(-1))


def check_shards():
    """Parts combine to the whole, and what shards' gradients add up to is the whole's."""
    bounds = [(0, 11), (11, 12), (12, 35)]
    for dtype, shift in itertools.product(DTYPES, [False, True]):
        hidden, weight, bias, tokens = head(7, 35, 6, dtype)
        mask, options = torch.arange(7) != 2, {"offsets": OFFSETS, "shift": shift}
        parts = [
            VocabPart.of(
                *(hidden, weight[first:end], tokens, mask), bias=bias[first:end],
                vocab_offset=first, entropy=True, **options,
            )
            for first, end in bounds
        ]  # fmt: skip
        leaves = [x.double().requires_grad_() for x in (hidden, weight, bias)]
        truth = linear_token_log_probs(
            *(*leaves[:2], tokens, mask), bias=leaves[2], entropy=True, **options
        )
        for got, want in zip(VocabPart.combine(parts[::-1]), truth, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=3e-6, atol=1e-5)
        upstream, temperature = torch.randn(2, 7), torch.ones((), dtype=torch.float64)
        statistics = torch.stack([part.statistics for part in parts])
        results = torch.ops.fusedrl.linear_token_log_probs_finish(statistics, temperature, True)
        grads = [
            torch.ops.fusedrl.linear_token_log_probs_backward(
                *(*upstream, hidden, weight[first:end], bias[first:end], tokens, mask, OFFSETS),
                *(shift, temperature, 1.0, 0.0, *results, *NOTHING_STORED, first, False),
                *(True, True, True),
            )
            for first, end in bounds
        ]
        of_hidden, of_weight, of_bias = zip(*grads, strict=True)
        assert all(grad.dtype == torch.float32 for grad in of_hidden)
        mine = sum(of_hidden), torch.cat(of_weight), torch.cat(of_bias)
        exact = torch.autograd.grad(tuple(truth), leaves, [up.double() for up in upstream])
        tol = max(TOLERANCE[dtype], 1e-5)
        for got, want in zip(mine, exact, strict=True):
            atol = tol * want.abs().max().item()
            torch.testing.assert_close(got.double(), want, rtol=tol, atol=atol)


def check_wrong_tokens_stop_the_kernel():
    """A token outside the vocabulary; one outside a shard is none of its concern."""
    hidden, weight, _, _ = head(2, 5, 3, torch.float32)
    for token in (-1, 5):
        tokens = torch.tensor([1, token])
        with pytest.raises(RuntimeError, match="tokens: expected values in"):
            linear_token_log_probs(hidden, weight, tokens)
        part = VocabPart.of(hidden, weight, tokens, vocab_offset=0)
        assert (part.target[1] == -torch.inf).all()
