"""What torch asks of a custom op: a schema that tells the truth, shapes without data, one graph."""

from __future__ import annotations

import itertools

import pytest
import torch

from fusedrl import (
    exact_kl,
    linear_exact_kl,
    linear_token_log_probs,
    token_kl,
    token_log_probs,
)

SAMPLES = {
    "packed": ((9, 20), torch.tensor([0, 3, 3, 9])),
    "padded": ((3, 3, 20), None),
}


def log_prob_args(kind, dtype, shift, entropy):
    shape, offsets = SAMPLES[kind]
    logits, tokens = torch.randn(shape).to(dtype), torch.randint(0, 20, shape[:-1])
    mask = torch.rand(shape[:-1]) < 0.7
    return logits, tokens, mask, offsets, shift, torch.tensor(0.9, dtype=torch.float64), entropy


def with_options():
    """Every shift and option in float32; in halves those that do most, and the others if slow."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for dtype, shift, option in itertools.product(dtypes, (False, True), (False, True)):
        quick = dtype == torch.float32 or (shift and option)
        yield pytest.param(dtype, shift, option, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize(("dtype", "shift", "entropy"), with_options())
def test_opcheck_token_log_probs(kind, dtype, shift, entropy):
    args = log_prob_args(kind, dtype, shift, entropy)
    torch.library.opcheck(torch.ops.fusedrl.token_log_probs.default, args)
    log_probs, row_entropy, normalizers = torch.ops.fusedrl.token_log_probs(*args)
    logits, tokens, mask, offsets, _, temperature, _ = args
    grads = (torch.randn_like(log_probs), torch.randn_like(log_probs) if entropy else None)
    torch.library.opcheck(
        torch.ops.fusedrl.token_log_probs_backward.default,
        (
            *grads,
            logits,
            tokens,
            mask,
            offsets,
            shift,
            temperature,
            log_probs,
            row_entropy,
            normalizers,
        ),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("has_reward", [False, True])
def test_opcheck_token_kl(dtype, has_reward):
    p, q, r = torch.randn(3, 9).to(dtype).unbind()
    mask, coeff = torch.rand(9) < 0.7, torch.tensor(0.1, dtype=torch.float64)
    args = (p, q, mask, r if has_reward else None, coeff, 2, True)
    torch.library.opcheck(torch.ops.fusedrl.token_kl.default, args)
    grads = (torch.randn_like(p), torch.randn_like(p) if has_reward else None)
    torch.library.opcheck(
        torch.ops.fusedrl.token_kl_backward.default, (*grads, p, q, mask, coeff, 2, True)
    )


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize(("dtype", "shift", "entropies"), with_options())
def test_opcheck_exact_kl(kind, dtype, shift, entropies):
    logits, _, *options, _ = log_prob_args(kind, dtype, shift, False)
    args = (logits, torch.randn_like(logits), *options, 0.3 if shift else 1.0)
    torch.library.opcheck(torch.ops.fusedrl.exact_kl.default, (*args, entropies))
    kl, *saved = torch.ops.fusedrl.exact_kl(*args, entropies)
    upstream = torch.randn_like(kl), torch.randn_like(saved[0]) if entropies else None
    for wants in ((True, True), (True, False), (False, True)):
        torch.library.opcheck(
            torch.ops.fusedrl.exact_kl_backward.default, (*upstream, *args, *saved, *wants)
        )


def linear_args(kind, dtype, shift):
    """The head, and the rest of a batch whose logits it makes."""
    shape, offsets = SAMPLES[kind]
    hidden, weight = torch.randn(*shape[:-1], 6).to(dtype), torch.randn(20, 6).to(dtype)
    mask, temperature = torch.rand(shape[:-1]) < 0.7, torch.tensor(0.9, dtype=torch.float64)
    tokens = torch.randint(0, 20, shape[:-1])
    return (hidden, weight), torch.randn(20).to(dtype), tokens, mask, offsets, shift, temperature


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("full", [False, True])
def test_opcheck_linear_token_log_probs(kind, dtype, full):
    """Without any option, and as a shard with a bias, a softcap, an entropy and fixed blocks."""
    head, bias, *batch = linear_args(kind, dtype, shift=full)
    batch = (*head, bias if full else None, *batch, *((1.5, 4.0) if full else (1.0, 0.0)))
    ops, temperature, options = torch.ops.fusedrl, batch[7], (7 if full else None, full)
    for stored_bytes in (0, 1 << 20):
        arguments = (*batch, full, *options, stored_bytes)
        torch.library.opcheck(ops.linear_token_log_probs.default, arguments)
    shards = [ops.linear_token_log_probs(*batch, full, first, False, 0)[0] for first in (0, 7)]
    _, *stored = ops.linear_token_log_probs(*batch, full, None, False, 1 << 20)
    arguments = (torch.stack(shards), temperature, full)
    torch.library.opcheck(ops.linear_token_log_probs_finish.default, arguments)
    results = ops.linear_token_log_probs_finish(*arguments)
    upstream = torch.randn_like(results[0]), torch.randn_like(results[0]) if full else None
    for wanted in ((True, True, full), (True, False, False), (False, False, full)):
        torch.library.opcheck(
            ops.linear_token_log_probs_backward.default,
            (*upstream, *batch, *results, *stored, *options, *wanted),
        )


def head_pair(rows, dtype=torch.float32):
    """The policy's hidden states, weight and bias, and those of a wider reference."""
    heads = ((torch.randn(*rows, n), torch.randn(20, n), torch.randn(20)) for n in (5, 9))
    return [x.to(dtype) for head in heads for x in head]


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_opcheck_linear_exact_kl(kind, dtype, batch_invariant):
    """A mixture with entropies, and the KL without, in blocks of a fixed size."""
    logits, _, *rows, _ = log_prob_args(kind, torch.float32, True, False)
    hidden, weight, bias, *ref_head = head_pair(logits.shape[:-1], dtype)
    beta, entropies = (1.0, False) if batch_invariant else (0.3, True)
    args = (hidden, weight, bias, 1.5, 3.0, *ref_head, 1.0, 0.0, *rows, beta)
    for stored_bytes in (0, 1 << 20):
        options = (entropies, batch_invariant, stored_bytes)
        torch.library.opcheck(torch.ops.fusedrl.linear_exact_kl.default, (*args, *options))
    kl, *saved = torch.ops.fusedrl.linear_exact_kl(*args, *options)
    upstream = torch.randn_like(kl), torch.randn_like(saved[0]) if entropies else None
    for wants in ((True,) * 6, (True,) * 3 + (False,) * 3, (False, True, False) * 2):
        torch.library.opcheck(
            torch.ops.fusedrl.linear_exact_kl_backward.default,
            (*upstream, *args, batch_invariant, *saved, *wants),
        )


