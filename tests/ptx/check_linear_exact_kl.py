"""linear_exact_kl by its compiled kernels, in tiles of a few rows and classes."""

from __future__ import annotations

import itertools

import torch
from ptx.values import DTYPES, LAYOUTS, TOLERANCE, assert_rows_are_counted_once, tiles_of

from fusedrl import linear_exact_kl
from fusedrl.ops.exact_kl import DIRECTIONS


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
    upstream, of_entropy = torch.randn(2, *heads[0].shape[:-1])
    results = []
    for impl, dtype in (("cpu", heads[0].dtype), ("reference", torch.float64)):
        leaves = [None if x is None else x.detach().to(dtype).requires_grad_() for x in heads]
        fixed = batch_invariant and impl == "cpu"
        outputs = linear_kl(leaves, mask, impl=impl, batch_invariant=fixed, **options)
        outputs = [x for x in outputs if x is not None]
        given = [x.to(y) for x, y in zip((upstream, of_entropy), outputs, strict=False)]
        asked = [x for x in leaves if x is not None]
        results.append((outputs, *torch.autograd.grad(outputs, asked, given)))
    (mine, *grads), (exact, *exact_grads) = results
    for got, want in zip(mine, exact, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    tol = TOLERANCE[heads[0].dtype]
    for got, want in zip(grads, exact_grads, strict=True):
        # Those of the logits are rounded to the dtype too, before they are multiplied.
        largest = want.abs().max().item()
        torch.testing.assert_close(got.double(), want, rtol=tol, atol=1e-5 + tol * largest)
        assert not got[~want.any(-1)].any()  # zero rows are zero, not almost


def check_sizes_and_dtypes():
    """Tiles of four rows and sixteen classes: one, several, the last of either not full."""
    cases = [(1, 1, torch.float32), (9, 50, torch.float32), *((4, 7, dtype) for dtype in DTYPES)]
    for case, direction in itertools.product(cases, ("reverse", "jensen_shannon")):
        rows, classes, dtype = case
        options = {"direction": direction, "temperature": 0.7, "entropy": classes == 7}
        compare_linear_exact_kl(head_pair((rows,), classes, dtype), **options)


def check_long_tiles():
    """Two tiles, one of so many classes that threads of sixteen warps have several packs."""
    with tiles_of(2 * 4200):
        kinds = itertools.product(DTYPES, ("reverse", "jensen_shannon"), (False, True))
        for dtype, direction, entropy in kinds:
            options = {"direction": direction, "softcap": 3.0, "entropy": entropy}
            compare_linear_exact_kl(head_pair((2,), 6100, dtype, (2, 3)), **options)


def check_rows_are_counted_once():
    """The host need not wait for their number a second time."""
    leaves = [x.requires_grad_() for x in head_pair((7,), 19, torch.float32)]
    mask = torch.arange(7) % 3 != 0
    assert_rows_are_counted_once(linear_kl(leaves, mask).kl, leaves, mask)


def check_many_tokens():
    """More than the threads of a grid, few of them kept; rows wider than four blocks."""
    mask = torch.arange(120) % 37 == 3
    for dtype in DTYPES:
        entropy = dtype == torch.float32
        compare_linear_exact_kl(head_pair((120,), 9, dtype, (150, 3)), mask, entropy=entropy)


def check_shapes_of_logits():
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
        compare_linear_exact_kl(heads, direction=direction, entropy=True, **shape)


def check_betas_and_entropies():
    """Mixtures of any share over several tiles, with the policy's entropy and without."""
    for beta, entropy in itertools.product([0, 1e-3, 0.999, 1], [False, True]):
        options = {"direction": "jensen_shannon", "beta": beta, "entropy": entropy}
        compare_linear_exact_kl(head_pair((6,), 50, torch.float32), softcap=3.0, **options)


def check_shifts_and_masks():
    """Packed and padded, with dropped rows that hold NaN, and a reference of other strides."""
    layouts = itertools.product(LAYOUTS, [False, True], [False, True])
    for layout, dtype in zip(layouts, DTYPES[:2] * 6, strict=True):
        (shape, offsets), shift, batch_invariant = layout
        heads = head_pair(shape, 21, dtype)
        mask = torch.arange(heads[0][..., 0].numel()).view(shape) % 3 != 0
        rows = mask.flatten().roll(-1).view(shape) if shift else mask
        heads[0][~rows] = heads[3][~rows] = torch.nan
        options = {"offsets": offsets, "shift": shift, "batch_invariant": batch_invariant}
        apart = [torch.cat([x, x], -1)[..., :9] if i == 3 else x for i, x in enumerate(heads)]
        compare_linear_exact_kl(apart, mask, **options)
        compare_linear_exact_kl(heads, torch.zeros_like(mask), **options)


def check_frozen_sides():
    """A gradient's bits do not depend on which others are wanted."""
    for dtype, direction in itertools.product(DTYPES[:2], ("reverse", "jensen_shannon")):
        heads = head_pair((7,), 21, dtype)
        options = {"direction": direction, "softcap": 3.0, "batch_invariant": True}
        leaves = [x.clone().requires_grad_() for x in heads]
        whole = linear_kl(leaves, **options)
        grads = torch.autograd.grad(whole.kl.sum(), leaves)
        for side in (slice(0, 3), slice(3, 6), slice(4, 5)):
            frozen = [x.clone() for x in heads]
            asked = [x.requires_grad_() for x in frozen[side]]
            mine = torch.autograd.grad(linear_kl(frozen, **options).kl.sum(), asked)
            assert all(map(torch.equal, mine, grads[side]))
