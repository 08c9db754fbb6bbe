"""Run the CUDA kernels, compiled for the host, against the float64 reference.

``run.py LIBRARY`` loads the emulated ops in the place of ``_C``, so that the public functions call
them on CPU tensors, and exits with the first failing comparison.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
import torch

from fusedrl import native

native.find = lambda name: Path(sys.argv[1])

# The library is chosen before this.
from fusedrl import VocabPart, exact_kl, linear_token_log_probs, token_kl, token_log_probs  # noqa: E402
from fusedrl.ops.exact_kl import DIRECTIONS  # noqa: E402
from fusedrl.ops.token_kl import ESTIMATORS  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OFFSETS = torch.tensor([0, 3, 3, 4, 7])
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # of stored gradients


def compare_log_probs(logits, tokens, **options):
    """Forward and backward beside the reference on the same values in float64."""
    results = []
    for x, impl in ((logits, "cpu"), (logits.double(), "reference")):
        leaf = x.detach().requires_grad_()
        out = token_log_probs(leaf, tokens, entropy=True, impl=impl, **options)
        (out.log_probs * 0.7 - out.entropy * 0.3).sum().backward()
        results.append((*out, leaf.grad))
    (mine, entropy, grad), (exact, exact_entropy, exact_grad) = results
    for got, want in ((mine, exact), (entropy, exact_entropy)):
        torch.testing.assert_close(
            got.double(), want.detach(), rtol=3e-6, atol=1e-5, equal_nan=True
        )
    tol = TOLERANCE[logits.dtype]
    torch.testing.assert_close(grad.double(), exact_grad, rtol=tol, atol=1e-6, equal_nan=True)


def sizes_and_dtypes():
    """Around packs, warps and batches of packs; odd sizes leave every other row misaligned."""
    for dtype, classes in itertools.product(DTYPES, [1, 7, 8, 17, 129, 1001, 4097]):
        logits, tokens = (torch.randn(3, classes) * 4).to(dtype), torch.randint(0, classes, (3,))
        compare_log_probs(logits, tokens, temperature=0.7)


def shifts_and_masks():
    """Packed and padded, with dropped rows that hold NaN and tokens that are no class."""
    for dtype, shift, shape in itertools.product(DTYPES, [False, True], [(7,), (2, 3)]):
        logits, tokens = torch.randn(*shape, 65).to(dtype), torch.randint(0, 65, shape)
        mask = torch.arange(tokens.numel()).view(shape) % 3 != 0
        rows = mask.flatten().roll(-1).view(shape) if shift else mask
        logits[~rows] = float("nan")
        offsets = OFFSETS if len(shape) == 1 else None
        options = {"mask": mask, "offsets": offsets, "shift": shift}
        compare_log_probs(logits, tokens.masked_fill(~mask, -100), **options)


def infinities():
    """A tile of -inf, a row of it, NaN and +inf."""
    logits, tokens = torch.randn(5, 9001), torch.randint(8000, 8900, (5,))
    logits[0, :4000] = -torch.inf
    logits[1, :8900] = -torch.inf
    logits[1, 8950] = 1.0
    tokens[1] = 8950
    compare_log_probs(logits[:2], tokens[:2])
    logits[2], logits[3, 17], logits[4, 8999] = -torch.inf, torch.nan, torch.inf
    mine = token_log_probs(logits, tokens, impl="cpu")
    assert mine.isnan().tolist() == [False, False, True, True, True]


def misaligned_views():
    """A row's bits do not depend on where it starts."""
    for dtype in DTYPES:
        row, token = torch.randn(1, 1001).to(dtype), torch.tensor([500])
        alone = token_log_probs(row, token)
        for before in range(8):
            among = torch.zeros(before + 3 * 1001, dtype=dtype)[before:].view(3, 1001)
            among[1] = row
            assert torch.equal(token_log_probs(among, token.expand(3))[1], alone[0])


