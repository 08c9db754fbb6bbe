"""linear_policy_loss: what torch asks of a custom op, what it multiplies, what it refuses."""

from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from fusedrl import linear_policy_loss
from fusedrl.ops._head import prepare
from fusedrl.ops.linear_policy_loss.autograd import Rows, Task, run
from fusedrl.ops.linear_policy_loss.losses import RECIPES, PolicyBatch, Surrogate, TermWeights

OFFSETS = torch.tensor([0, 3, 3, 9])
MASK = torch.arange(9) % 4 != 1
TOKENS = torch.arange(9) * 2


def inputs(dtype=torch.float32):
    torch.manual_seed(0)
    hidden, weight = torch.randn(9, 6), torch.randn(20, 6)
    return hidden.to(dtype), weight.to(dtype), torch.randn(20).to(dtype)


def constants():
    torch.manual_seed(1)
    return torch.randn(9), torch.randn(9) - 2, torch.randn(9) - 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("full", [False, True])
def test_opcheck(dtype, full):
    advantages, old, ref = constants()
    hidden, weight, bias = inputs(dtype)
    head = (hidden, weight, bias if full else None)
    batch = (TOKENS, MASK, OFFSETS, full, torch.tensor(0.9, dtype=torch.float64), 1.5, 4.0)
    columns = (advantages, old if full else None, ref if full else None, torch.rand(9, 4))
    for wanted in (
        (True, True, full),
        (False, True, False),
        (True, False, False),
        (False, False, False),
    ):
        torch.library.opcheck(
            torch.ops.fusedrl.linear_policy_loss.default,
            (*head, *batch, *columns, 0, 0.8, 1.2, 3.0, 2, full, *wanted),
        )


@pytest.mark.parametrize("loss", ["grpo", "cispo", "gspo", "rloo"])
def test_one_graph_over_twenty_temperatures(loss):
    advantages, old, ref = constants()
    hidden, weight, bias = inputs()
    weight.requires_grad_()

    def value(hidden, temperature):
        result = linear_policy_loss(
            *(hidden, weight, TOKENS, advantages, MASK), bias=bias, old_log_probs=old,
            ref_log_probs=ref, kl_coeff=0.1, offsets=OFFSETS, shift=True, loss=loss,
            temperature=temperature,
        )  # fmt: skip
        return result.loss + result.ratio.mean

    torch._dynamo.reset()
    graphs = CompileCounter()
    compiled = torch.compile(value, backend=graphs, fullgraph=True)
    for temperature in torch.linspace(0.5, 2.0, 20).unbind():
        torch.testing.assert_close(compiled(hidden, temperature), value(hidden, float(temperature)))
    assert graphs.frame_count == 1


@pytest.mark.parametrize("loss", RECIPES)
def test_a_checkpoint_runs_the_forward_pass_once_more(loss):
    """And not twice, as it would for tensors that a pass within the forward pass saves."""
    advantages, old, ref = constants()
    hidden, weight, bias = (x.requires_grad_() for x in inputs())
    runs = []

    def segment(hidden):
        runs.append(loss)
        return linear_policy_loss(
            *(hidden, weight, TOKENS, advantages, MASK), bias=bias, old_log_probs=old,
            ref_log_probs=ref, kl_coeff=0.1, loss=loss, normalizer=5.0,
        ).loss  # fmt: skip

    checkpoint(segment, hidden, use_reentrant=False).backward()
    assert len(runs) == 2


