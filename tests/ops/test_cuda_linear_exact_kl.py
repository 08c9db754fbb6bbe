"""The CUDA tiles of linear_exact_kl: against float64, and what GPUs alone have."""

from __future__ import annotations

import pytest
import torch

from fusedrl import linear_exact_kl
from fusedrl.ops.exact_kl import DIRECTIONS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
DEVICE = torch.device("cuda")
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}  # of gradients


@pytest.fixture(autouse=True)
def _full_float32():
    # The module computes its attributes, which monkeypatch cannot put back.
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, False
    yield
    matmul.allow_tf32 = before


def sample(shape, classes, dtype, widths=(64, 96)):
    heads = []
    for width in widths:
        heads += [
            torch.randn(*shape, width, device=DEVICE),
            torch.randn(classes, width, device=DEVICE) / width**0.5,
            torch.randn(classes, device=DEVICE),
        ]
    return [x.to(dtype) for x in heads]


def run(heads, mask=None, impl="cuda", **options):
    hidden, weight, bias, ref_hidden, ref_weight, ref_bias = heads
    return linear_exact_kl(
        *(hidden, weight, ref_hidden, ref_weight, mask),
        bias=bias,
        ref_bias=ref_bias,
        impl=impl,
        **options,
    ).kl


def compare(heads, mask=None, batch_invariant=False, **options):
    """Forward and six gradients beside the reference on the same values in float64."""
    dtype, upstream = heads[0].dtype, torch.randn(heads[0].shape[:-1], device=DEVICE)
    results = []
    for impl, kind in (("cuda", dtype), ("reference", torch.float64)):
        leaves = [x.detach().to(kind).requires_grad_() for x in heads]
        fixed = batch_invariant and impl == "cuda"
        divergence = run(leaves, mask, impl, batch_invariant=fixed, **options)
        grads = torch.autograd.grad(divergence, leaves, upstream.to(divergence))
        results.append((divergence, *grads))
    (mine, *grads), (exact, *exact_grads) = results
    torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-5)
    tol = ROUNDING[dtype]
    for got, want in zip(grads, exact_grads, strict=True):
        assert got.dtype == dtype
        # Those of the logits are rounded to the dtype too, before they are multiplied.
        largest = want.abs().max().item()
        torch.testing.assert_close(got.double(), want, rtol=tol, atol=1e-5 + tol * largest)


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("classes", [1, 7, 255, 256, 1001, 50257])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_sizes_and_dtypes(dtype, classes, direction):
    compare(sample((9,), classes, dtype), direction=direction, temperature=0.7)


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("shape", [(12,), (3, 4)], ids=["packed", "padded"])
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_shifts_masks_and_softcaps(dtype, shape, shift, batch_invariant):
    heads = sample(shape, 1001, dtype)
    mask = torch.arange(12, device=DEVICE).view(shape) % 3 != 0
    rows = mask.flatten().roll(-1).view(shape) if shift else mask
    heads[0][~rows] = heads[3][~rows] = float("nan")
    heads[3] = torch.cat([heads[3], heads[3]], -1)[..., :96]  # strides of its own
    offsets = torch.tensor([0, 4, 4, 5, 12], device=DEVICE) if len(shape) == 1 else None
    options = {"offsets": offsets, "shift": shift, "batch_invariant": batch_invariant}
    compare(heads, mask, softcap=5.0, ref_scale=0.5, **options)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_several_tiles_of_rows_and_classes(direction):
    compare(sample((16389,), 5001, torch.bfloat16, (16, 8)), direction=direction)


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_row_bits_with_batch_invariant(dtype, direction):
    heads = sample((600,), 1001, dtype)
    options = {"direction": direction, "batch_invariant": True}
    whole = run(heads, **options)
    for rows in (slice(0, 1), slice(5, 300), slice(599, 600)):
        some = [x[rows] if i in (0, 3) else x for i, x in enumerate(heads)]
        assert torch.equal(run(some, **options), whole[rows])


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3), (4,)])
def test_nothing_to_do(shape):
    leaves = [x.requires_grad_() for x in sample(shape, 50, torch.bfloat16)]
    mask = torch.zeros(shape, dtype=torch.bool, device=DEVICE)
    divergence = run(leaves, mask)
    assert torch.equal(divergence, torch.zeros(shape, device=DEVICE))
    divergence.sum().backward()
    assert not any(x.grad.any() for x in leaves)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_never_waits_for_the_device_where_every_row_is_kept(direction):
    heads = sample((9,), 1001, torch.bfloat16)
    temperature = torch.tensor(0.7, dtype=torch.float64, device=DEVICE)
    expected = run(heads, temperature=0.7, direction=direction)
    torch.cuda.set_sync_debug_mode("error")
    try:
        divergence = run(heads, temperature=temperature, direction=direction)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(divergence, expected)