def offsets_beyond_int32():
    """Rows that lie more than 2^31 elements apart; the pages between them are never touched."""
    apart = 2**31 + 24
    storage = torch.empty(apart + 2 * 33, dtype=torch.bfloat16)
    logits = storage.as_strided((2, 2, 33), (apart, 33, 1))
    logits.copy_(torch.randn(2, 2, 33))
    tokens = torch.randint(0, 33, (2, 2))
    mine = token_log_probs(logits, tokens, shift=True)
    assert torch.equal(mine, token_log_probs(logits.contiguous(), tokens, shift=True))


def wrong_tokens_stop_the_kernel():
    """The device-side check of a kept token."""
    with pytest.raises(RuntimeError, match="tokens: expected values in"):
        token_log_probs(torch.zeros(2, 5), torch.tensor([1, 5]))


def kl():
    """Every estimator, with mask, missing values, gradients and broadcast rewards."""
    for dtype, estimator in itertools.product([torch.float32, torch.float64], ESTIMATORS):
        p, q = torch.randn(2, 700).to(dtype).unbind()
        p[5], reward = torch.nan, torch.randn(3).to(dtype)
        offsets, mask = torch.tensor([0, 100, 100, 700]), torch.rand(700) < 0.7
        results = []
        for impl in ("cpu", "reference"):
            leaf = p.clone().requires_grad_()
            out = token_kl(
                leaf, q, mask, offsets=offsets, reward=reward, coeff=0.3, estimator=estimator,
                nan="missing", impl=impl,
            )  # fmt: skip
            (out.kl + out.reward).sum().backward()
            results.append((*out, leaf.grad))
        for mine, want in zip(*results, strict=True):
            torch.testing.assert_close(mine, want)


