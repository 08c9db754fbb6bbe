"""linear_policy_loss: values and gradients against formulas by hand, float64 and Liger's."""

from __future__ import annotations

import itertools

import pytest
import torch
from accuracy import no_worse
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from fusedrl import importance_weights, linear_policy_loss
from fusedrl.ops import RECIPES

LOSSES = sorted(RECIPES)
OFFSETS = torch.tensor([0, 3, 3, 4, 9])
MASK = torch.arange(9) // 2 != 2  # 3, 0, 1 and 3 of the sequences
ESTIMATES = {
    "k1": lambda d: -d,
    "k2": lambda d: d.square() / 2,
    "k3": lambda d: d.exp() - 1 - d,
    "abs": lambda d: d.abs(),
}


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
        self.advantages, self.factors = torch.randn(rows), torch.rand(rows)

    def run(self, dtype=None, **options):
        """The result, and the gradients of hidden states, weight and bias."""
        leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in self.head]
        options = {"old_log_probs": self.old, "offsets": OFFSETS, **options}
        if "advantages" not in options:
            options["token_advantages"] = self.advantages
        if "kl_coeff" in options:
            options.setdefault("ref_log_probs", self.ref)
        if options.get("loss") == "dr_grpo":
            options.setdefault("normalizer", 50.0)
        result = linear_policy_loss(*leaves[:2], self.tokens, bias=leaves[2], **options)
        return result, torch.autograd.grad(result.loss, leaves)


def by_hand(problem, recipe, normalizer, log_probs, entropies, kept):
    """The loss with factors, 0.2 of a KL and 0.03 of the entropy, a token at a time."""
    rows, means = [], []
    for start, end in itertools.pairwise(OFFSETS.tolist()):
        inside = [n for n in range(start, end) if kept[n]]
        log_ratios = {n: log_probs[n] - problem.old[n] for n in inside}
        if inside and recipe.ratio != "token":
            whole = sum(log_ratios.values()) / (1 if recipe.ratio == "sequence" else len(inside))
            log_ratios = dict.fromkeys(inside, whole)
        terms = []
        for n in inside:
            ratio, advantage = log_ratios[n].exp(), problem.advantages[n]
            bounded = ratio.clamp(1 - recipe.low, 1 + recipe.high)
            objective = torch.minimum(ratio * advantage, bounded * advantage)
            if advantage < 0:
                objective = torch.maximum(objective, recipe.dual_clip * advantage)
            if recipe.term == "cispo":
                objective = bounded.detach() * advantage * log_probs[n]
            if recipe.term == "reinforce":
                objective = advantage * log_probs[n]
            kl = ESTIMATES[recipe.kl_estimator](problem.ref[n] - log_probs[n])
            terms.append(-objective * problem.factors[n] + 0.2 * kl - 0.03 * entropies[n])
        rows += terms
        means.append(sum(terms) / max(len(terms), 1))
    if recipe.aggregation == "sequence":
        return sum(means) / (normalizer or len(means))
    return sum(rows) / (normalizer or len(rows))


CHANGED = RECIPES["grpo"]._replace(low=0.1, high=0.4, dual_clip=1.6)
GRID = itertools.product(("token", "sequence", "geometric"), ("token", "sequence", "constant"))
CASES = [
    *RECIPES.values(),
    *(CHANGED._replace(ratio=ratio, aggregation=aggregation) for ratio, aggregation in GRID),
    *(RECIPES[x]._replace(kl_estimator=y) for x in ("grpo", "gspo") for y in ESTIMATES),
]


