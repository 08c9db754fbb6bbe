"""linear_policy_loss: values and gradients against float64, torchrl's losses and Liger's."""

from __future__ import annotations

import itertools

import pytest
import torch
from accuracy import no_worse
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn import functional

from fusedrl import (
    importance_weights,
    linear_policy_loss,
)
from fusedrl.ops.linear_policy_loss.losses import RECIPES

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LOSSES = sorted(RECIPES)
OFFSETS = torch.tensor([0, 3, 3, 4, 9])


class Problem:
    """Packed rows with logits a few units apart, and log-probs whose ratios are 0.4 to 2.5."""

    def __init__(self, rows=9, classes=1100, width=16, dtype=torch.float32, seed=0):
        torch.manual_seed(seed)
        hidden, weight = torch.randn(rows, width), torch.randn(classes, width) * 3 / width**0.5
        self.head = [x.to(dtype) for x in (hidden, weight, torch.randn(classes))]
        self.tokens = torch.randint(0, classes, (rows,))
        logits = functional.linear(*(x.float() for x in self.head))
        log_probs = torch.log_softmax(logits, -1).gather(-1, self.tokens[:, None]).squeeze(-1)
        self.old, self.ref = (log_probs + torch.randn(rows) * 0.4 for _ in range(2))
        self.advantages = torch.randn(rows)

    def run(self, dtype=None, impl="cpu", factor=1.0, mask=None, **options):
        """The result, and the gradients of hidden states, weight and bias."""
        leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in self.head]
        hidden, weight, bias = leaves
        options = {"old_log_probs": self.old, "ref_log_probs": self.ref, **options}
        if options.get("loss") == "dr_grpo":
            options.setdefault("normalizer", 50.0)
        result = linear_policy_loss(
            hidden, weight, self.tokens, self.advantages, mask, bias=bias, impl=impl, **options
        )
        return result, torch.autograd.grad(result.loss * factor, leaves)


def check(problem, **options):
    """The compiled op is no worse than its definition in torch, both in the dtype of the inputs."""
    (mine, grads), (theirs, other_grads), (truth, exact_grads) = (
        problem.run(**kwargs, **options)
        for kwargs in ({}, {"impl": "reference"}, {"impl": "reference", "dtype": torch.float64})
    )
    for name in ("loss", "objective", "kl", "entropy", "log_probs"):
        got, other, exact = (getattr(x, name) for x in (mine, theirs, truth))
        if exact is None:
            assert name == "entropy" and got is other is mine.entropies is None
            continue
        no_worse(got, other, exact, 3e-6 * max(1.0, exact.abs().max().item()))
    for got, other, exact in zip(mine.ratio, theirs.ratio, truth.ratio, strict=True):
        no_worse(got, other, exact, 3e-6 * max(1.0, exact.abs().max().item()))
    for got, other, exact in zip(grads, other_grads, exact_grads, strict=True):
        assert got.dtype == problem.head[0].dtype
        rounding = max(3e-6, torch.finfo(got.dtype).eps / 8) if got.dtype != torch.float32 else 3e-6
        no_worse(got, other, exact, rounding * exact.abs().max().item())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_are_no_worse_than_their_definition(loss, dtype):
    options = {"offsets": OFFSETS, "loss": loss, "kl_coeff": 0.2, "entropy_coeff": 0.03}
    check(Problem(dtype=dtype), **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [1, 7, 4096, 4097, 9000])
def test_sizes_around_a_tile_of_classes(classes, dtype):
    check(Problem(classes=classes, dtype=dtype), temperature=0.7, entropy=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_blocks_of_rows_add_up(dtype):
    """What needs two blocks, 140 MiB of logits each, is the sum of its parts, one block each."""
    hidden, weight = torch.randn(560, 3), torch.randn(130_000, 3)
    tokens, advantages = torch.randint(0, 130_000, (560,)), torch.randn(560)
    results = []
    for parts in ((slice(0, 560),), (slice(0, 280), slice(280, 560))):
        leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight)]
        for part in parts:
            out = linear_policy_loss(
                *(leaves[0][part], leaves[1], tokens[part], advantages[part], None),
                old_log_probs=torch.full((part.stop - part.start,), -12.0), loss="dapo",
                normalizer=560,
            )  # fmt: skip
            out.loss.backward()
        results.append((leaves[0].grad, leaves[1].grad))
    rounded = 1e-4 if dtype == torch.float32 else 1e-2  # of two halves, or of their sum
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=rounded, atol=1e-5 * want.abs().max().item())


