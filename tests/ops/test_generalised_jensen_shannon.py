"""exact_kl and linear_exact_kl of any beta, and the entropy beside them: against float64."""

from __future__ import annotations

import math

import pytest
import torch
from accuracy import no_worse

from fusedrl import exact_kl, linear_exact_kl
from fusedrl.ops.exact_kl import DIRECTIONS, ExactKL

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BETAS = [1e-6, 1e-3, 0.1, 0.5, 0.9, 1 - 1e-3, 1 - 1e-6]
JENSEN_SHANNON = {"direction": "jensen_shannon"}


def kl(log_p, log_q):
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def definition(student, teacher, beta, temperature=1.0):
    """As the paper on generalised knowledge distillation defines it, of teacher and student."""
    log_s, log_t = (torch.log_softmax(x / temperature, -1) for x in (student, teacher))
    if beta == 0:
        return kl(log_t, log_s)
    if beta == 1:
        return kl(log_s, log_t)
    log_m = torch.logaddexp(log_t + math.log(beta), log_s + math.log1p(-beta))
    return beta * kl(log_t, log_m) + (1 - beta) * kl(log_s, log_m)


def entropy_of(logits, temperature=1.0):
    log_p = torch.log_softmax(logits / temperature, -1)
    return -(log_p.exp() * log_p).sum(-1)


def sample(shape, dtype=torch.float32, apart=1.0):
    logits = torch.randn(shape) * 4
    return logits.to(dtype), (logits + torch.randn(shape) * apart).to(dtype)


def gradients(function, leaves, *upstream):
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    given = [x.to(y) for x, y in zip(upstream, outputs, strict=True)]
    return torch.autograd.grad(outputs, leaves, given)


@pytest.mark.parametrize("beta", [0, *BETAS, 1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [1, 33, 4100])
def test_no_worse_than_torch_in_float32(beta, dtype, classes):
    for apart in (6.0, 0.05):
        pair = sample((6, classes), dtype, apart)
        options = {"beta": beta, "temperature": 0.7}
        upstream = torch.randn(6)

        def path(p, q, options=options):
            return definition(p, q, **options)

        def ours(p, q, options=options):
            return exact_kl(p, q, **JENSEN_SHANNON, **options).kl

        floats, doubles = [[x.to(t) for x in pair] for t in (torch.float32, torch.float64)]
        truth = path(*doubles)
        no_worse(ours(*pair), path(*floats), truth, 1e-6 + 2e-7 * truth.max().item())
        mine = gradients(ours, pair, upstream)
        theirs, exact = (gradients(path, x, upstream) for x in (floats, doubles))
        for got, other, want in zip(mine, theirs, exact, strict=True):
            assert got.dtype == dtype
            no_worse(got, other.to(dtype), want, 1e-6)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize(("apart", "digits"), [(3.0, 5e-6), (0.1, 5e-5)])
def test_every_beta_keeps_its_digits(beta, impl, apart, digits):
    """Near 0 and 1 the divergence is small; its error stays small beside it, as its gradients'."""
    p, q = sample((32, 4000), apart=apart)
    truth = definition(p.double(), q.double(), beta)
    got = exact_kl(p, q, **JENSEN_SHANNON, beta=beta, impl=impl).kl
    torch.testing.assert_close(got.double(), truth, rtol=digits, atol=0)
    upstream = torch.rand(32) + 0.5
    mine = gradients(
        lambda p, q: exact_kl(p, q, **JENSEN_SHANNON, beta=beta, impl=impl).kl, (p, q), upstream
    )
    exact = gradients(lambda p, q: definition(p, q, beta), (p.double(), q.double()), upstream)
    for grad, want in zip(mine, exact, strict=True):
        torch.testing.assert_close(
            grad.double(), want, rtol=digits, atol=digits * want.abs().max().item()
        )


@pytest.mark.parametrize(("beta", "direction"), [(0, "forward"), (1.0, "reverse")])
@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_the_ends_are_the_two_kl(beta, direction, impl):
    p, q = sample((6, 500))
    expected = exact_kl(p, q, direction=direction, entropy=True, impl=impl)
    got = exact_kl(p, q, **JENSEN_SHANNON, beta=beta, entropy=True, impl=impl)
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("beta", [1e-30, 1e-3, 0.3, 1 - 1e-15])
@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_sides_and_bounds(beta, impl):
    """Of the two sides swapped it is that of 1 - beta; without a common class the largest."""
    p, q = sample((4, 600))
    options = {**JENSEN_SHANNON, "impl": impl}
    there = exact_kl(p, q, beta=beta, **options).kl
    if beta > 1e-15:
        torch.testing.assert_close(
            exact_kl(q, p, beta=1 - beta, **options).kl, there, rtol=1e-5, atol=0
        )
    assert (there > 0).all()
    p[:, :300], q[:, 300:] = -torch.inf, -torch.inf
    apart = exact_kl(p, q, beta=beta, **options).kl
    most = -(beta * math.log(beta) + (1 - beta) * math.log1p(-beta))
    torch.testing.assert_close(apart, torch.full((4,), most), rtol=1e-5, atol=0)
    for grad in gradients(
        lambda p, q: exact_kl(p, q, beta=beta, **options).kl, (p, q), torch.ones(4)
    ):
        assert grad.isfinite().all()


@pytest.mark.parametrize("beta", [0.1, 0.9])
@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_banned_classes(beta, impl):
    p, q = sample((3, 5000))
    both = torch.rand(3, 5000) < 0.5
    p[both] = q[both] = -torch.inf
    p[1, :3000], q[1, 2500:3500], q[2, :4000] = -torch.inf, -torch.inf, -torch.inf

    def with_zeros(p, q):
        p, q = p.double().softmax(-1), q.double().softmax(-1)
        m = beta * q + (1 - beta) * p
        of_p, of_q = (torch.xlogy(x, x) - torch.xlogy(x, m) for x in (p, q))
        return (beta * of_q + (1 - beta) * of_p).sum(-1)

    got = exact_kl(p, q, **JENSEN_SHANNON, beta=beta, entropy=True, impl=impl)
    torch.testing.assert_close(got.kl.double(), with_zeros(p, q), rtol=1e-5, atol=1e-6)
    of_p = p.double().softmax(-1)
    torch.testing.assert_close(
        got.entropy.double(), -torch.xlogy(of_p, of_p).sum(-1), rtol=1e-6, atol=1e-6
    )
    grads = gradients(
        lambda p, q: exact_kl(p, q, **JENSEN_SHANNON, beta=beta, entropy=True, impl=impl),
        (p, q),
        torch.randn(3),
        torch.randn(3),
    )
    for logits, grad in zip((p, q), grads, strict=True):
        assert grad.isfinite().all()
        assert (grad[logits == -torch.inf] == 0).all()
        assert grad.any(-1).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [1, 33, 4100, 9001])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_entropy_is_the_first_argument_s(dtype, classes, direction):
    pair = sample((6, classes), dtype, 3.0)
    doubles = [x.double() for x in pair]
    options = {"direction": direction, "temperature": 0.7}
    got = exact_kl(*pair, **options, entropy=True)
    assert isinstance(got, ExactKL)
    no_worse(got.entropy, entropy_of(pair[0].float(), 0.7), entropy_of(doubles[0], 0.7), 3e-6)
    assert torch.equal(got.kl, exact_kl(*pair, **options).kl)

    def path(p, q):
        beta = {"reverse": 1, "forward": 0}.get(direction, 0.5)
        return definition(p, q, beta, 0.7), entropy_of(p, 0.7)

    upstream = torch.randn(2, 6).unbind()
    mine = gradients(lambda p, q: exact_kl(p, q, **options, entropy=True), pair, *upstream)
    theirs = gradients(path, [x.float() for x in pair], *upstream)
    exact = gradients(path, doubles, *upstream)
    for grad, other, want in zip(mine, theirs, exact, strict=True):
        no_worse(grad, other.to(dtype), want, 1e-6)