@pytest.mark.parametrize("recipe", CASES, ids=lambda recipe: "-".join(map(str, recipe)))
@pytest.mark.parametrize("normalizer", [None, 13, torch.tensor(7.0), torch.tensor([7])], ids=str)
@pytest.mark.parametrize("shift", [False, True])
def test_float64_is_the_formula_by_hand(recipe, normalizer, shift):
    if recipe.aggregation == "constant" and normalizer is None:
        normalizer = 50.0
    problem = Problem(dtype=torch.float64)
    problem.old, problem.ref, problem.advantages, problem.factors = (
        x.double() for x in (problem.old, problem.ref, problem.advantages, problem.factors)
    )
    leaves = [x.requires_grad_() for x in problem.head]
    log_softmax = torch.log_softmax(functional.linear(*leaves) / 0.8, -1)
    log_softmax = log_softmax.roll(int(shift), 0)
    log_probs = log_softmax.gather(-1, problem.tokens[:, None]).squeeze(-1)
    entropies = -(log_softmax.exp() * log_softmax).sum(-1)
    kept = MASK & (torch.arange(9)[:, None] != OFFSETS).all(-1) if shift else MASK
    value = by_hand(problem, recipe, normalizer, log_probs, entropies, kept)
    options = {"kl_coeff": 0.2, "entropy_coeff": 0.03, "token_weights": problem.factors}
    options |= {"loss": recipe, "normalizer": normalizer, "mask": MASK, "shift": shift}
    result, grads = problem.run(temperature=0.8, **options)
    torch.testing.assert_close(result.loss, value.reshape(()), rtol=1e-12, atol=1e-14)
    for got, want in zip(grads, torch.autograd.grad(value, leaves), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-13)


def check(problem, **options):
    """The compiled op is no worse than its definition in torch, both in the dtype of the inputs."""
    (mine, grads), (theirs, other_grads), (truth, exact_grads) = (
        problem.run(**kwargs, **options)
        for kwargs in ({}, {"impl": "reference"}, {"impl": "reference", "dtype": torch.float64})
    )
    for got, other, exact in zip(*((*x[:5], *x.ratio) for x in (mine, theirs, truth)), strict=True):
        no_worse(got, other, exact, 3e-6 * max([1.0, *exact.abs().flatten().tolist()]))
    for got, other, exact in zip(grads, other_grads, exact_grads, strict=True):
        assert got.dtype == problem.head[0].dtype
        rounding = max(3e-6, torch.finfo(got.dtype).eps / 8) if got.dtype != torch.float32 else 3e-6
        no_worse(got, other, exact, rounding * exact.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_are_no_worse_than_their_definition(loss, dtype):
    check(Problem(dtype=dtype), loss=loss, kl_coeff=0.2, entropy_coeff=0.03)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(LOSSES),
    st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any),
    st.integers(0, 10_000),
    st.booleans(),
)
def test_random_batches(loss, lengths, seed, shift):
    problem = Problem(rows=sum(lengths), classes=37, seed=seed)
    offsets = torch.tensor([0, *itertools.accumulate(lengths)])
    options = {"mask": torch.rand(sum(lengths)) < 0.7, "kl_coeff": 0.1, "entropy_coeff": 0.0}
    check(problem, offsets=offsets, shift=shift, loss=loss, **options)


def test_ratios_are_one_without_old_log_probs():
    """The gradient is that of REINFORCE, and no ratio is clipped."""
    problem = Problem()
    on_policy, grads = problem.run(old_log_probs=None, loss="dapo")
    _, expected = problem.run(loss="reinforce")
    assert on_policy.ratio.mean == on_policy.ratio.effective_sample_size == 1
    torch.testing.assert_close(on_policy.loss, -problem.advantages.mean())
    torch.testing.assert_close(grads, expected)


def test_statistics_of_the_ratios():
    problem, mask = Problem(rows=40), torch.arange(40) % 4 != 1
    recipe = RECIPES["grpo"]._replace(high=0.3)
    found = problem.run(loss=recipe, mask=mask, offsets=None)[0]
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
    torch.testing.assert_close(found.ratio._asdict(), expected)
    assert not any(problem.run(loss="reinforce", offsets=None)[0].ratio[3:5])


