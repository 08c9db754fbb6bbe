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
from fusedrl import exact_kl, linear_exact_kl, token_kl, token_log_probs  # noqa: E402
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


def kl_of_lists():
    """Samples that lie apart, in more than one launch: empty ones, masks, one-value rewards."""
    coeff = torch.tensor(0.3, dtype=torch.float64)
    lengths = [*torch.randint(0, 9, (900,)).tolist(), 0, 5000, 1, 0]
    lengths[100:870] = [0] * 770  # most of the first launch and a part of the second
    for dtype, kinds in itertools.product([*DTYPES, torch.float64], ("none", "tokens", "mixed")):
        p, q = ([torch.randn(n + 1).to(dtype)[1:] for n in lengths] for _ in range(2))
        p[-3][4000], mask = torch.nan, [torch.rand(n) < 0.7 for n in lengths]
        of_token = [torch.randn(n, 1).to(dtype) for n in lengths]
        of_sample = [torch.randn(1).to(dtype) for _ in lengths]
        reward = {"none": [], "tokens": of_token, "mixed": of_token[:450] + of_sample[450:]}[kinds]
        if kinds == "none":
            mask = []
        ours = torch.ops.fusedrl.token_kl_list(p, q, mask, reward, coeff, 2, True)
        spread = [r.reshape(-1).expand(n) for r, n in zip(reward, lengths, strict=bool(reward))]
        want = token_kl(
            torch.cat(p), torch.cat(q), torch.cat(mask) if mask else None, estimator="k3",
            reward=torch.cat(spread) if reward else None, coeff=0.3, nan="missing",
            impl="reference",
        )  # fmt: skip
        if not reward:
            want = (want, want[:0])
        for mine, exact in zip(ours, want, strict=True):
            torch.testing.assert_close(mine, exact)


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


def head_pair(rows, classes, dtype, widths=(5, 9)):
    """The policy's hidden states, weight and bias, and those of a reference of its own width."""
    heads = ((torch.randn(*rows, n), torch.randn(classes, n), torch.randn(classes)) for n in widths)
    return [x.to(dtype) for head in heads for x in head]


def linear_kl(heads, mask=None, **options):
    hidden, weight, bias, ref_hidden, ref_weight, ref_bias = heads
    return linear_exact_kl(
        hidden, weight, ref_hidden, ref_weight, mask, bias=bias, ref_bias=ref_bias, **options
    )


def compare_linear_exact_kl(heads, mask=None, batch_invariant=False, **options):
    """Forward and the gradients of both heads beside the reference in float64."""
    upstream = torch.randn(heads[0].shape[:-1])
    results = []
    for impl, dtype in (("cpu", heads[0].dtype), ("reference", torch.float64)):
        leaves = [None if x is None else x.detach().to(dtype).requires_grad_() for x in heads]
        fixed = batch_invariant and impl == "cpu"
        divergence = linear_kl(leaves, mask, impl=impl, batch_invariant=fixed, **options)
        asked = [x for x in leaves if x is not None]
        results.append(
            (divergence, *torch.autograd.grad(divergence, asked, upstream.to(divergence)))
        )
    (mine, *grads), (exact, *exact_grads) = results
    torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-5)
    tol = TOLERANCE[heads[0].dtype]
    for got, want in zip(grads, exact_grads, strict=True):
        # Those of the logits are rounded to the dtype too, before they are multiplied.
        largest = want.abs().max().item()
        torch.testing.assert_close(got.double(), want, rtol=tol, atol=1e-5 + tol * largest)
        assert not got[~want.any(-1)].any()  # zero rows are zero, not almost


def linear_exact_kl_sizes_and_dtypes():
    """Tiles of four rows and sixteen classes: one, several, the last of either not full."""
    sizes, directions = [(1, 1), (3, 7), (6, 16), (9, 50)], ("reverse", "jensen_shannon")
    for (rows, classes), dtype, direction in itertools.product(sizes, DTYPES[:2], directions):
        heads = head_pair((rows,), classes, dtype)
        compare_linear_exact_kl(heads, direction=direction, temperature=0.7)


def linear_exact_kl_shapes_of_logits():
    """Biases, scales and softcaps of one side, of both, of none."""
    shapes = [
        ({2, 5}, {}),
        ({2}, {"softcap": 3.0, "ref_scale": 1.5}),
        ({5}, {"scale": 0.5, "ref_softcap": 2.0}),
        (set(), {"scale": 1.7, "softcap": 3.0, "ref_scale": 0.6, "ref_softcap": 5.0}),
    ]
    for (missing, shape), direction in itertools.product(shapes, DIRECTIONS):
        heads = head_pair((5,), 21, torch.float32)
        heads = [None if i in missing else x for i, x in enumerate(heads)]
        compare_linear_exact_kl(heads, direction=direction, **shape)


def linear_exact_kl_shifts_and_masks():
    """Packed and padded, with dropped rows that hold NaN, and a reference of other strides."""
    layouts = itertools.product([(7,), (2, 3)], [False, True], [False, True])
    for (shape, shift, batch_invariant), dtype in zip(layouts, DTYPES[:2] * 4, strict=True):
        heads = head_pair(shape, 21, dtype)
        mask = torch.arange(heads[0][..., 0].numel()).view(shape) % 3 != 0
        rows = mask.flatten().roll(-1).view(shape) if shift else mask
        heads[0][~rows] = heads[3][~rows] = torch.nan
        offsets = OFFSETS if len(shape) == 1 else None
        options = {"offsets": offsets, "shift": shift, "batch_invariant": batch_invariant}
        apart = [torch.cat([x, x], -1)[..., :9] if i == 3 else x for i, x in enumerate(heads)]
        compare_linear_exact_kl(apart, mask, **options)
        compare_linear_exact_kl(heads, torch.zeros_like(mask), **options)


def linear_exact_kl_frozen_sides():
    """A gradient's bits do not depend on which others are wanted."""
    for dtype, direction in itertools.product(DTYPES[:2], ("reverse", "jensen_shannon")):
        heads = head_pair((7,), 21, dtype)
        options = {"direction": direction, "softcap": 3.0, "batch_invariant": True}
        leaves = [x.clone().requires_grad_() for x in heads]
        whole = linear_kl(leaves, **options)
        grads = torch.autograd.grad(whole.sum(), leaves)
        for side in (slice(0, 3), slice(3, 6), slice(4, 5)):
            frozen = [x.clone() for x in heads]
            asked = [x.requires_grad_() for x in frozen[side]]
            mine = torch.autograd.grad(linear_kl(frozen, **options).sum(), asked)
            assert all(map(torch.equal, mine, grads[side]))


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
        kl_of_lists,
        exact_kl_sizes_and_dtypes,
        exact_kl_shifts_and_masks,
        exact_kl_infinities,
        exact_kl_rows_alone,
        linear_exact_kl_sizes_and_dtypes,
        linear_exact_kl_shapes_of_logits,
        linear_exact_kl_shifts_and_masks,
        linear_exact_kl_frozen_sides,
    ):
        check()
        print(f"{check.__name__}: passed", flush=True)


if __name__ == "__main__":
    main()
