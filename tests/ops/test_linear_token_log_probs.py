"""linear_token_log_probs: values and gradients against float64 and torch in the same dtype."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
from accuracy import no_worse
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from fusedrl import linear_token_log_probs
from fusedrl.ops import _stored

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INF = float("inf")


def torch_path(hidden, weight, bias, tokens, temperature=1.0, scale=1.0, softcap=None):
    """What users write: the head, log_softmax in its dtype, then gather."""
    logits = functional.linear(hidden, weight, bias) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_softmax = torch.log_softmax(logits / temperature, -1)
    entropy = -(log_softmax.exp() * log_softmax.masked_fill(log_softmax == -INF, 0)).sum(-1)
    return log_softmax.gather(-1, tokens[..., None]).squeeze(-1), entropy


def compiled(hidden, weight, bias, tokens, impl="cpu", **options):
    return linear_token_log_probs(
        hidden, weight, tokens, bias=bias, entropy=True, impl=impl, **options
    )


def multiplied_again(*inputs, **options):
    """Without logits that the forward pass stores for the backward pass."""
    with mock.patch.object(_stored, "MOST_BYTES", 0):
        return compiled(*inputs, **options)


def reference(hidden, weight, bias, tokens, **options):
    return compiled(hidden, weight, bias, tokens, impl="reference", **options)


def problem(rows, classes, width, dtype=torch.float32):
    """Hidden states, weight, bias and tokens with logits a few units apart."""
    hidden, weight = torch.randn(rows, width), torch.randn(classes, width) * 3 / width**0.5
    head = (x.to(dtype) for x in (hidden, weight, torch.randn(classes)))
    return (*head, torch.randint(0, classes, (rows,)))


def results(path, inputs, tokens, upstream, dtype=None, **options):
    """Log-probs, entropy, and the gradients of hidden states, weight and bias."""
    leaves = [
        None if x is None else x.detach().to(dtype or x.dtype).clone().requires_grad_()
        for x in inputs
    ]
    out = tuple(path(*leaves, tokens, **options))
    wanted = [x for x in leaves if x is not None]
    grads = torch.autograd.grad(
        out, wanted, [up.to(x) for up, x in zip(upstream, out, strict=True)]
    )
    return [x.detach() for x in out], grads


def frozen_head(inputs, tokens, upstream, **options):
    """Log-probs and the hidden states' gradient, in one pass over a head that has none."""
    hidden, weight, bias = inputs
    leaf = hidden.detach().requires_grad_()
    out = linear_token_log_probs(leaf, weight, tokens, bias=bias, impl="cpu", **options).log_probs
    return out.detach(), torch.autograd.grad(out, leaf, upstream[0])[0]