@pytest.mark.parametrize("count", [3, 9])
def test_advantages_of_sequences_are_those_of_their_tokens(count):
    """However many there are of both, packed, padded and jagged."""
    problem, values = Problem(), torch.tensor([9.0, -1.0, 2.0] * 3)[:count]
    offsets = {3: torch.tensor([0, 3, 6, 9]), 9: torch.tensor([0, 0, 2, 3, 4, 5, 6, 7, 8, 9])}[
        count
    ]
    problem.advantages = values.repeat_interleave(offsets.diff())
    expected, grads = problem.run(offsets=offsets, old_log_probs=None)
    found, others = problem.run(offsets=offsets, old_log_probs=None, advantages=values)
    assert torch.equal(found.loss, expected.loss) and all(map(torch.equal, grads, others))
    forms = [lambda x: torch.nested.nested_tensor_from_jagged(x, offsets)]
    forms += [lambda x: x.unflatten(0, (3, 3))] if count == 3 else []
    for form in forms:
        inputs = form(problem.head[0]), problem.head[1], form(problem.tokens), values
        result = linear_policy_loss(*inputs, bias=problem.head[2])
        torch.testing.assert_close(result.loss, expected.loss)
        assert result.log_probs.is_nested == form(problem.tokens).is_nested


def test_importance_weights_are_factors_of_tokens():
    problem = Problem()
    given = {"offsets": OFFSETS, "level": "sequence", "high": 1.3}
    weights = importance_weights(problem.old, problem.ref, MASK, **given).weights
    found, grads = problem.run(token_weights=weights, mask=MASK, loss="dapo")
    problem.advantages = problem.advantages * weights
    expected, others = problem.run(mask=MASK, loss="dapo")
    torch.testing.assert_close((found.loss, grads), (expected.loss, others))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("loss", ["grpo", "cispo", "reinforce"])
def test_a_token_of_weight_0_adds_nothing(loss, poison):
    """Whatever else is known of it."""
    problem, weights = Problem(), (torch.arange(9) != 3).float()
    expected, grads = problem.run(token_weights=weights, loss=loss)
    problem.advantages[3] = problem.old[3] = poison
    found, others = problem.run(token_weights=weights, loss=loss)
    assert torch.equal(found.loss, expected.loss) and all(map(torch.equal, grads, others))


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("dual_clip", [torch.inf, 3.0])
def test_a_clipped_ratio_that_overflows_has_no_gradient(ratio, dual_clip, impl):
    """Its exponential is infinite, and what it is multiplied by is 0."""
    problem = Problem()
    problem.advantages = torch.where(torch.arange(9) < 3, -1.0 if dual_clip == 3 else 0.5, 1.0)
    recipe = RECIPES["rloo"]._replace(ratio=ratio, dual_clip=dual_clip, aggregation="token")
    options = {"loss": recipe, "normalizer": 1.0, "impl": impl}
    options["old_log_probs"] = torch.where(torch.arange(9) == 1, -300.0, problem.old)
    clipped, grads = problem.run(**options)
    assert clipped.ratio.largest.isinf() and clipped.loss.isfinite()
    kept = torch.arange(9) >= 3 if ratio == "sequence" else torch.arange(9) != 1
    rest, expected = problem.run(mask=kept, **options)
    lost = (~kept).sum() * (3.0 if dual_clip == 3 else -1.2 * 0.5)
    torch.testing.assert_close(clipped.loss, rest.loss + lost)
    torch.testing.assert_close(grads, expected)


@pytest.mark.parametrize("loss", ["grpo", "gspo", "rloo"])
def test_an_infinite_term_leaves_the_others_as_they_are(loss):
    """And the loss, where its factor is 0."""
    problem = Problem()
    plain, grads = problem.run(loss=loss)
    problem.ref[2] = -torch.inf
    for coeff in (0.0, 0.1):
        result, others = problem.run(loss=loss, kl_coeff=coeff)
        assert result.kl == torch.inf
        assert torch.equal(result.objective, plain.objective)
        assert result.loss == (torch.inf if coeff else plain.loss)
        assert all(x.isfinite().all() for x in others)
        assert coeff or all(map(torch.equal, grads, others))


