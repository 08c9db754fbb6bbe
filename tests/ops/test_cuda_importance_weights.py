"""importance_weights on a GPU: against float64, and what GPUs alone have."""

from __future__ import annotations

import pytest
import torch

from fusedrl import importance_weights
from fusedrl.ops.importance_weights import LEVELS, MODES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
DEVICE = torch.device("cuda")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def batch(lengths, dtype=torch.float32):
    count = sum(lengths)
    rollout = -3 * torch.rand(count, device=DEVICE)
    log_probs = rollout + 0.05 * torch.randn(count, device=DEVICE)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device=DEVICE)
    mask = torch.rand(count, device=DEVICE) < 0.8
    return log_probs.to(dtype), rollout.to(dtype), mask, offsets


def flat(weighed):
    return (weighed.weights, *weighed.mismatch)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
def test_equals_the_reference_in_float64(dtype, level, mode):
    p, q, mask, offsets = batch([1500, 0, 1, 17, 4000], dtype)
    p[~mask], q[3] = torch.nan, torch.nan
    options = {"level": level, "mode": mode, "low": 0.906, "high": 1.207, "nan": "missing"}
    ours = importance_weights(p, q, mask, offsets, impl="cuda", **options)
    exact = importance_weights(p.double(), q.double(), mask, offsets, impl="reference", **options)
    for mine, want in zip(flat(ours), flat(exact), strict=True):
        torch.testing.assert_close(mine.double(), want.double(), rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_bits_depend_on_the_sequence_alone(level):
    p, q, mask, offsets = batch([1025, 3, 40000])
    together = importance_weights(p, q, mask, offsets, level=level, impl="cuda")
    own = [x[1028:].clone() for x in (p, q, mask)]
    bounds = torch.tensor([0, 40000], device=DEVICE)
    alone = importance_weights(*own, bounds, level=level, impl="cuda")
    assert torch.equal(alone.weights, together.weights[1028:])
    for mine, other in zip(alone.mismatch, together.mismatch, strict=True):
        assert torch.equal(mine, other[2:])


def test_nothing_waits_for_the_device():
    p, q, mask, offsets = batch([100, 50])
    bounds = {"low": 0.5, "high": torch.tensor(1.1, device=DEVICE)}
    expected = importance_weights(p, q, mask, offsets, low=0.5, high=1.1, impl="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = importance_weights(p, q, mask, offsets, **bounds)
        found.mismatch.total()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(x, y) for x, y in zip(flat(found), flat(expected), strict=True))
