"""The CUDA kernels of exact_kl: against float64, and what GPUs alone have."""

from __future__ import annotations

import pytest
import torch

from fusedrl import exact_kl
from fusedrl.ops.exact_kl import DIRECTIONS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
DEVICE = torch.device("cuda")
HALVES = [torch.float32, torch.bfloat16, torch.float16]
CLASSES = [1, 7, 8, 17, 129, 1000, 4097, 50257, 151936]
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # of gradients


def ours(logits, ref_logits, *args, **kwargs):
    return exact_kl(logits, ref_logits, *args, impl="cuda", **kwargs).kl


def sample(shape, dtype):
    """The reference's rows lie otherwise between 16-byte boundaries than the policy's."""
    logits = torch.randn(shape, device=DEVICE) * 4
    wide = torch.empty(*shape[:-1], shape[-1] + 1, dtype=dtype, device=DEVICE)
    ref_logits = wide[..., 1:]
    ref_logits.copy_(logits + torch.randn(shape, device=DEVICE))
    return logits.to(dtype), ref_logits


def compare(logits, ref_logits, **options):
    """Forward and both gradients beside the reference on the same values in float64."""
    upstream = torch.randn(logits.shape[:-1], device=DEVICE)
    results = []
    for impl, dtype in (("cuda", logits.dtype), ("reference", torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (logits, ref_logits)]
        divergence = exact_kl(*leaves, impl=impl, **options).kl
        grads = torch.autograd.grad(divergence, leaves, upstream.to(divergence))
        results.append((divergence, *grads))
    (mine, *grads), (exact, *exact_grads) = results
    assert mine.dtype == torch.float32
    torch.testing.assert_close(mine.double(), exact, rtol=3e-6, atol=3e-6)
    for got, want in zip(grads, exact_grads, strict=True):
        assert got.dtype == logits.dtype
        torch.testing.assert_close(got.double(), want, rtol=ROUNDING[got.dtype], atol=1e-5)
        # Rows that no token reads are zero, not almost.
        read = want.flatten(0, -2).any(-1)
        assert not got.flatten(0, -2)[~read].any()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_sizes_and_dtypes(dtype, classes, direction):
    p, q = sample((5, classes), dtype)
    compare(p, q, direction=direction, temperature=0.7)
    compare(p, q.contiguous(), direction=direction)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [(12, 1001), (3, 4, 1001)], ids=["packed", "padded"])
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_shifts_and_masks(dtype, shape, shift, direction):
    p, q = sample(shape, dtype)
    mask = torch.arange(12, device=DEVICE).view(shape[:-1]) % 3 != 0
    rows = mask.flatten().roll(-1).view(shape[:-1]) if shift else mask
    p[~rows] = q[~rows] = float("nan")
    offsets = torch.tensor([0, 4, 4, 5, 12], device=DEVICE) if len(shape) == 2 else None
    compare(p, q, mask=mask, offsets=offsets, shift=shift, direction=direction)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_infinite_logits(dtype, direction):
    inf = float("inf")
    p, q = sample((7, 9001), dtype)
    p[0, :4500] = q[0, :4500] = -inf
    p[1, :8900] = q[1, :8800] = -inf
    p[2, :9000] = -inf
    flip = direction == "forward"
    pair = (q, p) if flip else (p, q)
    compare(*(x[:3] for x in pair), direction=direction)
    q[3, 4000:], p[4], q[5], p[6, 9000] = -inf, -inf, -inf, float("nan")
    mine = ours(*pair, direction=direction)
    exact = exact_kl(*(x.double() for x in pair), direction=direction, impl="reference").kl
    assert exact.isnan().tolist() == [False] * 4 + [True] * 3
    torch.testing.assert_close(mine.double(), exact, rtol=3e-6, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("classes", [33, 1001, 50257])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_row_bits_depend_on_the_row_alone(dtype, classes, direction):
    p, q = sample((1, classes), dtype)
    alone = ours(p, q, direction=direction)
    for before in range(8):  # every distance of the row's start from a 16-byte boundary
        storage = torch.zeros(before + 5 * classes, dtype=dtype, device=DEVICE)
        among = storage[before:].view(5, classes)
        among[3] = p
        mine = ours(among, q.expand(5, classes), direction=direction)
        assert torch.equal(mine[3], alone[0])
        swapped = ours(q.expand(5, classes), among, direction=direction)
        assert torch.equal(swapped[3], ours(q, p, direction=direction)[0])


@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5), (0, 3, 5)])
def test_nothing_to_do(shape):
    p, q = (torch.randn(shape, device=DEVICE, requires_grad=True) for _ in range(2))
    divergence = ours(p, q)
    assert divergence.shape == shape[:-1]
    divergence.sum().backward()
    assert p.grad is not None
    assert p.grad.shape == shape


def test_more_than_two_to_the_31_logits():
    rows, classes = 2**15 + 9, 2**16 + 1
    if torch.cuda.get_device_properties(DEVICE).total_memory < 16 * 2**30:
        pytest.skip("needs 16 GiB of GPU memory")
    p = torch.randn(classes, device=DEVICE).bfloat16().repeat(rows, 1)
    p[-1] = p[-1].flip(0)
    q = torch.randn(1, classes, device=DEVICE).bfloat16()
    mask = torch.zeros(rows, dtype=torch.bool, device=DEVICE)
    mask[[0, -2, -1]] = True
    divergence = ours(p.requires_grad_(), q.expand(rows, classes), mask)
    alone = ours(p[[0, -1]].contiguous(), q.expand(2, classes))
    assert torch.equal(divergence[[0, -2, -1]], alone[[0, 0, 1]])
    (grad,) = torch.autograd.grad(divergence.sum(), p)
    assert torch.equal(grad[0], grad[-2])
    assert grad[-1].any()
    assert not grad[1:-2].any()


def test_temperature_on_the_device_is_read_there():
    p, q = sample((5, 1001), torch.bfloat16)
    temperature = torch.tensor(0.7, dtype=torch.float64, device=DEVICE)
    expected = ours(p, q, temperature=0.7)
    torch.cuda.set_sync_debug_mode("error")
    try:
        divergence = ours(p, q, temperature=temperature)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(divergence, expected)
