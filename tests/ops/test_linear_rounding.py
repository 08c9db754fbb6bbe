"""Gradients of a linear head in bfloat16: what is kept of those of its logits in the products."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from fusedrl import (
    _host,
    linear_exact_kl,
    linear_token_log_probs,
)

ROWS, CLASSES, WIDTH = 29, 5000, 96
HALF = 2.0**-9  # what rounding to bfloat16 takes of a number, at most
ONE = torch.ones((), dtype=torch.float64)


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return ((found.double() - truth).norm() / truth.norm()).item()


def row_errors(found: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    return (found.double() - truth).norm(dim=1) / truth.norm(dim=1)


def random_head(scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(ROWS, WIDTH), scale * torch.randn(CLASSES, WIDTH) / WIDTH**0.5


def sure() -> tuple[torch.Tensor, torch.Tensor]:
    """One class of each row has a probability of 0.999."""
    hidden, weight = random_head(1.0)
    pull = torch.log(torch.tensor(0.999 / 0.001 * CLASSES)) + 0.5
    weight[:ROWS] += pull * hidden / hidden.norm(dim=1, keepdim=True).square()
    return hidden, weight


def equal_classes() -> tuple[torch.Tensor, torch.Tensor]:
    """All classes are about equally likely: all gradients but the target's would lose the same.

    What the weights have in common cancels.
    """
    hidden, weight = random_head(1.0)
    return hidden / 1024, weight + 2.0


def many_equal_ones() -> tuple[torch.Tensor, torch.Tensor]:
    """Hundreds of classes share the probability, and lie side by side.

    Their weights are equal where the hidden states are not 0.
    """
    hidden, weight = random_head(0.3)
    seen = WIDTH // 2
    hidden[:, seen:], hidden[:, 0] = 0, 5.0
    weight[1000:1400, :seen] = weight[1000, :seen]
    weight[1000:1400, 0] = 2.0
    return hidden, weight


def large_rare_ones(size: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A twentieth of the classes has hardly any probability, and weights of another size.

    The hidden states are 0 where these are large.
    """
    hidden, weight = random_head(0.2)
    seen, rare = WIDTH // 2, torch.rand(CLASSES) < 0.05
    hidden[:, seen:], hidden[:, 0] = 0, 1.0
    weight[rare, seen:] *= size
    weight[rare, 0] = -60.0
    return hidden, weight


MODELS = {
    "flat": lambda: random_head(0.3),
    "as models are": lambda: random_head(4.0),
    "sure": sure,
    "equal classes": equal_classes,
    "many equal ones": many_equal_ones,
    **{f"rare ones of size {size:g}": partial(large_rare_ones, size) for size in (1e2, 1e3, 1e5)},
}


def unrounded_hidden_gradient(hidden, weight, tokens, grads):
    """In float32, as the ranks of a sharded vocabulary add it up."""
    ops = torch.ops.fusedrl
    args = (hidden, weight, None, tokens, None, None, False, ONE, 1.0, 0.0)
    parts, *stored = ops.linear_token_log_probs(*args, True, 0, False, 0, False)
    results = ops.linear_token_log_probs_finish(parts[None], ONE, True)
    return ops.linear_token_log_probs_backward(
        *grads, *args, *results, *stored, 0, False, True, False, False
    )[0]


@pytest.mark.parametrize("of_entropy", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_the_hidden_gradient_before_it_is_rounded(model, of_entropy):
    """Its error is that of float32 products, or less than a 16th of what rounding may take."""
    hidden, weight = (x.bfloat16() for x in MODELS[model]())
    probs = (hidden.double() @ weight.double().T).softmax(-1)
    tokens = probs.multinomial(1)[:, 0]
    tokens[::2] = probs[::2].argmax(-1)
    grads = torch.randn(ROWS), torch.randn(ROWS) if of_entropy else None

    wide = hidden.double().requires_grad_()
    log_p = (wide @ weight.double().T).log_softmax(-1)
    values = grads[0] * log_p.gather(-1, tokens[:, None])[:, 0]
    if of_entropy:
        values = values - grads[1] * (log_p.exp() * log_p).sum(-1)
    (truth,) = torch.autograd.grad(values.sum(), wide)

    def worst_row(hidden, weight):
        found = unrounded_hidden_gradient(hidden, weight, tokens, grads)
        return row_errors(found, truth).max()

    assert worst_row(hidden, weight) < 1.5 * worst_row(hidden.float(), weight.float()) + HALF / 16


@pytest.mark.parametrize("model", MODELS)
def test_the_hidden_gradient_behind_a_frozen_head(model):
    """Summed before anything is known of the row's probabilities or of the loss."""
    hidden, weight = (x.bfloat16() for x in MODELS[model]())
    tokens = (hidden.double() @ weight.double().T).argmax(-1)
    tokens[::2] = torch.randint(0, CLASSES, tokens[::2].shape)
    upstream = torch.randn(ROWS)

    def gradient_in(dtype, impl):
        leaf = hidden.to(dtype).requires_grad_()
        log_probs = linear_token_log_probs(leaf, weight.to(dtype), tokens, impl=impl).log_probs
        return torch.autograd.grad(log_probs, leaf, upstream.to(log_probs))[0]

    found, in_float = gradient_in(torch.bfloat16, "cpu"), gradient_in(torch.float32, "cpu")
    truth = gradient_in(torch.float64, "reference")
    assert error(found, truth) < 1.1 * error(in_float.bfloat16(), truth) + 1e-5
    assert row_errors(found, truth).max() < row_errors(in_float.bfloat16(), truth).max() + HALF / 16


@pytest.mark.parametrize("direction", ["reverse", "forward", "jensen_shannon"])
@pytest.mark.parametrize("model", MODELS)
def test_gradients_of_two_heads(model, direction):
    """Those of near models have both signs and cancel; no error is above that of float32 ones."""
    hidden, weight = (x.bfloat16() for x in MODELS[model]())
    ref_hidden = (hidden + 0.1 * torch.randn(ROWS, WIDTH)).bfloat16()
    ref_weight = (weight * (1 + 0.1 * torch.randn(CLASSES, 1))).bfloat16()
    upstream = torch.randn(ROWS)

    def gradients_in(dtype, impl):
        leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight, ref_hidden, ref_weight)]
        values = linear_exact_kl(*leaves, direction=direction, impl=impl).kl
        return torch.autograd.grad(values, leaves, upstream.to(values.dtype))

    found = gradients_in(torch.bfloat16, "cpu")
    in_float = gradients_in(torch.float32, "cpu")
    exact = gradients_in(torch.float64, "reference")
    for got, other, truth in zip(found, in_float, exact, strict=True):
        assert error(got, truth) < 1.1 * error(other.bfloat16(), truth) + 1e-5


