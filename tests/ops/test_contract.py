"""What torch asks of a custom op: a schema that tells the truth, shapes without data, one graph."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from fusedrl import (
    exact_kl,
    importance_weights,
    linear_exact_kl,
    linear_token_log_probs,
    linear_top_k_kl,
    token_kl,
    token_log_probs,
    top_k_kl,
)
from fusedrl.ops import _rounding

from .every_case import FEW, FIRST, gradients, leaves_of

pytestmark = pytest.mark.heavy
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]


class Calls(TorchDispatchMode):
    """The calls of compiled ops that it sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fusedrl":
            self.seen.append(
                (func, [x.clone() if isinstance(x, torch.Tensor) else x for x in args])
            )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FEW)
def test_opcheck(name, dtype):
    leaves = leaves_of(FEW[name], dtype)
    with Calls() as calls:
        gradients(FEW[name].call(leaves), leaves)
    assert len(calls.seen) >= 2
    for op, args in calls.seen:
        torch.library.opcheck(op, args)


def test_opcheck_of_a_setting():
    torch.library.opcheck(_rounding._rounds_grads, (torch.randn(3),))


@pytest.fixture
def compiled():
    """Compiles to one graph, whose number it counts."""
    torch._dynamo.reset()
    counters.clear()
    yield lambda function, **more: torch.compile(
        function, backend="aot_eager", fullgraph=True, **more
    )
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in FIRST else pytest.mark.slow) for n in FEW],
)
def test_one_graph_over_scalars(name, compiled):
    case, leaves = FEW[name], leaves_of(FEW[name])
    scalar = "coeff" if name.startswith("token_kl") else "temperature"

    def function(leaves, value):
        results = case.call({k: 2 * x for k, x in leaves.items()}, **{scalar: value})
        return [x for x in results if x.requires_grad]

    graph = compiled(function)
    for value in torch.tensor([0.5, 0.9, 2.0]).unbind():
        results, expected = graph(leaves, value), function(leaves, float(value))
        torch.testing.assert_close(results, expected)
        options = {"allow_unused": True, "materialize_grads": True}
        found = gradients(results, leaves, **options)
        torch.testing.assert_close(found, gradients(expected, leaves, **options))


def test_lengths_make_at_most_two_graphs():
    """One for the first length, one with the length as a symbol."""

    def loss(logits, tokens):
        return token_log_probs(logits, tokens, shift=True).log_probs.sum()

    torch._dynamo.reset()
    counters.clear()
    graph = torch.compile(loss, backend="eager", fullgraph=True)
    for length in range(5, 11):
        logits, tokens = torch.randn(2, length, 20), torch.randint(0, 20, (2, length))
        torch.testing.assert_close(graph(logits, tokens), loss(logits, tokens))
    assert counters["stats"]["unique_graphs"] <= 2


P, Q = torch.randn(2, 2, 9).unbind()
IDS, TEACHER = torch.arange(3).expand(2, 9, 3), torch.full((2, 9, 3), -2.0)


def weighed(level):
    def loss(p, scalar):
        weights, mismatch = importance_weights(2 * p, Q, level=level, low=0.1, high=1 + scalar)
        return (weights * p).sum() + mismatch.total().ess, mismatch.k3

    return loss, P


def known(direction):
    def loss(logits, scalar):
        options = {"direction": direction, "shift": True, "temperature": scalar}
        return top_k_kl(logits, IDS, TEACHER, **options).square().sum(), scalar

    return loss, torch.randn(2, 9, 20)


OVER_OPS = [*map(weighed, ("token", "sequence")), *map(known, ("reverse", "jensen_shannon"))]


@pytest.mark.parametrize(("loss", "values"), OVER_OPS)
def test_what_is_computed_in_torch_over_the_ops(loss, values, compiled):
    graph, leaf = compiled(loss), values.clone().requires_grad_()
    for scalar in torch.tensor([0.5, 0.9, 2.0]).unbind():
        found, expected = graph(leaf, scalar), loss(leaf, float(scalar))
        torch.testing.assert_close(found[0], expected[0])
        torch.testing.assert_close(*(torch.autograd.grad(x[0], leaf) for x in (found, expected)))


def test_gradients_of_a_compiled_linear_top_k_kl():
    """Kept ids are counted, and the graph breaks there."""
    leaves = [x.requires_grad_() for x in (torch.randn(2, 9, 6), torch.randn(20, 6))]

    def loss(*head):
        return linear_top_k_kl(*head, IDS, TEACHER, shift=True).square().sum()

    torch._dynamo.reset()
    graph = torch.compile(loss, backend="aot_eager")
    found, expected = (torch.autograd.grad(x(*leaves), leaves) for x in (graph, loss))
    torch.testing.assert_close(found, expected)


# One tensor as several arguments, as one weight for both heads is.
TWICE = {
    "token_kl": lambda x, _: token_kl(x[0], x[0].sin(), reward=x[0], coeff=0.1).reward,
    "exact_kl": lambda x, _: exact_kl(x, x, direction="forward").kl,
    "linear_token_log_probs": lambda x, _: linear_token_log_probs(x, x, torch.arange(6)).log_probs,
    "linear_exact_kl": lambda x, y: linear_exact_kl(x, y, x.flip(0), y).kl,
}


@pytest.mark.parametrize("op", TWICE)
def test_the_same_tensor_twice(op, compiled):
    leaves = [x.requires_grad_() for x in torch.randn(2, 6, 6).unbind()]

    def loss(*given):
        return (TWICE[op](*given) * torch.arange(6)).sum()

    options = {"allow_unused": True, "materialize_grads": True}
    found, expected = (
        torch.autograd.grad(function(*leaves), leaves, **options)
        for function in (compiled(loss), loss)
    )
    torch.testing.assert_close(found, expected)