def test_backward_through_aot():
    advantages, old, _ = constants()
    leaves = [x.requires_grad_() for x in inputs()]

    def value(hidden, weight, bias):
        return linear_policy_loss(
            *(hidden, weight, TOKENS, advantages, MASK), bias=bias, old_log_probs=old
        ).loss

    expected = torch.autograd.grad(value(*leaves) * 3, leaves)
    torch._dynamo.reset()
    compiled = torch.compile(value, backend="aot_eager", fullgraph=True)
    for got, want in zip(torch.autograd.grad(compiled(*leaves) * 3, leaves), expected, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "factors", [(1, 1, 1, 1), (2, 2, 2, 2), (1, 0, 0, 0), (0, 3, 0, 0), (1, -2, 0.5, 4)], ids=str
)
def test_terms_differentiate_by_themselves(factors, dtype):
    """Each with an upstream gradient of its own, once and once more."""
    advantages, old, ref = constants()
    factors = torch.tensor(factors, dtype=torch.float32)
    weights = TermWeights(*torch.rand(4, 9))
    surrogate = Surrogate("clip", 0.8, 1.2, 3.0, "k3")
    grads = []
    for separate in (True, False):
        leaves = [x.requires_grad_() for x in inputs(dtype)]
        head = prepare("", leaves[0], leaves[1], leaves[2], None, None)
        rows = Rows(TOKENS, MASK, OFFSETS, True, torch.ones((), dtype=torch.float64))
        if separate:
            task = Task(head, rows, PolicyBatch(advantages, old, ref), weights, surrogate, True)
            (run(task, separate=True).values * factors).sum().backward(retain_graph=True)
        else:
            scaled = TermWeights(*(w * f for w, f in zip(weights, factors, strict=True)))
            task = Task(head, rows, PolicyBatch(advantages, old, ref), scaled, surrogate, True)
            run(task).values.sum().backward()
        grads.append([x.grad for x in leaves])
    for got, want in zip(*grads, strict=True):
        tol = 1e-5 if dtype == torch.float32 else 2e-3
        torch.testing.assert_close(got, want, rtol=tol, atol=tol * want.abs().max().item())


PRODUCTS = """
import torch
from fusedrl import linear_policy_loss

torch.manual_seed(0)
mask, tokens = torch.arange(300) % 7 == 3, torch.randint(0, 9000, (300,))
hidden = torch.randn(300, 24, requires_grad=True)
weight = torch.randn(9000, 24, requires_grad=True)
with torch.backends.mkl.verbose(torch.backends.mkl.VERBOSE_ON):
    linear_policy_loss(
        hidden, weight, tokens, torch.randn(2), mask, offsets=torch.tensor([0, 3, 300]), shift=True
    ).loss.backward()
"""


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="MKL tells what it multiplies")
def test_three_products_of_the_kept_rows():
    done = subprocess.run(
        [sys.executable, "-c", PRODUCTS], capture_output=True, text=True, timeout=120, check=True
    )
    kept = sum(n % 7 == 3 and n not in (0, 3) for n in range(300))
    found = re.findall(r"SGEMM\(\w,\w,(\d+),(\d+),(\d+),", done.stdout)
    assert found
    flops = sum(int(m) * int(n) * int(k) for m, n, k in found)
    assert flops == 3 * kept * 24 * 9000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "ppo"}, "loss: expected one of grpo"),
        ({"ratio": "whole"}, "ratio: expected one of token, sequence, geometric"),
        ({"loss": "cispo", "ratio": "sequence"}, "ratio: expected 'token' with loss='cispo'"),
        ({"aggregation": "mean"}, "aggregation: expected one of token, sequence, constant"),
        ({"loss": "dr_grpo"}, "normalizer: expected a number with aggregation='constant'"),
        ({"normalizer": 0}, "normalizer: expected a number from"),
        ({"normalizer": torch.ones(2)}, r"normalizer: .* got torch.float32 \(2,\); pass"),
        ({"clip": -0.1}, "clip: expected a low distance from 0"),
        ({"clip": (0.1, 0.2, 0.3)}, "clip: expected a number or a pair"),
        ({"clip": "0.1"}, "clip: expected a number, got '0.1'"),
        ({"clip": [0.1]}, r"clip: expected a number or a pair \(low, high\), got \[0.1\]"),
        ({"dual_clip": 1.1}, r"dual_clip: expected at least 1 \+ clip\[1\] = 1.2"),
        ({"kl_coeff": 0.1}, "ref_log_probs: expected a tensor with kl_coeff=0.1"),
        ({"kl_coeff": "much"}, "kl_coeff: expected a number from -1e30 to 1e30, got 'much'; 0.0"),
        ({"entropy_coeff": float("nan")}, "entropy_coeff: expected a number from -1e30"),
        ({"kl_estimator": "k4"}, "kl_estimator: expected one of k1"),
        ({"old_log_probs": torch.zeros(8)}, r"old_log_probs: expected shape \(9,\)"),
        (
            {"old_log_probs": torch.zeros(9, requires_grad=True)},
            "old_log_probs: expected a constant",
        ),
        ({"token_weights": torch.zeros(9, 1)}, r"token_weights: expected shape \(9,\)"),
        ({"vocab_offset": 0}, "vocab_offset, vocab_group: expected both"),
        ({"impl": "triton"}, "impl: expected .* for linear_policy_loss, got 'triton'"),
        ({"importance": {"high": 3.0}}, "rollout_log_probs: expected a tensor with importance"),
    ],
    ids=str,
)
def test_refused_options(options, message):
    hidden, weight, _ = inputs()
    with pytest.raises(ValueError, match=message):
        linear_policy_loss(hidden, weight, TOKENS, torch.zeros(9), MASK, **options)


