"""token_kl of packed and padded columns on the CPU, read where they lie."""

from __future__ import annotations

import os

import pytest
import torch
from programs import python
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fusedrl import token_kl
from fusedrl.ops.token_kl.columns import in_one_call

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def columns(*shape, dtype=torch.float32):
    p, q, reward = (torch.randn(shape).to(dtype) for _ in range(3))
    p.view(-1)[1] = torch.nan
    return p, q, torch.rand(shape) < 0.7, reward


def read_in_place(*columns, offsets=None):
    p, q, mask, reward = columns
    return in_one_call(p, q, mask, offsets, reward, 0.3, 2, True)


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
    op = torch.ops.fusedrl.token_kl(p, q, mask, reward, coeff, 2, True)
    for mine, expected in zip(ours, op, strict=True):
        assert mine.is_contiguous() and mine.dtype == dtype
        torch.testing.assert_close(mine, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_reward_a_sequence(dtype):
    p, q, mask, _ = columns(2500, dtype=dtype)
    offsets = torch.tensor([0, 0, 3, 1700, 1701, 2500, 2500])
    reward = torch.randn(6).to(dtype)
    options = {"offsets": offsets, "coeff": 0.3, "estimator": "k3", "nan": "missing"}
    ours = token_kl(p, q, mask, reward=reward, **options)
    spread = reward.repeat_interleave(offsets.diff())
    expected = token_kl(p, q, mask, reward=spread, impl="reference", **options)
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
        (torch.nn.Parameter(p, requires_grad=False), q, mask, reward),
        (p, q.view(2, 3), mask, reward),
    ):
        assert read_in_place(*given) is None
    for offsets in (bounds.int(), bounds - 1, bounds + 1, bounds.flip(0), bounds[:0]):
        assert read_in_place(p, q, mask, reward, offsets=offsets) is None
    assert read_in_place(p, q, mask, reward, offsets=bounds) is not None
    assert read_in_place(p, q, mask, reward[:2], offsets=bounds) is None


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


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_a_column_changed_before_the_backward_pass_is_an_error(changed):
    """Those of a reward are not needed for the gradient, and may change."""
    p, q, mask, reward = columns(6)
    given = [p.requires_grad_(), q, mask]
    penalised = token_kl(*given, reward=reward, estimator="k2").reward
    reward.zero_()
    with torch.no_grad():
        given[changed].logical_not_() if changed == 2 else given[changed].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalised.sum().backward()


def test_results_are_the_callers():
    """Neither is needed for the gradient, and neither shares memory with anything else."""
    p, q, _, reward = columns(6)
    p[1] = 0
    leaf = p.clone().requires_grad_()
    kl, penalised = token_kl(leaf, q, reward=reward, coeff=0.5, estimator="k2")
    kept = penalised.detach().clone()
    kl.mul_(3)
    assert torch.equal(penalised, kept)
    penalised.mul_(2)
    upstream = torch.randn(6)
    (grad,) = torch.autograd.grad(kl + penalised, leaf, upstream)
    torch.testing.assert_close(grad, 2 * upstream * (p - q))


def test_the_weight_is_that_of_the_forward_pass():
    p, q, _, reward = columns(6)
    coeff = torch.tensor(0.5)
    leaf = p.clone().requires_grad_()
    penalised = token_kl(leaf, q, reward=reward, coeff=coeff).reward
    coeff.fill_(100)
    upstream = torch.randn(6)
    (grad,) = torch.autograd.grad(penalised, leaf, upstream)
    torch.testing.assert_close(grad, -0.5 * upstream)


def test_a_second_pass_needs_a_retained_graph():
    p, q, mask, reward = columns(6)
    leaf = p.clone().requires_grad_()
    total = token_kl(leaf, q, mask, reward=reward).reward.sum()
    first = torch.autograd.grad(total, leaf, retain_graph=True)
    assert torch.equal(*first, *torch.autograd.grad(total, leaf))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(total, leaf)


