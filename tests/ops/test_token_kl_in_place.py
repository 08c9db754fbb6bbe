"""token_kl of packed and padded columns on the CPU, read where they lie."""

from __future__ import annotations

import os

import pytest
import torch
from programs import python
from torch.utils.flop_counter import FlopCounterMode

from fusedrl import token_kl
from fusedrl.ops.token_kl import in_place, reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def columns(*shape, dtype=torch.float32):
    p, q, reward = (torch.randn(shape).to(dtype) for _ in range(3))
    p.view(-1)[1] = torch.nan
    return p, q, torch.rand(shape) < 0.7, reward


def read_in_place(*columns, offsets=None):
    p, q, mask, reward = columns
    return in_place.of_batch(p, q, mask, offsets, reward, 0.3, 2, True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5,), (2500,), (3, 700), (2, 3, 40), (1, 1)])
def test_bits_are_those_of_the_op(shape, dtype):
    coeff = torch.tensor(0.3, dtype=torch.float64)
    p, q, mask, reward = (
        columns(*shape, dtype=dtype)
        if shape != (1, 1)
        else (
            *(torch.randn(1, 1, dtype=dtype) for _ in range(2)),
            None,
            torch.ones(1, 1, dtype=dtype),
        )
    )
    ours = read_in_place(p, q, mask, reward)
    op = torch.ops.fusedrl.token_kl(p, q, mask, None, reward, coeff, 2, True)
    for mine, expected in zip(ours, op, strict=True):
        assert mine.is_contiguous() and mine.dtype == dtype
        torch.testing.assert_close(mine, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_reward_a_sequence(dtype):
    p, q, mask, _ = columns(2500, dtype=dtype)
    offsets = torch.tensor([0, 0, 3, 1700, 1701, 2500, 2500])
    reward = torch.randn(6).to(dtype)
    ours = read_in_place(p, q, mask, reward, offsets=offsets)
    expected = reference.token_kl(
        p, q, mask, offsets, reward, torch.tensor(0.3), "k3", nan_missing=True
    )
    for mine, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, other, equal_nan=True)


def test_what_is_left_to_the_op():
    p, q, mask, reward = columns(6)
    bounds = torch.tensor([0, 2, 6])
    for given in (
        (p, q[:5], mask, reward),
        (p, q.double(), mask, reward),
        (p, torch.randn(12)[::2], mask, reward),
        (p, q, mask.long(), reward),
        (p, q, mask, reward[:2]),
        (p, q, mask, reward.clone().requires_grad_()),
        (torch.nn.Parameter(p, requires_grad=False), q, mask, reward),
        (p, q.view(2, 3), mask, reward),
    ):
        assert read_in_place(*given) is None
    for offsets in (bounds.int(), bounds - 1, bounds + 1, bounds.flip(0), bounds[:0]):
        assert read_in_place(p, q, mask, reward, offsets=offsets) is None
    padded = [x.view(2, 3) for x in (p, q, mask, reward)]
    assert read_in_place(*padded, offsets=bounds) is None
    with torch.no_grad():
        leaf = reward.clone().requires_grad_()
        assert read_in_place(p, q, mask, leaf, offsets=bounds) is not None


def test_a_mode_sees_the_op():
    p, q, mask, reward = columns(6)
    with FlopCounterMode(display=False):
        assert read_in_place(p, q, mask, reward) is None


@pytest.mark.parametrize("of", ["kl", "reward", "both"])
@pytest.mark.parametrize("one_reward", [False, True])
def test_gradients_through_either_result(of, one_reward):
    p, q, mask, reward = columns(40)
    p[1] = 0
    offsets = torch.tensor([0, 7, 40])
    reward = torch.randn(2) if one_reward else reward
    upstream = torch.randn(2, 40)
    found = []
    for impl in ("auto", "reference"):
        leaves = [x.clone().requires_grad_() for x in (p, q, reward)]
        kl, penalised = token_kl(
            *leaves[:2],
            mask,
            offsets=offsets,
            reward=leaves[2],
            coeff=0.3,
            estimator="k3",
            impl=impl,
        )
        parts = {"kl": kl * upstream[0], "reward": penalised * upstream[1]}
        loss = sum(parts.values()) if of == "both" else parts[of]
        grads = torch.autograd.grad(loss.sum(), leaves, allow_unused=True)
        found.append([torch.zeros(()) if g is None else g for g in grads])
    for mine, expected in zip(*found, strict=True):
        torch.testing.assert_close(mine, expected.expand_as(mine))


def test_the_gradient_of_a_reward_alone_is_not_rounded_twice():
    """In a half type the upstream gradient and the coefficient meet in float32."""
    p, q = (torch.randn(500).bfloat16() for _ in range(2))
    upstream, coeff = torch.randn(500).bfloat16(), 0.3
    leaf = p.clone().requires_grad_()
    penalised = token_kl(leaf, q, reward=torch.zeros_like(p), coeff=coeff, estimator="k2").reward
    (grad,) = torch.autograd.grad(penalised, leaf, upstream)
    expected = coeff * upstream.float() * (q.float() - p.float())
    torch.testing.assert_close(grad, expected.bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_bits_of_a_token_are_its_own(dtype, estimator):
    """Wherever it stands, and on any number of threads."""
    count = 300_000  # more than one thread takes
    p, q, reward = (torch.randn(count).to(dtype) for _ in range(3))
    mask = torch.rand(count) < 0.7

    def run(part):
        leaf = p[part].detach().requires_grad_()
        kl, left = token_kl(leaf, q[part], mask[part], reward=reward[part], estimator=estimator)
        return kl.detach(), left.detach(), *torch.autograd.grad(left.sum() + 2 * kl.sum(), leaf)

    threads = torch.get_num_threads()
    try:
        found = []
        for number in (1, 2):
            torch.set_num_threads(number)
            found.append(run(slice(None)))
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, *found))
    for first, end in ((0, 1), (1, 2), (5, 38), (31, 64), (1000, 2100), (count - 33, count)):
        part = slice(first, end)
        for got, whole in zip(run(part), found[0], strict=True):
            assert torch.equal(got, whole[part])


@pytest.mark.parametrize("records", [False, True])
def test_an_unusable_level_is_an_error(records):
    script = f"""
import torch
from fusedrl import token_kl
token_kl(torch.zeros(3, requires_grad={records}), torch.zeros(3))
"""
    done = python("-c", script, env={**os.environ, "FUSEDRL_CPU_LEVEL": "no such level"})
    assert done.returncode == 1
    assert "FUSEDRL_CPU_LEVEL: " in done.stderr.splitlines()[-1]