def rows_of_all_kinds():
    """Rows that are rounded, that keep a few rests or all, and without any gradient."""
    hidden, weight = (x.bfloat16() for x in many_equal_ones())
    hidden[::3, 0] = 0
    hidden[1::3] *= 12
    upstream = torch.randn(ROWS)
    upstream[::5] = 0
    return hidden, weight, torch.arange(ROWS) * 131 % CLASSES, upstream


def test_a_row_among_others_of_other_kinds():
    hidden, weight, tokens, upstream = rows_of_all_kinds()

    def gradient(rows):
        leaf = hidden[rows].clone().requires_grad_()
        out = linear_token_log_probs(leaf, weight, tokens[rows], batch_invariant=True).log_probs
        return torch.autograd.grad(out, leaf, upstream[rows])[0]

    whole = gradient(slice(None))
    for i in range(ROWS):
        assert torch.equal(gradient(slice(i, i + 1)), whole[i : i + 1]), i


def test_classes_without_probability_keep_gradients_of_zero():
    """What their neighbours lose in rounding does not meet their weights, whatever these are."""
    hidden, weight = (x.bfloat16() for x in random_head(0.3))
    bias = torch.zeros(CLASSES, dtype=torch.bfloat16)
    bias[1::3] = -torch.inf
    tokens, upstream = torch.full((ROWS,), 300), torch.randn(ROWS)

    def gradient(weight):
        leaf = hidden.clone().requires_grad_()
        out = linear_token_log_probs(leaf, weight, tokens, bias=bias).log_probs
        return torch.autograd.grad(out, leaf, upstream)[0]

    large = weight.clone()
    large[1::3] = 1e30
    assert torch.equal(gradient(large), gradient(weight))


@pytest.fixture
def medium():
    """Calls a function while float32 products may be rounded."""

    def run(function, *args):
        torch.set_float32_matmul_precision("medium")
        try:
            return function(*args)
        finally:
            torch.set_float32_matmul_precision("highest")

    return run


def log_probs(hidden, weight):
    tokens = torch.arange(len(hidden)) * 131 % len(weight)
    values = linear_token_log_probs(hidden, weight, tokens).log_probs
    return (values * torch.linspace(-2, 1, len(hidden))).sum()


def divergence(hidden, weight):
    ref_hidden = hidden.detach().roll(1, 0)
    values = linear_exact_kl(hidden, weight, ref_hidden, weight.detach()).kl
    return (values * torch.linspace(-2, 1, len(hidden))).sum()


LOSSES = pytest.mark.parametrize("loss", [log_probs, divergence])


def gradients(loss, dtype=torch.bfloat16, head=None):
    torch.manual_seed(0)
    pair = random_head(2.0) if head is None else head()
    leaves = [x.bfloat16().to(dtype).requires_grad_() for x in pair]
    return torch.autograd.grad(loss(*leaves), leaves)


def differ(found, others) -> bool:
    """Whether the weight's gradient does, as it does where products are in bfloat16."""
    return not torch.equal(found[1], others[1])


ROUNDS = _host.cpu_level() == "avx512_bf16"


@LOSSES
def test_medium_precision_rounds_gradients_of_logits(loss, medium):
    """Errors are those of rounding a gradient twice, and by default those of rounding it once."""
    truth = gradients(loss, torch.float64)
    before, rounded, after = gradients(loss), medium(gradients, loss), gradients(loss)
    assert differ(rounded, before) == ROUNDS
    for fine, coarse, again, exact in zip(before, rounded, after, truth, strict=True):
        assert torch.equal(fine, again)
        once = error(exact.bfloat16(), exact)
        assert error(fine, exact) < 1.05 * once
        assert error(coarse, exact) < 2 * once


@pytest.mark.heavy
@LOSSES
def test_a_compiled_graph_follows_the_setting(loss, medium):
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    fine, coarse = gradients(loss), medium(gradients, loss)
    assert not differ(gradients(compiled), fine)
    assert not differ(medium(gradients, compiled), coarse)
    assert not differ(gradients(compiled), fine)
