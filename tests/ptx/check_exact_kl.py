"""exact_kl by its compiled kernels."""

from __future__ import annotations

import itertools

import torch
from ptx.values import DTYPES, LAYOUTS, TOLERANCE, spread_rows

from fusedrl import exact_kl
from fusedrl.ops.exact_kl import DIRECTIONS


def compare_exact_kl(logits, ref_logits, **options):
    """Forward and both gradients beside the reference on the same values in float64."""
    upstream, of_entropy = torch.randn(2, *logits.shape[:-1])
    results = []
    for impl, dtype in (("cpu", logits.dtype), ("reference", torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (logits, ref_logits)]
        outputs = exact_kl(*leaves, impl=impl, **options)
        outputs = [x for x in outputs if x is not None]
        given = [x.to(y) for x, y in zip((upstream, of_entropy), outputs, strict=False)]
        results.append((outputs, *torch.autograd.grad(outputs, leaves, given)))
    (mine, *grads), (exact, *exact_grads) = results
    for got, want in zip(mine, exact, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=3e-6, atol=3e-6)
    tol = TOLERANCE[logits.dtype]
    for got, want in zip(grads, exact_grads, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=tol, atol=3e-6)
        assert torch.equal(got.any(-1), want.to(got).any(-1))  # zero rows are zero, not almost


def check_sizes_and_dtypes():
    """As above; rows of even sizes start on a boundary, the two rows of an odd one lie apart."""
    sizes, directions = [1, 2, 7, 8, 17, 129, 3592, 4099], ("reverse", "jensen_shannon")
    kinds = itertools.product(DTYPES, sizes, directions, (False, True))
    for dtype, classes, direction, entropy in kinds:
        odd = classes % 2
        p = spread_rows(3, classes + odd).to(dtype)[:, odd:]
        q = torch.randn(3, classes + 2 * odd).to(dtype)[:, odd : odd + classes]
        compare_exact_kl(p, q, direction=direction, temperature=0.7, entropy=entropy)


def check_betas_and_entropies():
    """Mixtures of any share, and the policy's entropy beside every divergence."""
    for dtype, classes, beta in itertools.product(DTYPES, [1, 1000], [0, 1e-3, 0.2, 0.999, 1]):
        p = spread_rows(4, classes).to(dtype)
        q = (p + torch.randn(4, classes)).to(dtype)
        options = {"direction": "jensen_shannon", "beta": beta, "temperature": 0.7}
        compare_exact_kl(p, q, **options)
        compare_exact_kl(p, q, **options, entropy=True)
    near = exact_kl(p, p * 1.001, direction="jensen_shannon", beta=1e-3, impl="cpu").kl
    exact = exact_kl(p.double(), (p * 1.001).double(), direction="jensen_shannon", beta=1e-3).kl
    torch.testing.assert_close(near.double(), exact, rtol=1e-3, atol=0)


def check_shifts_and_masks():
    """Packed and padded, with dropped rows that hold NaN."""
    for dtype, shift, (shape, offsets) in itertools.product(DTYPES, [False, True], LAYOUTS):
        p, q = torch.randn(2, *shape, 65).to(dtype).unbind()
        mask = torch.arange(p[..., 0].numel()).view(shape) % 3 != 0
        rows = mask.flatten().roll(-1).view(shape) if shift else mask
        p[~rows] = q[~rows] = torch.nan
        options = {"mask": mask, "offsets": offsets, "shift": shift, "entropy": shift}
        for direction in ("forward", "jensen_shannon"):
            compare_exact_kl(p, q, direction=direction, **options)


def check_infinities():
    """Classes without probability in either row or both, whole tiles of them, infinite rows."""
    for dtype, direction in itertools.product(DTYPES, DIRECTIONS):
        p, q = torch.randn(2, 6, 9001).to(dtype).unbind()
        p[0, :4500] = q[0, :4500] = -torch.inf
        p[1, :8900] = q[1, :8800] = -torch.inf
        order = (q, p) if direction == "forward" else (p, q)
        compare_exact_kl(order[0][:2], order[1][:2], direction=direction, entropy=True)
        q[2, 4000:], p[3], q[4], p[5, 9000] = -torch.inf, -torch.inf, -torch.inf, torch.nan
        order = (q, p) if direction == "forward" else (p, q)
        mine = exact_kl(*order, direction=direction, impl="cpu").kl
        assert mine.isnan().tolist() == [False] * 3 + [True] * 3
        assert mine[2].isfinite() if direction == "jensen_shannon" else mine[2] == torch.inf


def check_rows_alone():
    """A row's bits do not depend on where either row starts, nor on which side wants a gradient."""
    for dtype, direction in itertools.product(DTYPES, ("reverse", "jensen_shannon")):
        p, q = torch.randn(2, 1, 1001).to(dtype).unbind()
        alone = exact_kl(p, q, direction=direction).kl
        for before, ref_before in itertools.product((0, 1, 3), (0, 6)):
            among, ref_among = (
                torch.zeros(start + 3 * 1001, dtype=dtype)[start:].view(3, 1001)
                for start in (before, ref_before)
            )
            among[1], ref_among[1] = p, q
            assert torch.equal(exact_kl(among, ref_among, direction=direction).kl[1], alone[0])
        both = [p.clone().requires_grad_(), q.clone().requires_grad_()]
        exact_kl(*both, direction=direction).kl.sum().backward()
        for side in (0, 1):
            pair = [p.clone(), q.clone()]
            exact_kl(*pair[:side], pair[side].requires_grad_(), *pair[side + 1 :],
                     direction=direction).kl.sum().backward()  # fmt: skip
            assert torch.equal(pair[side].grad, both[side].grad)