def heads_of(classes, dtype=torch.float32, rows=(9,)):
    heads = (
        (torch.randn(*rows, n), torch.randn(classes, n) / 4, torch.randn(classes)) for n in (16, 24)
    )
    return [x.to(dtype) for head in heads for x in head]


def linear(heads, mask=None, **options):
    hidden, weight, bias, ref_hidden, ref_weight, ref_bias = heads
    return linear_exact_kl(
        hidden, weight, ref_hidden, ref_weight, mask, bias=bias, ref_bias=ref_bias, **options
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("classes", [7, 5000])
@pytest.mark.parametrize("beta", [0, 1e-3, 0.2, 0.999, 1])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_from_hidden_states(dtype, classes, beta, batch_invariant):
    heads = heads_of(classes, dtype)
    mask, upstream = torch.rand(9) < 0.7, torch.randn(2, 9).unbind()

    def path(hidden, weight, bias, ref_hidden, ref_weight, ref_bias):
        logits = 3 * torch.tanh((hidden @ weight.T + bias) * 1.5 / 3)
        ref_logits = ref_hidden @ ref_weight.T + ref_bias
        return tuple(
            x * mask for x in (definition(logits, ref_logits, beta, 0.7), entropy_of(logits, 0.7))
        )

    def ours(*heads):
        options = {"beta": beta, "entropy": True, "softcap": 3.0, "scale": 1.5}
        return linear(
            heads,
            mask,
            **JENSEN_SHANNON,
            **options,
            temperature=0.7,
            batch_invariant=batch_invariant,
        )

    floats, doubles = [[x.to(t) for x in heads] for t in (torch.float32, torch.float64)]
    for got, other, want in zip(ours(*heads), path(*floats), path(*doubles), strict=True):
        no_worse(got, other, want, 2e-6 + 1e-6 * want.max().item())
    mine = gradients(ours, heads, *upstream)
    theirs, exact = (gradients(path, x, *upstream) for x in (floats, doubles))
    for got, other, want in zip(mine, theirs, exact, strict=True):
        assert got.dtype == dtype
        no_worse(got, other.to(dtype), want, 2e-6 + 1e-6 * want.abs().max().item())