def check(inputs, tokens, upstream=None, **options):
    """The compiled op is no worse than torch, both in the dtype of the inputs."""
    upstream = torch.randn(2, *tokens.shape) if upstream is None else upstream
    theirs, truth = (
        results(path, inputs, tokens, upstream, dtype, **options)
        for path, dtype in ((torch_path, None), (reference, torch.float64))
    )
    for path in (compiled, multiplied_again):
        mine = results(path, inputs, tokens, upstream, **options)
        assert all(x.dtype == torch.float32 for x in mine[0])
        assert all(grad.dtype == inputs[0].dtype for grad in mine[1])
        for got, other, exact in zip(mine[0] + [*mine[1]], theirs[0] + [*theirs[1]],
                                     truth[0] + [*truth[1]], strict=True):  # fmt: skip
            largest = exact[exact.isfinite()].abs().max().item() if exact.isfinite().any() else 0.0
            no_worse(got, other, exact, 3e-6 * max(1.0, largest))
    upstream = torch.stack((upstream[0], torch.zeros_like(upstream[0])))
    theirs, truth = (
        results(path, inputs, tokens, upstream, dtype, **options)
        for path, dtype in ((torch_path, None), (reference, torch.float64))
    )
    log_probs, grad = frozen_head(inputs, tokens, upstream, **options)
    assert torch.equal(log_probs, mine[0][0])
    no_worse(grad, theirs[1][0], truth[1][0], 3e-6 * max(1.0, truth[1][0].abs().max().item()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [1, 7, 4095, 4096, 4097, 5000])  # around a tile of classes
@pytest.mark.parametrize(("rows", "width"), [(9, 1), (9, 3), (15, 64), (29, 513)])
def test_no_worse_than_torch_in_the_same_dtype(dtype, classes, rows, width):
    """The tails of blocks, panels and pairs, and a second piece of the depth."""
    *inputs, tokens = problem(rows, classes, width, dtype)
    check(inputs, tokens, temperature=0.7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [0.6, 25.0, torch.tensor(1.7)], ids=str)
@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize(
    ("scale", "biased"), [(1.0, False), (1.0, True), (0.25, True), (3.0, False)]
)
def test_options_of_the_head(dtype, temperature, softcap, scale, biased):
    hidden, weight, bias, tokens = problem(11, 1500, 24, dtype)
    options = {"softcap": softcap, "scale": scale, "temperature": temperature}
    check((hidden, weight, bias if biased else None), tokens, **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_rows_than_a_block(dtype):
    """Three blocks of rows, the last not full, whose gradients of the weight add up."""
    *inputs, tokens = problem(2100, 1100, 8, dtype)
    check(inputs, tokens, softcap=5.0, scale=1.5)


@pytest.mark.parametrize("banned", [slice(0, 4096), slice(4096, 8192), slice(0, 8193)], ids=str)
@pytest.mark.parametrize("classes", [8194, 9000])
def test_a_whole_tile_of_banned_classes(banned, classes):
    """A bias of -inf, as torch has it: no probability, no gradient, and no NaN."""
    hidden, weight, bias, tokens = problem(9, classes, 8)
    bias[banned] = -INF
    tokens[:] = torch.tensor([8193, 8193, 0, 6000, 4095, 4096, 8192, 8193, 7])
    upstream = torch.randn(2, 9)
    check((hidden, weight, bias), tokens, upstream)
    grads = results(compiled, (hidden, weight, bias), tokens, upstream)[1]
    elsewhere = torch.ones(classes, dtype=torch.bool)
    elsewhere[tokens] = False
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[1][(bias == -INF) & elsewhere].any()


class Sizes(TorchDispatchMode):
    """Of what the backward op returns."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.fusedrl.linear_token_log_probs_backward.default:
            self.seen = [x.numel() for x in out]
        return out


def test_what_is_frozen_costs_no_gradient():
    *inputs, tokens = problem(9, 1100, 8)
    for wanted in itertools.product([False, True], repeat=3):
        leaves = [x.detach().requires_grad_(want) for x, want in zip(inputs, wanted, strict=True)]
        out = compiled(*leaves, tokens)
        assert out.log_probs.requires_grad == any(wanted)
        if any(wanted):
            with Sizes() as sizes:
                torch.autograd.backward(tuple(out), list(torch.randn(2, 9)))
            assert sizes.seen == [x.numel() * want for x, want in zip(inputs, wanted, strict=True)]


@pytest.mark.parametrize("at", [900, 4095])  # late in a tile
@pytest.mark.parametrize("peak", [8.0, 20.0, 42.0])
def test_a_peak_late_in_its_tile(at, peak):
    bias = torch.randn(5000)
    bias[at] = peak
    head = torch.zeros(1, 4), torch.zeros(5000, 4), bias
    truth, theirs = (
        torch_path(*(x.to(t) for x in head), torch.tensor([at]))
        for t in (torch.float64, torch.float32)
    )
    ours = compiled(*head, torch.tensor([at]))
    for mine, other, exact in zip(ours, theirs, truth, strict=True):
        no_worse(mine, other, exact, 3e-7)
    assert ours.log_probs <= 0 <= ours.entropy


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rises", [False, True])
def test_a_frozen_head_whose_largest_logits_come_last_or_first(dtype, rises):
    """What has been summed is made relative to a larger logit, and nothing overflows."""
    *inputs, tokens = problem(40, 30000, 16, dtype)
    inputs[2] = torch.linspace(-60, 60, 30000).to(dtype)
    tokens[::2] = 29999  # almost sure
    if not rises:
        inputs[2], tokens = inputs[2].flip(0), 29999 - tokens
    check(inputs, tokens)


def test_several_gradients_at_once_behind_a_frozen_head():
    hidden, weight, _, tokens = problem(4, 30, 8)
    hidden.requires_grad_()
    log_probs = linear_token_log_probs(hidden, weight, tokens).log_probs
    found = torch.autograd.grad(log_probs, hidden, torch.eye(4), is_grads_batched=True)[0]
    for n in range(4):
        (grad,) = torch.autograd.grad(
            linear_token_log_probs(hidden, weight, tokens).log_probs[n], hidden
        )
        torch.testing.assert_close(found[n], grad)


@pytest.mark.parametrize("certainty", [2.0, 8.0, 14.0])
def test_sure_token_keeps_its_gradient(certainty):
    """The true class has gradient 1 - p, -expm1(log p): 1 - exp loses all digits near p = 1."""
    bias = torch.zeros(100)
    bias[3] = certainty
    bias.requires_grad_()
    log_prob = linear_token_log_probs(
        torch.zeros(1, 4), torch.zeros(100, 4), torch.tensor([3]), bias=bias
    ).log_probs
    (grad,) = torch.autograd.grad(log_prob.sum(), bias)
    truth = torch.log_softmax(bias.detach().double(), 0)[3:4]
    torch.testing.assert_close(log_prob.detach().double(), truth, rtol=1e-7, atol=1e-7)
    expected = -torch.expm1(log_prob.detach().double())
    torch.testing.assert_close(grad[3:4].double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [INF, -INF, torch.nan])
def test_what_is_not_finite_stays_in_its_row(dtype, value):
    *inputs, tokens = problem(20, 600, 40, dtype)
    upstream, others = torch.randn(2, 20), torch.arange(20) != 3
    (clean, _), (clean_grad, *_) = results(compiled, inputs, tokens, upstream)
    inputs[0][3, 7] = value
    (broken, _), (grad, *_) = results(compiled, inputs, tokens, upstream)
    assert not broken[3].isfinite()
    assert torch.equal(broken[others], clean[others])
    assert torch.equal(grad[others], clean_grad[others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("extreme", [INF, torch.nan, 3e38, 1e-30])
def test_upstream_gradients_at_the_ends_of_float32(dtype, extreme):
    *inputs, tokens = problem(6, 50, 8, dtype)
    upstream = torch.randn(2, 6)
    upstream[0, 2] = extreme
    found, expected = (results(path, inputs, tokens, upstream)[1] for path in (compiled, reference))
    for got, want in zip(found, expected, strict=True):
        assert torch.equal(got.isfinite(), want.isfinite())
    torch.testing.assert_close(found[0][:2], expected[0][:2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_logits_between_the_largest_bfloat16_and_infinity(dtype):
    """With 2000 classes of about equal probability the target's keeps 0.9995 of the upstream."""
    hidden, weight = torch.ones(1, 1, dtype=dtype), torch.full((2000, 1), 0.25, dtype=dtype)
    weight[0] = 0.125
    most = torch.finfo(torch.float32).max
    out = linear_token_log_probs(hidden.requires_grad_(), weight, torch.zeros(1).long()).log_probs
    (grad,) = torch.autograd.grad(out, hidden, torch.tensor([most]))
    torch.testing.assert_close(grad, torch.full((1, 1), -0.125 * most).to(dtype), rtol=1e-2, atol=0)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    classes=st.sampled_from([1, 2, 33, 4095, 4098]),
    width=st.integers(1, 20),
    shift=st.booleans(),
    keep=st.floats(0, 1),
    softcap=st.sampled_from([None, 2.0]),
    invariant=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_random_ragged_batches_equal_the_reference(
    lengths, classes, width, shift, keep, softcap, invariant, seed
):
    torch.manual_seed(seed)
    count = sum(lengths)
    *inputs, tokens = problem(count, classes, width)
    options = {
        "mask": torch.rand(count) < keep,
        "offsets": torch.tensor([0, *itertools.accumulate(lengths)]),
        "shift": shift,
        "softcap": softcap,
    }
    upstream = torch.randn(2, count)
    mine = results(compiled, inputs, tokens, upstream, batch_invariant=invariant, **options)
    truth = results(reference, inputs, tokens, upstream, torch.float64, **options)
    for got, exact in zip(mine[0] + [*mine[1]], truth[0] + [*truth[1]], strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=2e-5, atol=2e-5)
    upstream[1] = 0
    (exact, _), (of_hidden, *_) = results(
        reference, inputs, tokens, upstream, torch.float64, **options
    )
    log_probs, grad = frozen_head(inputs, tokens, upstream, batch_invariant=invariant, **options)
    torch.testing.assert_close(log_probs.double(), exact, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(grad.double(), of_hidden, rtol=2e-5, atol=2e-5)