@pytest.mark.parametrize("loss", LOSSES)
def test_a_rollout_of_inference_mode_is_trained_on(loss):
    """Its advantages and log-probs; torch itself trains no model on tokens of that mode."""
    problem = Problem()
    _, expected = problem.run(mask=MASK, loss=loss, kl_coeff=0.1)
    with torch.inference_mode():
        for name in ("old", "ref", "advantages"):
            setattr(problem, name, getattr(problem, name).clone())
    _, grads = problem.run(mask=MASK, loss=loss, kl_coeff=0.1)
    assert all(map(torch.equal, grads, expected))


def test_constants_may_be_used_again_before_the_backward_pass():
    """As buffers of a rollout that is written for the next step; and no gradient flows to them."""
    problem = Problem()
    options = {"old_log_probs": problem.old, "ref_log_probs": problem.ref, "kl_coeff": 0.1}
    options |= {"token_advantages": problem.advantages, "token_weights": problem.factors}
    hidden, weight, bias = leaves = [x.clone().requires_grad_() for x in problem.head]
    result = linear_policy_loss(hidden, weight, problem.tokens, bias=bias, **options)
    expected = torch.autograd.grad(result.loss, leaves)
    differentiable = {k: v.clone().requires_grad_() for k, v in options.items() if k != "kl_coeff"}
    again = linear_policy_loss(
        hidden, weight, problem.tokens, bias=bias, **options | differentiable
    )
    assert all(not x.requires_grad for x in (*again[1:6], *again.ratio) if x is not None)
    for constant in (problem.advantages, problem.old, problem.ref, problem.factors):
        constant.zero_()
    with torch.no_grad():
        for constant in differentiable.values():
            constant.zero_()
    again.loss.backward()
    assert all(map(torch.equal, (x.grad for x in leaves), expected))
    assert all(x.grad is None for x in differentiable.values())


@pytest.mark.parametrize(
    ("loss", "changes", "theirs"),
    [
        ("grpo", {}, {"loss_type": "grpo"}),
        ("grpo", {"dual_clip": 1.5}, {"loss_type": "grpo", "delta": 1.5}),
        ("dapo", {}, {"loss_type": "dapo", "epsilon_high": 0.28}),
        ("dr_grpo", {}, {"loss_type": "dr_grpo", "max_completion_length": 10}),
        (
            "gspo",
            {"low": 0.2, "high": 0.2},
            {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        ),
        ("cispo", {"high": 0.3}, {"loss_type": "cispo", "epsilon_high": 1.3}),
    ],
    ids=str,
)
def test_values_and_gradients_are_ligers(loss, changes, theirs):
    """Liger's formula over log-probs of torch, in float64."""
    ppo = pytest.importorskip("liger_kernel.chunked_loss.grpo_loss")
    problem = Problem(rows=12)
    mask = torch.rand(3, 4) < 0.7
    for name in ("tokens", "old", "ref"):
        setattr(problem, name, getattr(problem, name).view(3, 4))
    problem.head[0] = problem.head[0].view(3, 4, -1)
    options = {"loss": RECIPES[loss]._replace(**changes), "kl_coeff": 0.04, "mask": mask}
    options |= {"normalizer": 30} if loss == "dr_grpo" else {}
    advantages = problem.advantages[:3]
    mine, grads = problem.run(advantages=advantages, offsets=None, **options)
    leaves = [x.double().requires_grad_() for x in problem.head]
    log_softmax = torch.log_softmax(functional.linear(*leaves), -1)
    log_probs = log_softmax.gather(-1, problem.tokens[..., None]).squeeze(-1)
    value, _ = ppo.LigerFusedLinearGRPOFunction.ppo_loss_fn(
        *(log_probs, mask.double(), advantages.double(), mask.double()),
        ref_per_token_logps=problem.ref.double(), old_per_token_logps=problem.old.double(),
        beta=0.04, **theirs,
    )  # fmt: skip
    torch.testing.assert_close(mine.loss.double(), value, rtol=1e-5, atol=1e-6)
    for got, want in zip(grads, torch.autograd.grad(value, leaves), strict=True):
        atol = 1e-5 * want.abs().max().item()
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=atol)