@pytest.mark.parametrize(
    ("advantages", "error", "message"),
    [
        (
            torch.zeros(4),
            ValueError,
            r"advantages: expected shape \(9,\), one for each token, or \(1,\)",
        ),
        (torch.zeros(1, 1, 1), ValueError, r"advantages: .* got \(1, 1, 1\); .*\.flatten\(\)"),
        (torch.zeros(9, 1), ValueError, r"got \(9, 1\); reshape it with \.reshape\(9\)$"),
        (torch.zeros(3), ValueError, r"got \(3,\); .* one sequence: pass offsets if they are"),
        (torch.zeros(2, 2), ValueError, r"got \(2, 2\); give one value for each token, or one"),
        (torch.zeros(9).long(), TypeError, r"advantages: expected a floating-point .*\.float\(\)"),
        ([0.0] * 9, TypeError, "advantages: expected a dense tensor, got list; pass a tensor"),
        (None, TypeError, "advantages: expected a dense tensor, got NoneType; pass a tensor"),
        (torch.zeros(9, requires_grad=True), ValueError, "advantages: expected a constant"),
        (torch.zeros(9, device="meta"), ValueError, "advantages: expected device cpu, got meta"),
    ],
    ids=[
        "shape",
        "column",
        "columns",
        "offsets",
        "square",
        "dtype",
        "list",
        "none",
        "gradient",
        "device",
    ],
)
def test_refused_advantages(advantages, error, message):
    hidden, weight, _ = inputs()
    with pytest.raises(error, match=message):
        linear_policy_loss(hidden, weight, TOKENS, advantages, MASK)


@pytest.mark.parametrize(
    ("importance", "message"),
    [
        (
            "sequence",
            "importance: expected a mapping of options .* got str; pass a dict such as {'level'",
        ),
        ({"hihg": 2.0}, "importance: expected options among level, mode, .* got 'hihg'"),
        ({"mask": MASK}, "importance: expected options among level, mode, .* got 'mask'"),
    ],
    ids=["string", "typo", "mask"],
)
def test_refused_importance(importance, message):
    hidden, weight, _ = inputs()
    with pytest.raises(TypeError, match=message):
        linear_policy_loss(
            *(hidden, weight, TOKENS, torch.zeros(9), MASK),
            rollout_log_probs=torch.zeros(9),
            importance=importance,
        )


def test_modules_and_their_outputs_in_place_of_tensors():
    hidden, weight, _ = inputs()
    output = SimpleNamespace(last_hidden_state=hidden)
    cases: tuple[tuple[Any, str], ...] = (
        ((output, weight), "hidden: .* got SimpleNamespace; pass a tensor"),
        (({"logits": hidden}, weight), "hidden: expected .* got dict; pass a tensor"),
        ((hidden, torch.nn.Linear(6, 20)), "weight: .* got Linear; pass a tensor"),
        ((hidden, torch.nn.Sequential()), "weight: .* got Sequential; pass"),
    )
    for given, message in cases:
        with pytest.raises(TypeError, match=message):
            linear_policy_loss(*given, TOKENS, torch.zeros(9), MASK)


def test_a_clip_of_a_list_is_that_of_a_pair():
    """As a configuration in JSON or YAML has it."""
    hidden, weight, _ = inputs()
    advantages, old, _ = constants()
    of_list, of_pair = (
        linear_policy_loss(
            *(hidden, weight, TOKENS, advantages, MASK), old_log_probs=old, clip=clip
        ).loss
        for clip in ([0.1, 0.5], (0.1, 0.5))
    )
    assert torch.equal(of_list, of_pair)


def test_a_kept_token_outside_the_vocabulary():
    hidden, weight, _ = inputs()
    for impl in ("cpu", "reference"):
        with pytest.raises(RuntimeError, match=r"tokens: expected values in \[0, 20\), got -100"):
            linear_policy_loss(
                *(hidden, weight, TOKENS.masked_fill(TOKENS == 4, -100), torch.zeros(9), None),
                impl=impl,
            )