def gradients(p, q, mask, reward, **options):
    """That of the log-probs, by upstream gradients with gaps in memory."""
    upstream = torch.arange(2.0 * p.numel()).view(*p.shape, 2)[..., 0].to(p.dtype)
    leaf = p.clone().requires_grad_()
    out = token_kl(leaf, q, mask, reward=reward, estimator="k2", nan="missing", **options)
    return torch.autograd.grad(out.reward, leaf, upstream)[0]


@pytest.mark.parametrize("unpack", [lambda x: x.clone(), lambda x: x.repeat_interleave(2)[::2]])
def test_what_hooks_make_of_the_saved_columns(unpack):
    """A hook may give back other memory, with gaps."""
    given = columns(40)
    expected = gradients(*given)
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (seen.append(x), x)[1], unpack):
        assert torch.equal(gradients(*given), expected)
    assert [x.dtype for x in seen] == [torch.float32, torch.float32, torch.bool]


def test_a_checkpoint_computes_again():
    p, q, mask, reward = columns(40)
    expected = gradients(p, q, mask, reward)

    def function(leaf):
        out = token_kl(leaf, q, mask, reward=reward, estimator="k2", nan="missing")
        return out.reward

    leaf = p.clone().requires_grad_()
    upstream = torch.arange(80.0).view(40, 2)[:, 0]
    out = torch.utils.checkpoint.checkpoint(function, leaf, use_reentrant=False)
    assert torch.equal(*torch.autograd.grad(out, leaf, upstream), expected)


class Names(TorchDispatchMode):
    """The ops that it sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def test_a_mode_around_the_backward_pass_sees_the_op():
    p, q, mask, reward = columns(40)
    leaf = p.clone().requires_grad_()
    penalised = token_kl(leaf, q, mask, reward=reward, nan="missing").reward
    expected = torch.autograd.grad(penalised.sum(), leaf, retain_graph=True)
    total = penalised.sum()
    with Names() as mode:
        found = torch.autograd.grad(total, leaf)
    assert torch.equal(*found, *expected)
    assert "fusedrl::token_kl_backward" in mode.seen


def test_a_function_mode_that_makes_other_tensors_gets_the_op():
    class Parameters(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.empty_like:
                return torch.nn.Parameter(out, requires_grad=False)
            return out

    p, q, mask, reward = columns(6)
    with Parameters():
        assert read_in_place(p, q, mask, reward) is None


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_the_gradient_of_a_parameter(impl):
    """A subclass of a tensor goes to the op."""
    p, q, mask, reward = columns(6)
    leaf = torch.nn.Parameter(p)
    token_kl(leaf, q, mask, reward=reward, nan="missing", impl=impl).reward.sum().backward()
    assert torch.equal(leaf.grad, -(mask & ~p.isnan()).float())


def test_the_op_asks_for_an_upstream_gradient():
    p, q, mask, _ = columns(6)
    coeff = torch.tensor(1.0, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="grad_kl: expected the upstream gradient of the KL"):
        torch.ops.fusedrl.token_kl_backward(None, None, p, q, mask, coeff, 0, False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of", ["kl", "reward", "both"])
def test_gradient_bits_are_those_of_the_op(dtype, of):
    p, q, mask, reward = columns(2500, dtype=dtype)
    upstream = torch.randn(2, 2500).to(dtype)
    of_kl = None if of == "reward" else upstream[0]
    of_reward = None if of == "kl" else upstream[1]
    leaf = p.clone().requires_grad_()
    out = token_kl(leaf, q, mask, reward=reward, coeff=0.3, estimator="k3", nan="missing")
    pairs = [(x, g) for x, g in zip(out, (of_kl, of_reward), strict=True) if g is not None]
    results, grads = zip(*pairs, strict=True)
    (found,) = torch.autograd.grad(results, leaf, grads)
    coeff = torch.tensor(0.3, dtype=torch.float64)
    expected = torch.ops.fusedrl.token_kl_backward(of_kl, of_reward, p, q, mask, coeff, 2, True)
    assert torch.equal(found, expected)


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