@pytest.mark.parametrize("factor", [1 / 3, 1 / 7, 0.7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss", ["reinforce", "gspo"])
def test_the_factor_of_a_scaled_loss_is_not_rounded(loss, dtype, factor):
    """A third is off by 2e-3 in bfloat16, and so would be all gradients, in the same direction."""
    problem = Problem(rows=400, width=64, dtype=dtype)
    options = {"loss": loss, "offsets": torch.tensor([0, 30, 400])}
    _, (*grads, _) = problem.run(factor=factor, **options)
    _, (*exact, _) = problem.run(torch.float64, "reference", factor, **options)
    for got, truth in zip(grads, exact, strict=True):
        bias = (got.double() * truth).sum() / truth.square().sum() - 1
        assert abs(bias) <= 2.6e-4  # that of plain torch
        # Of one rounding, and one more of the weight's; root mean square.
        assert (got.double() - truth).norm() <= torch.finfo(dtype).eps / 3 * truth.norm()


@pytest.mark.parametrize("loss", LOSSES)
def test_float64_is_right_to_float64(loss):
    """The value and the gradient by the hidden states, by formulas of their own."""
    problem = Problem(dtype=torch.float64)
    mask = torch.arange(9) // 2 != 2  # 3, 0, 1 and 3 of the sequences
    hidden = problem.head[0].requires_grad_()
    log_softmax = torch.log_softmax(functional.linear(*problem.head), -1)
    log_probs = log_softmax.gather(-1, problem.tokens[:, None]).squeeze(-1)
    bounds = list(itertools.pairwise(OFFSETS.tolist()))
    log_ratio = log_probs - problem.old.double()
    recipe = RECIPES[loss]
    if recipe.ratio != "token":
        of_sequences = [(log_ratio * mask)[a:b].sum() for a, b in bounds]
        if recipe.ratio == "geometric":
            counts = [max(int(mask[a:b].sum()), 1) for a, b in bounds]
            of_sequences = [x / n for x, n in zip(of_sequences, counts, strict=True)]
        log_ratio = torch.stack(of_sequences).repeat_interleave(OFFSETS.diff())
    advantages, (low, high) = problem.advantages.double(), recipe.clip
    bounded = log_ratio.exp().clamp(1 - low, 1 + high)
    terms = -torch.minimum(log_ratio.exp() * advantages, bounded * advantages)
    if loss == "cispo":
        terms = -bounded.detach() * advantages * log_probs
    if loss == "reinforce":
        terms = -advantages * log_probs
    terms = terms[mask] if recipe.aggregation != "sequence" else terms * mask
    value = terms.sum() / (50 if recipe.aggregation == "constant" else 7)
    if recipe.aggregation == "sequence":
        means = [terms[a:b].sum() / max(int(mask[a:b].sum()), 1) for a, b in bounds]
        value = torch.stack(means).sum() / 4
    (expected,) = torch.autograd.grad(value, hidden)
    result, (grad, *_) = problem.run(loss=loss, impl="auto", mask=mask, offsets=OFFSETS)
    torch.testing.assert_close(result.loss, value, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("temperature", [0.6, torch.tensor(1.7)], ids=str)
def test_options_of_the_head(softcap, scale, temperature):
    check(Problem(), softcap=softcap, scale=scale, temperature=temperature, entropy_coeff=0.1)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
@pytest.mark.parametrize("loss", ["grpo", "gspo"])
def test_kl_estimators(estimator, loss):
    check(Problem(), loss=loss, kl_coeff=0.3, kl_estimator=estimator, offsets=OFFSETS)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("normalizer", [None, 13, torch.tensor(7.0), torch.tensor(7)], ids=str)
@pytest.mark.parametrize("ratio", ["token", "sequence", "geometric"])
def test_aggregations_and_ratios(aggregation, normalizer, ratio):
    if aggregation == "constant" and normalizer is None:
        normalizer = 30.0
    options = {"aggregation": aggregation, "normalizer": normalizer, "ratio": ratio}
    check(Problem(), offsets=OFFSETS, shift=True, clip=(0.1, 0.4), dual_clip=1.6, **options)


def test_ratios_are_one_without_old_log_probs():
    """The gradient is that of REINFORCE, and no ratio is clipped."""
    problem = Problem()
    on_policy, grads = problem.run(old_log_probs=None, loss="dapo")
    _, expected = problem.run(loss="reinforce")
    assert on_policy.ratio.mean == on_policy.ratio.effective_sample_size == 1
    torch.testing.assert_close(on_policy.loss, -problem.advantages.mean())
    for got, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(got, want)


def test_statistics_of_the_ratios():
    problem, mask = Problem(rows=40), torch.arange(40) % 4 != 1
    found = problem.run(loss="grpo", clip=(0.2, 0.3), mask=mask)[0]
    difference, advantages = (found.log_probs - problem.old)[mask], problem.advantages[mask]
    ratio = difference.exp()
    expected = {
        "mean": ratio.mean(),
        "smallest": ratio.min(),
        "largest": ratio.max(),
        "clipped_low": ((ratio < 0.8) & (advantages < 0)).float().mean(),
        "clipped_high": ((ratio > 1.3) & (advantages > 0)).float().mean(),
        "effective_sample_size": ratio.sum() ** 2 / ratio.square().sum() / len(ratio),
        "kl": -difference.mean(),
    }
    assert expected["clipped_low"] > 0 and expected["clipped_high"] > 0
    for name, value in expected.items():
        torch.testing.assert_close(getattr(found.ratio, name), value, msg=name)


def test_token_weights_scale_the_objective_alone():
    problem = Problem()
    factors = torch.rand(9)
    weighted, grads = problem.run(loss="dapo", token_weights=factors, kl_coeff=0.5)
    problem.advantages = problem.advantages * factors
    expected, other_grads = problem.run(loss="dapo", kl_coeff=0.5)
    torch.testing.assert_close(weighted.loss, expected.loss)
    for got, want in zip(grads, other_grads, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize("loss", ["dapo", "gspo"])
def test_rollout_log_probs_weigh_the_objective(level, on_policy, loss):
    """By importance_weights of the old log-probs, or of the policy's own."""
    problem, mask = Problem(), torch.arange(9) % 4 != 1
    options = {"loss": loss, "offsets": OFFSETS, "shift": True, "mask": mask, "kl_coeff": 0.1}
    if on_policy:
        options["old_log_probs"] = None
    importance = {"level": level, "high": 1.3}
    mine, grads = problem.run(rollout_log_probs=problem.ref, importance=importance, **options)
    log_probs = problem.run(**options)[0].log_probs if on_policy else problem.old
    kept = mask & torch.tensor([0, 1, 1, 0, 0, 1, 1, 1, 1]).bool()
    weights = importance_weights(
        log_probs, problem.ref, kept, offsets=OFFSETS, **importance
    ).weights
    expected, other_grads = problem.run(token_weights=weights, **options)
    assert (weights[kept] != 1).all()
    torch.testing.assert_close(mine.loss, expected.loss)
    for got, want in zip(grads, other_grads, strict=True):
        torch.testing.assert_close(got, want)
    with pytest.raises(ValueError, match="rollout_log_probs: expected a tensor with importance"):
        problem.run(importance=importance, **options)


def test_small_gradients_survive_float16():
    """One token among many, before a loss scale: 1e-8 would be 0 in float16."""
    problem = Problem(rows=64, dtype=torch.float16)
    options = {"loss": "dapo", "normalizer": 1e7}
    _, grads = problem.run(factor=2.0**16, **options)
    _, exact = problem.run(torch.float64, "reference", 2.0**16, **options)
    for got, want in zip(grads, exact, strict=True):
        torch.testing.assert_close(
            got.double(), want, rtol=2e-3, atol=2e-3 * want.abs().max().item()
        )


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(LOSSES),
    st.lists(st.integers(0, 5), min_size=1, max_size=5),
    st.integers(0, 10_000),
    st.booleans(),
)
def test_random_batches(loss, lengths, seed, shift):
    problem = Problem(rows=sum(lengths), classes=37, seed=seed)
    offsets = torch.tensor([0, *itertools.accumulate(lengths)])
    mask = torch.rand(sum(lengths)) < 0.7
    assume(sum(lengths) not in (0, len(lengths)))  # one dimension that may mean either is refused
    check(problem, offsets=offsets, shift=shift, loss=loss, kl_coeff=0.1, mask=mask)


def test_as_many_tokens_as_sequences():
    """Whose advantages and rewards these are never depends on how many there are."""
    problem, offsets = Problem(rows=3), torch.tensor([0, 0, 2, 3])
    values, spread = torch.tensor([9.0, 1.0, 2.0]), torch.tensor([1.0, 1.0, 2.0])

    def loss(advantages):
        problem.advantages = advantages
        return problem.run(offsets=offsets, loss="reinforce")[0].loss

    assert torch.equal(loss(values[:, None]), loss(spread[None]))
    with pytest.raises(ValueError, match=r": expected \[B, 1\] or \[1, N\] where"):
        loss(values)
    offsets = torch.arange(4)  # a token each: both are the same
    assert torch.equal(loss(values), loss(values[None]))