@pytest.fixture
def graphs():
    """Counts the graphs that torch.compile makes."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    yield CompileCounter()
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", SAMPLES)
def test_one_graph_over_twenty_temperatures(graphs, kind):
    logits, tokens, mask, offsets, *_ = log_prob_args(kind, torch.float32, True, True)
    logits.requires_grad_()

    def loss(logits, temperature):
        out = token_log_probs(
            logits, tokens, mask, offsets=offsets, shift=True, temperature=temperature, entropy=True
        )
        return (out.log_probs + out.entropy).sum()

    compiled = torch.compile(loss, backend=graphs, fullgraph=True)
    for temperature in torch.linspace(0.5, 2.0, 20).unbind():
        expected = loss(logits, float(temperature))
        torch.testing.assert_close(compiled(logits, temperature), expected)
    assert graphs.frame_count == 1


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize("autocast", [False, True])
def test_one_graph_over_twenty_temperatures_of_a_head(graphs, kind, autocast):
    (hidden, weight), bias, tokens, mask, offsets, *_ = linear_args(kind, torch.float32, True)
    weight.requires_grad_()

    def loss(hidden, temperature):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = linear_token_log_probs(
                *(hidden, weight, tokens, mask),
                bias=bias,
                softcap=3.0,
                offsets=offsets,
                shift=True,
                temperature=temperature,
                entropy=True,
            )
        return (out.log_probs + out.entropy).sum()

    compiled = torch.compile(loss, backend=graphs, fullgraph=True)
    for temperature in torch.linspace(0.5, 2.0, 20).unbind():
        expected = loss(hidden, float(temperature))
        torch.testing.assert_close(compiled(hidden, temperature), expected)
    assert graphs.frame_count == 1


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize("direction", ["reverse", "forward", "jensen_shannon"])
def test_one_graph_over_twenty_temperatures_of_exact_kl(graphs, kind, direction):
    logits, _, mask, offsets, *_ = log_prob_args(kind, torch.float32, True, False)
    ref_logits = torch.randn_like(logits)
    logits.requires_grad_()

    def loss(logits, temperature):
        return exact_kl(
            logits,
            ref_logits,
            mask,
            direction=direction,
            offsets=offsets,
            shift=True,
            temperature=temperature,
        ).kl.sum()

    compiled = torch.compile(loss, backend=graphs, fullgraph=True)
    for temperature in torch.linspace(0.5, 2.0, 20).unbind():
        expected = loss(logits, float(temperature))
        torch.testing.assert_close(compiled(logits, temperature), expected)
    assert graphs.frame_count == 1


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize("direction", ["reverse", "forward", "jensen_shannon"])
def test_one_graph_over_twenty_temperatures_of_linear_exact_kl(graphs, kind, direction):
    logits, _, mask, offsets, *_ = log_prob_args(kind, torch.float32, True, False)
    hidden, weight, bias, ref_hidden, ref_weight, _ = head_pair(logits.shape[:-1])
    hidden.requires_grad_()

    def loss(hidden, temperature):
        return linear_exact_kl(
            hidden,
            weight,
            ref_hidden,
            ref_weight,
            mask,
            bias=bias,
            ref_softcap=4.0,
            direction=direction,
            offsets=offsets,
            shift=True,
            temperature=temperature,
        ).kl.sum()

    compiled = torch.compile(loss, backend=graphs, fullgraph=True)
    for temperature in torch.linspace(0.5, 2.0, 20).unbind():
        expected = loss(hidden, float(temperature))
        torch.testing.assert_close(compiled(hidden, temperature), expected)
    assert graphs.frame_count == 1


def test_one_graph_over_twenty_coefficients(graphs):
    p, q, reward = torch.randn(3, 9).unbind()
    offsets = torch.tensor([0, 3, 3, 9])

    def penalised(p, coeff):
        return token_kl(p, q, offsets=offsets, reward=reward, coeff=coeff, estimator="k3").reward

    compiled = torch.compile(penalised, backend=graphs, fullgraph=True)
    for coeff in torch.linspace(0.0, 1.0, 20).unbind():
        torch.testing.assert_close(compiled(p, coeff), penalised(p, float(coeff)))
    assert graphs.frame_count == 1


def test_twenty_lengths_make_at_most_two_graphs(graphs):
    """One for the first length, one with the length as a symbol."""

    def loss(logits, tokens):
        return token_log_probs(logits, tokens, shift=True).log_probs.sum()

    compiled = torch.compile(loss, backend=graphs, fullgraph=True)
    for length in range(5, 25):
        logits, tokens = torch.randn(2, length, 20), torch.randint(0, 20, (2, length))
        torch.testing.assert_close(compiled(logits, tokens), loss(logits, tokens))
    assert graphs.frame_count <= 2


def test_twenty_lengths_of_hidden_states_make_at_most_two_graphs(graphs):
    weight = torch.randn(20, 6, requires_grad=True)

    def loss(hidden, tokens):
        return linear_token_log_probs(hidden, weight, tokens, shift=True).log_probs.sum()

    compiled = torch.compile(loss, backend=graphs, fullgraph=True)
    for length in range(5, 25):
        hidden, tokens = torch.randn(2, length, 6), torch.randint(0, 20, (2, length))
        torch.testing.assert_close(compiled(hidden, tokens), loss(hidden, tokens))
    assert graphs.frame_count <= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_of_a_head_through_aot_autograd(dtype):
    torch._dynamo.reset()
    head, bias, tokens, mask, offsets, *_ = linear_args("packed", dtype, True)

    def loss(hidden, weight, bias):
        out = linear_token_log_probs(
            *(hidden * 2, weight, tokens, mask),
            bias=bias,
            offsets=offsets,
            shift=True,
            entropy=True,
        )
        n = torch.arange(9.0)
        return (out.log_probs * n - out.entropy * n.sin()).sum()

    grads = []
    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        leaves = [x.clone().requires_grad_() for x in (*head, bias)]
        grads.append(torch.autograd.grad(function(*leaves), leaves))
    for mine, compiled in zip(*grads, strict=True):
        assert mine.any()
        torch.testing.assert_close(mine, compiled)


def test_backward_through_inductor():
    torch._dynamo.reset()
    logits, tokens, mask, offsets, *_ = log_prob_args("packed", torch.float32, True, True)
    q, reward, ref_logits = torch.randn(9), torch.randn(3), torch.randn_like(logits)

    def loss(logits):
        out = token_log_probs(logits * 2, tokens, mask, offsets=offsets, shift=True, entropy=True)
        kl = token_kl(out.log_probs, q, mask, offsets=offsets, reward=reward, coeff=0.1)
        exact = exact_kl(logits, ref_logits - logits, mask, offsets=offsets, shift=True).kl
        both = exact_kl(
            *(logits, ref_logits - logits, mask),
            direction="jensen_shannon",
            beta=0.2,
            entropy=True,
            offsets=offsets,
        )
        return kl.reward.sum() + out.entropy.sum() + exact.sum() + (both.kl - both.entropy).sum()

    grads = []
    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        x = logits.clone().requires_grad_()
        function(x).backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("frozen", [(), (3, 4, 5), (1, 4)], ids=str)
def test_backward_of_linear_exact_kl_through_aot(frozen):
    torch._dynamo.reset()
    heads = head_pair((9,))
    mask, offsets = torch.rand(9) < 0.7, torch.tensor([0, 3, 3, 9])

    def loss(hidden, weight, bias, ref_hidden, ref_weight, ref_bias):
        kl = linear_exact_kl(
            hidden * 2,
            weight,
            ref_hidden - hidden.sum(-1, True),
            ref_weight,
            mask,
            bias=bias,
            ref_bias=ref_bias,
            softcap=3.0,
            offsets=offsets,
            shift=True,
            direction="forward",
            entropy=True,
        )
        return ((kl.kl + 0.1 * kl.entropy) * torch.arange(9)).sum()

    grads = []
    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        leaves = [x.clone().requires_grad_(i not in frozen) for i, x in enumerate(heads)]
        function(*leaves).backward()
        grads.append([x.grad for x in leaves if x.requires_grad])
    torch.testing.assert_close(*grads)