def compare_exact_kl(logits, ref_logits, **options):
    """Forward and both gradients beside the reference on the same values in float64."""
    upstream = torch.randn(logits.shape[:-1])
    results = []
    for impl, dtype in (("cpu", logits.dtype), ("reference", torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (logits, ref_logits)]
        divergence = exact_kl(*leaves, impl=impl, **options)
        results.append(
            (divergence, *torch.autograd.grad(divergence, leaves, upstream.to(divergence)))
        )
    (mine, *grads), (exact, *exact_grads) = results
    torch.testing.assert_close(mine.double(), exact, rtol=3e-6, atol=3e-6)
    tol = TOLERANCE[logits.dtype]
    for got, want in zip(grads, exact_grads, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=tol, atol=1e-5)
        assert torch.equal(got.any(-1), want.any(-1))  # zero rows are zero, not almost


def exact_kl_sizes_and_dtypes():
    """As above; rows of even sizes start on a boundary, the two rows of an odd one lie apart."""
    sizes, directions = [1, 7, 8, 17, 129, 1000, 4097], ("reverse", "jensen_shannon")
    for dtype, classes, direction in itertools.product(DTYPES, sizes, directions):
        p = (torch.randn(3, classes) * 4).to(dtype)
        q = torch.randn(3, classes + classes % 2 * 2).to(dtype)[:, classes % 2 :][:, :classes]
        compare_exact_kl(p, q, direction=direction, temperature=0.7)


def exact_kl_shifts_and_masks():
    """Packed and padded, with dropped rows that hold NaN."""
    shapes = [(7,), (2, 3)]
    for dtype, shift, shape in itertools.product(DTYPES, [False, True], shapes):
        p, q = torch.randn(2, *shape, 65).to(dtype).unbind()
        mask = torch.arange(p[..., 0].numel()).view(shape) % 3 != 0
        rows = mask.flatten().roll(-1).view(shape) if shift else mask
        p[~rows] = q[~rows] = torch.nan
        offsets = OFFSETS if len(shape) == 1 else None
        compare_exact_kl(p, q, mask=mask, offsets=offsets, shift=shift, direction="forward")


def exact_kl_infinities():
    """Classes without probability in either row or both, whole tiles of them, infinite rows."""
    for direction in DIRECTIONS:
        p, q = torch.randn(2, 6, 9001).unbind()
        p[0, :4500] = q[0, :4500] = -torch.inf
        p[1, :8900] = q[1, :8800] = -torch.inf
        order = (q, p) if direction == "forward" else (p, q)
        compare_exact_kl(order[0][:2], order[1][:2], direction=direction)
        q[2, 4000:], p[3], q[4], p[5, 9000] = -torch.inf, -torch.inf, -torch.inf, torch.nan
        order = (q, p) if direction == "forward" else (p, q)
        mine = exact_kl(*order, direction=direction, impl="cpu")
        assert mine.isnan().tolist() == [False] * 3 + [True] * 3
        assert mine[2].isfinite() if direction == "jensen_shannon" else mine[2] == torch.inf


def exact_kl_rows_alone():
    """A row's bits do not depend on where either row starts, nor on which side wants a gradient."""
    for dtype, direction in itertools.product(DTYPES, ("reverse", "jensen_shannon")):
        p, q = torch.randn(2, 1, 1001).to(dtype).unbind()
        alone = exact_kl(p, q, direction=direction)
        for before, ref_before in itertools.product((0, 1, 3), (0, 6)):
            among, ref_among = (
                torch.zeros(start + 3 * 1001, dtype=dtype)[start:].view(3, 1001)
                for start in (before, ref_before)
            )
            among[1], ref_among[1] = p, q
            assert torch.equal(exact_kl(among, ref_among, direction=direction)[1], alone[0])
        both = [p.clone().requires_grad_(), q.clone().requires_grad_()]
        exact_kl(*both, direction=direction).sum().backward()
        for side in (0, 1):
            pair = [p.clone(), q.clone()]
            exact_kl(*pair[:side], pair[side].requires_grad_(), *pair[side + 1 :],
                     direction=direction).sum().backward()  # fmt: skip
            assert torch.equal(pair[side].grad, both[side].grad)


def head(rows, classes, width, dtype):
    """Hidden states, weight, bias and tokens."""
    tensors = torch.randn(rows, width), torch.randn(classes, width) * 0.7, torch.randn(classes)
    return (*(x.to(dtype) for x in tensors), torch.randint(0, classes, (rows,)))


def compare_linear(hidden, weight, bias, tokens, batch_invariant=False, **options):
    """Forward and all gradients beside the reference on the same values in float64."""
    upstream = torch.randn(2, *tokens.shape)
    inputs = [x for x in (hidden, weight, bias) if x is not None]
    results = []
    for impl, dtype in (("cpu", hidden.dtype), ("reference", torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        out = linear_token_log_probs(
            *(*leaves[:2], tokens), bias=leaves[2] if bias is not None else None, entropy=True,
            impl=impl, batch_invariant=batch_invariant and impl == "cpu", **options,
        )  # fmt: skip
        grads = torch.autograd.grad(tuple(out), leaves, [up.to(out[0]) for up in upstream])
        results.append((out, grads))
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


def linear_sizes_and_dtypes():
    """Less than a tile, whole ones, and parts of the last; one row, a block, and a part."""
    for dtype, classes, rows in itertools.product(DTYPES, [1, 16, 35], [1, 9]):
        compare_linear(*head(rows, classes, 3, dtype), temperature=0.7)
    compare_linear(*head(5, 18, 1, torch.bfloat16))


def linear_options():
    """Bias, softcap and scale, each with and without; blocks of a fixed size."""
    for dtype, biased, softcap in itertools.product(DTYPES, [False, True], [None, 3.0]):
        hidden, weight, bias, tokens = head(7, 21, 6, dtype)
        options = {"softcap": softcap, "scale": 1.5 if softcap else None}
        compare_linear(
            *(hidden, weight, bias if biased else None, tokens),
            batch_invariant=biased != (softcap is None),
            **options,
        )


def linear_shifts_and_masks():
    """Packed, padded and strided, with dropped rows that hold NaN and tokens that are no class."""
    shapes = [(7,), (2, 3)]
    for dtype, shift, shape in itertools.product(DTYPES, [False, True], shapes):
        hidden, weight, bias, tokens = head(14 if len(shape) == 1 else 12, 19, 5, dtype)
        hidden = hidden.view(*shape[:-1], 2 * shape[-1], 5)[..., ::2, :]  # every other row
        tokens = tokens[: torch.Size(shape).numel()].view(shape)
        mask = torch.arange(tokens.numel()).view(shape) % 3 != 0
        rows = mask.flatten().roll(-1).view(shape) if shift else mask
        hidden[~rows] = torch.nan
        compare_linear(
            *(hidden, weight, bias, tokens.masked_fill(~mask, -100)),
            mask=mask,
            offsets=OFFSETS if len(shape) == 1 else None,
            shift=shift,
        )
    for mask in (torch.zeros(7, dtype=torch.bool), torch.ones(7, dtype=torch.bool)):
        compare_linear(*head(7, 19, 5, torch.float32), mask=mask, batch_invariant=True)
    compare_linear(*head(0, 19, 5, torch.float32))


def linear_infinities():
    """Tiles of banned classes; a row that is NaN, and no other."""
    for banned in (slice(0, 16), slice(16, 32), slice(0, 33)):
        hidden, weight, bias, tokens = head(6, 35, 4, torch.float32)
        bias[banned] = -torch.inf
        tokens[:] = torch.tensor([33, 34, 33, 34, 33, 34])
        compare_linear(hidden, weight, bias, tokens)
    hidden[2, 1] = torch.nan
    mine = linear_token_log_probs(hidden, weight, tokens, bias=bias)
    assert mine.isnan().tolist() == [False, False, True, False, False, False]


def linear_bits_of_a_row():
    """Alone, in a batch and shuffled, where blocks have a fixed size."""
    for dtype in DTYPES:
        hidden, weight, bias, tokens = head(8, 35, 6, dtype)
        options = {"bias": bias, "entropy": True, "batch_invariant": True}
        whole = torch.stack(linear_token_log_probs(hidden, weight, tokens, **options))
        for chosen in (torch.randperm(8), torch.tensor([5]), torch.arange(2, 6)):
            part = linear_token_log_probs(hidden[chosen], weight, tokens[chosen], **options)
            assert torch.equal(torch.stack(part), whole[:, chosen])


def linear_shards():
    """Parts combine to the whole, and what shards' gradients add up to is the whole's."""
    bounds = [(0, 11), (11, 12), (12, 35)]
    for dtype, shift in itertools.product(DTYPES, [False, True]):
        hidden, weight, bias, tokens = head(7, 35, 6, dtype)
        mask, options = torch.arange(7) != 2, {"offsets": OFFSETS, "shift": shift}
        parts = [
            linear_token_log_probs(
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
                *(shift, temperature, 1.0, 0.0, *results, first, False, True, True, True),
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


def linear_wrong_tokens_stop_the_kernel():
    """A token outside the vocabulary; one outside a shard is none of its concern."""
    hidden, weight, _, _ = head(2, 5, 3, torch.float32)
    for token in (-1, 5):
        tokens = torch.tensor([1, token])
        with pytest.raises(RuntimeError, match="tokens: expected values in"):
            linear_token_log_probs(hidden, weight, tokens)
        part = linear_token_log_probs(hidden, weight, tokens, vocab_offset=0)
        assert (part.target[1] == -torch.inf).all()


def main() -> None:
    torch.manual_seed(0)
    for check in (
        sizes_and_dtypes,
        shifts_and_masks,
        infinities,
        misaligned_views,
        offsets_beyond_int32,
        wrong_tokens_stop_the_kernel,
        kl,
        exact_kl_sizes_and_dtypes,
        exact_kl_shifts_and_masks,
        exact_kl_infinities,
        exact_kl_rows_alone,
        linear_sizes_and_dtypes,
        linear_options,
        linear_shifts_and_masks,
        linear_infinities,
        linear_bits_of_a_row,
        linear_shards,
        linear_wrong_tokens_stop_the_kernel,
    ):
        check()
        print(f"{check.__name__}: passed", flush=True)


if __name__ == "__main__":
    main()
