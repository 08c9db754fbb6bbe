"""linear_policy_loss: values and gradients against formulas by hand, float64 and Liger's."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from fusedrl import linear_policy_loss
from fusedrl.ops import RECIPES

LOSSES = sorted(RECIPES)
OFFSETS = torch.tensor([0, 3, 3, 4, 9])
MASK = torch.arange(9) // 2 != 2  # 3, 0, 1 and 3 of the sequences
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}
ESTIMATES = {
    "k1": lambda d: -d,
    "k2": lambda d: d.square() / 2,
    "k3": lambda d: d.exp() - 1 - d,
    "abs": lambda d: d.abs(),
}


class Problem:
    """Packed rows with logits a few units apart, and log-probs whose ratios are 0.4 to 2.5."""

    def __init__(self, rows=9, classes=1100, dtype=torch.float32, seed=0, offsets=OFFSETS):
        torch.manual_seed(seed)
        hidden, weight = torch.randn(rows, 16), torch.randn(classes, 16) * 0.75
        self.head = [x.to(dtype) for x in (hidden, weight, torch.randn(classes))]
        self.tokens, self.offsets = torch.randint(0, classes, (rows,)), offsets
        self.noise = torch.randn(2, rows) * 0.4
        self.advantages, self.factors = torch.randn(rows), torch.rand(rows)
        self.scores(self.head)

    def scores(self, head, shift=False):
        """Log-probs and entropies, of which those of two other policies are made."""
        log_softmax = torch.log_softmax(functional.linear(*head).double(), -1).roll(int(shift), 0)
        log_probs = log_softmax.gather(-1, self.tokens[:, None]).squeeze(-1)
        self.old, self.ref = (log_probs.detach() + self.noise).float()
        return log_probs, -(log_softmax.exp() * log_softmax).sum(-1)

    def run(self, **options):
        """The result, and the gradients of hidden states, weight and bias."""
        leaves = [x.detach().clone().requires_grad_() for x in self.head]
        options = {"old_log_probs": self.old, "offsets": self.offsets, **options}
        if "advantages" not in options:
            options["token_advantages"] = self.advantages
        if "kl_coeff" in options:
            options.setdefault("ref_log_probs", self.ref)
        if options.get("loss") == "dr_grpo":
            options.setdefault("normalizer", 50.0)
        result = linear_policy_loss(*leaves[:2], self.tokens, bias=leaves[2], **options)
        return result, torch.autograd.grad(result.loss, leaves)

    def by_hand(self, recipe, normalizer, log_probs, entropies, kept):
        """The loss with factors, 0.2 of a KL and 0.03 of the entropy, a token at a time."""
        rows, means = [], []
        for start, end in itertools.pairwise(self.offsets.tolist()):
            inside = [n for n in range(start, end) if kept[n]]
            terms = [log_probs.sum() * 0]
            for n in inside:
                over = [n] if recipe.ratio == "token" else inside
                log_ratio = (log_probs - self.old)[over].sum()
                log_ratio = log_ratio / len(inside) if recipe.ratio == "geometric" else log_ratio
                ratio, advantage = log_ratio.exp(), self.advantages[n].double()
                bounded = ratio.clamp(1 - recipe.low, 1 + recipe.high)
                objective = torch.minimum(ratio * advantage, bounded * advantage)
                if advantage < 0:
                    objective = torch.maximum(objective, recipe.dual_clip * advantage)
                if recipe.term == "cispo":
                    objective = bounded.detach() * advantage * log_probs[n]
                if recipe.term == "reinforce":
                    objective = advantage * log_probs[n]
                kl = ESTIMATES[recipe.kl_estimator](self.ref[n] - log_probs[n])
                terms.append(-objective * self.factors[n] + 0.2 * kl - 0.03 * entropies[n])
            rows += terms
            means.append(sum(terms) / max(len(inside), 1))
        if recipe.aggregation == "sequence":
            return sum(means) / (normalizer or len(means))
        return sum(rows) / (normalizer or max(int(kept.sum()), 1))

    def check(self, recipe, normalizer=None, shift=False, mask=MASK):
        """The loss and its gradients are those by hand, in float64."""
        if recipe.aggregation == "constant" and normalizer is None:
            normalizer = 50.0
        leaves, dtype = [x.double().requires_grad_() for x in self.head], self.head[0].dtype
        scores = self.scores(leaves, shift)
        first = (torch.arange(len(mask))[:, None] == self.offsets).any(-1)
        value = self.by_hand(recipe, normalizer, *scores, mask & ~(first & shift))
        options = {"kl_coeff": 0.2, "entropy_coeff": 0.03, "token_weights": self.factors}
        options |= {"loss": recipe, "normalizer": normalizer, "mask": mask, "shift": shift}
        result, grads = self.run(**options)
        close = CLOSE[dtype]
        of_loss = min(close, CLOSE[torch.float32])  # which no dtype rounds
        torch.testing.assert_close(
            result.loss.double(), value.reshape(()), rtol=of_loss, atol=of_loss
        )
        for got, want in zip(grads, torch.autograd.grad(value, leaves), strict=True):
            assert got.dtype == dtype
            atol = close * max(want.abs().max().item(), 1e-3)
            torch.testing.assert_close(got.double(), want, rtol=close, atol=atol)


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
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_losses_are_their_formulas_by_hand(recipe, normalizer, shift, dtype):
    Problem(dtype=dtype).check(recipe, normalizer, shift)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(CASES),
    st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any),
    st.integers(0, 10_000),
    st.booleans(),
)
def test_random_batches(recipe, lengths, seed, shift):
    offsets, rows = torch.tensor([0, *itertools.accumulate(lengths)]), sum(lengths)
    problem = Problem(rows, 37, torch.float64, seed, offsets)
    problem.check(recipe, shift=shift, mask=torch.rand(rows) < 0.7)


def test_ratios_are_one_without_old_log_probs():
    """The gradient is that of REINFORCE, and no ratio is clipped."""
    problem = Problem()
    on_policy, grads = problem.run(old_log_probs=None, loss="dapo")
    _, expected = problem.run(loss="reinforce")
    assert on_policy.ratio.mean == on_policy.ratio.effective_sample_size == 1
    torch.testing.assert_close(on_policy.loss, -problem.advantages.mean())
    torch.testing.assert_close(grads, expected)


def test_statistics_of_the_ratios():
    problem, mask = Problem(rows=40, offsets=None), torch.arange(40) % 4 != 1
    recipe = RECIPES["grpo"]._replace(high=0.3)
    found = problem.run(loss=recipe, mask=mask)[0]
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
    assert not any(problem.run(loss="reinforce")[0].ratio[3:5])


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


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("loss", ["grpo", "cispo", "reinforce"])
def test_a_token_of_weight_0_adds_nothing(loss, poison):
    """Whatever else is known of it."""
    problem, weights = Problem(), (torch.arange(9) != 3).float()
    expected, grads = problem.run(token_weights=weights, loss=loss)
    problem.advantages[3] = problem.old[3] = poison
    found, others = problem.run(token_weights=weights, loss=loss)
    assert torch.equal(found.loss, expected.loss) and all(map(torch.equal, grads, others))


def test_a_log_prob_that_is_no_number_shows_in_loss_and_gradient():
    """Of its own row alone; a clamp has no gradient there."""
    problem = Problem()
    problem.old[3] = torch.nan
    result, (grad, *_) = problem.run()
    assert result.loss.isnan()
    assert grad.isnan().any(-1).tolist() == [n == 3 for n in range(9)]


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


def test_a_rollout_of_inference_mode_is_trained_on():
    """Its advantages and log-probs; torch itself trains no model on tokens of that mode."""
    problem, options = Problem(), {"mask": MASK, "kl_coeff": 0.1}
    _, expected = problem.run(**options)
    with torch.inference_mode():
        for name in ("old", "ref", "advantages"):
            setattr(problem, name, getattr(problem, name).clone())
    assert all(map(torch.equal, problem.run(**options)[1], expected))


def test_constants_may_be_used_again_before_the_backward_pass():
    """As buffers of a rollout that is written for the next step; and no gradient flows to them."""
    problem = Problem()
    leaves = [x.clone().requires_grad_() for x in problem.head]
    names = "token_advantages", "old_log_probs", "ref_log_probs", "token_weights"
    columns = problem.advantages, problem.old, problem.ref, problem.factors
    constants = {name: x.requires_grad_() for name, x in zip(names, columns, strict=True)}
    options = {"bias": leaves[2], "kl_coeff": 0.1, **constants}
    first, again = (linear_policy_loss(*leaves[:2], problem.tokens, **options) for _ in "ab")
    assert not any(x.requires_grad for x in (*again[1:3], again.log_probs, *again.ratio))
    expected = torch.autograd.grad(first.loss, leaves)
    with torch.no_grad():
        for constant in columns:
            constant.zero_()
    again.loss.backward()
    assert all(map(torch.equal, (x.grad for x in leaves), expected))
    assert all(x.grad is None for x in columns)


LIGERS = [
    ("grpo", {}, {}),
    ("grpo", {"dual_clip": 1.5}, {"delta": 1.5}),
    ("dapo", {}, {"epsilon_high": 0.28}),
    ("dr_grpo", {}, {"max_completion_length": 10}),
    ("gspo", {"low": 0.2, "high": 0.2}, {"importance_sampling_level": "sequence"}),
    ("cispo", {"high": 0.3}, {"epsilon_high": 1.3}),
]


@pytest.mark.parametrize(("loss", "changes", "theirs"), LIGERS, ids=str)
def test_values_and_gradients_are_ligers(loss, changes, theirs):
    """Liger's formula over log-probs of torch, in float64."""
    ppo = pytest.importorskip("liger_kernel.chunked_loss.grpo_loss")
    problem, mask = Problem(rows=12, dtype=torch.float64, offsets=None), torch.rand(3, 4) < 0.7
    leaves = [x.requires_grad_() for x in problem.head]
    log_probs, _ = problem.scores(leaves)
    old, ref = problem.old.view(3, 4), problem.ref.view(3, 4)
    value, _ = ppo.LigerFusedLinearGRPOFunction.ppo_loss_fn(
        *(log_probs.view(3, 4), mask.double(), problem.advantages[:3], mask.double()),
        **{"loss_type": "grpo" if loss == "gspo" else loss, "beta": 0.04, **theirs},
        ref_per_token_logps=ref, old_per_token_logps=old,
    )  # fmt: skip
    hidden, tokens = leaves[0].view(3, 4, -1), problem.tokens.view(3, 4)
    options = {"bias": leaves[2], "old_log_probs": old, "ref_log_probs": ref, "kl_coeff": 0.04}
    options |= {"normalizer": 30} if loss == "dr_grpo" else {}
    options |= {"loss": RECIPES[loss]._replace(**changes)}
    found = linear_policy_loss(
        hidden, leaves[1], tokens, problem.advantages[:3], mask, **options
    ).loss
    torch.testing.assert_close(found, value, rtol=1e-6, atol=1e-7)
    for got, want in zip(*(torch.autograd.grad(x, leaves) for x in (found, value)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6 * want.abs().max().item())
