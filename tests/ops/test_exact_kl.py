"""exact_kl of any direction and beta, and the entropy beside it: against float64 and torch."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from accuracy import no_worse
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedrl import exact_kl
from fusedrl.ops.exact_kl import DIRECTIONS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Around vector blocks and chunks, and vocabularies that are no multiple of either.
CLASSES = [1, 2, 7, 31, 32, 33, 129, 511, 513, 2560, 4097, 32000]
INF = float("inf")
BETAS = [1e-6, 1e-3, 0.1, 0.5, 0.9, 1 - 1e-3, 1 - 1e-6]
BETA = {"forward": 0, "jensen_shannon": 0.5, "reverse": 1}
JENSEN_SHANNON = {"direction": "jensen_shannon"}


def kl(log_p, log_q):
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def definition(student, teacher, beta, temperature=1.0):
    """As the paper on generalised knowledge distillation defines it, of teacher and student."""
    log_s, log_t = (torch.log_softmax(x / temperature, -1) for x in (student, teacher))
    if beta in (0, 1):
        return kl(log_s, log_t) if beta else kl(log_t, log_s)
    log_m = torch.logaddexp(log_t + math.log(beta), log_s + math.log1p(-beta))
    return beta * kl(log_t, log_m) + (1 - beta) * kl(log_s, log_m)


def with_zeros(logits, ref_logits, beta):
    """The same in float64, where probabilities may be 0."""
    p, q = (torch.softmax(x.double(), -1) for x in (logits, ref_logits))

    def kl(p, q):
        return (torch.xlogy(p, p) - torch.xlogy(p, q)).sum(-1)

    if beta in (0, 1):
        return kl(p, q) if beta else kl(q, p)
    middle = beta * q + (1 - beta) * p
    return beta * kl(q, middle) + (1 - beta) * kl(p, middle)


def entropy_of(logits, temperature=1.0):
    log_p = torch.log_softmax(logits / temperature, -1)
    return -(log_p.exp() * log_p).sum(-1)


def sample(shape, dtype=torch.float32, apart=1.0):
    logits = torch.randn(shape) * 4
    return logits.to(dtype), (logits + torch.randn(shape) * apart).to(dtype)


def gradients(function, logits, ref_logits, *upstream):
    leaves = [x.detach().clone().requires_grad_() for x in (logits, ref_logits)]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    given = [x.to(y) for x, y in zip(upstream, outputs, strict=True)]
    return torch.autograd.grad(outputs, leaves, given)


def compare(p, q, beta, temperature=1.0, entropy=False, tol=1e-6):
    """Values and gradients beside torch in float32 and the truth in float64."""
    options = {**JENSEN_SHANNON, "beta": beta, "temperature": temperature}
    upstream = torch.randn(2, len(p)).unbind()[: 1 + entropy]

    def path(p, q):
        return (definition(p, q, beta, temperature), entropy_of(p, temperature))[: 1 + entropy]

    def ours(p, q):
        return tuple(exact_kl(p, q, entropy=entropy, **options))[: 1 + entropy]

    floats, doubles = ([x.to(t) for x in (p, q)] for t in (torch.float32, torch.float64))
    for got, other, want in zip(ours(p, q), path(*floats), path(*doubles), strict=True):
        assert got.dtype == torch.float32
        no_worse(got, other, want, tol + 2e-7 * want.max().item())
    assert torch.equal(ours(p, q)[0], exact_kl(p, q, **options).kl)
    mine = gradients(ours, p, q, *upstream)
    theirs, exact = (gradients(path, *x, *upstream) for x in (floats, doubles))
    for got, other, want in zip(mine, theirs, exact, strict=True):
        assert got.dtype == p.dtype
        no_worse(got, other.to(p.dtype), want, 2 * tol)  # times upstream, over the temperature


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("beta", [0, *BETAS, 1])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 25.0])
@pytest.mark.parametrize("entropy", [False, True])
def test_no_worse_than_torch_in_float32(dtype, classes, beta, temperature, entropy):
    for apart in (6.0, 0.05):
        compare(*sample((9, classes), dtype, apart), beta, temperature, entropy)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize(("apart", "digits"), [(3.0, 5e-6), (0.1, 5e-5)])
def test_every_beta_keeps_its_digits(beta, impl, apart, digits):
    """Near 0 and 1 the divergence is small; its error stays small beside it, as its gradients'."""
    p, q = sample((32, 4000), apart=apart)
    upstream = torch.rand(32) + 0.5

    def ours(p, q):
        return exact_kl(p, q, **JENSEN_SHANNON, beta=beta, impl=impl).kl

    def exact(p, q):
        return definition(p.double(), q.double(), beta)

    torch.testing.assert_close(ours(p, q).double(), exact(p, q), rtol=digits, atol=0)
    mine, truth = (gradients(path, p, q, upstream) for path in (ours, exact))
    for grad, want in zip(mine, truth, strict=True):
        atol = digits * want.abs().max().item()
        torch.testing.assert_close(grad, want, rtol=digits, atol=atol)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_every_direction_is_a_beta(direction, impl):
    p, q = sample((6, 500))
    expected = exact_kl(p, q, direction=direction, entropy=True, impl=impl)
    got = exact_kl(p, q, **JENSEN_SHANNON, beta=BETA[direction], entropy=True, impl=impl)
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("beta", [1e-30, 1e-3, 0.3, 1 - 1e-15])
@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_sides_and_bounds(beta, impl):
    """Of the two sides swapped it is that of 1 - beta; without a common class the largest."""
    p, q = sample((4, 600))

    def ours(p, q, beta=beta):
        return exact_kl(p, q, **JENSEN_SHANNON, beta=beta, impl=impl).kl

    there = ours(p, q)
    assert (there > 0).all()
    if beta > 1e-15:
        torch.testing.assert_close(ours(q, p, 1 - beta), there, rtol=1e-5, atol=0)
    p[:, :300], q[:, 300:] = -INF, -INF
    most = -(beta * math.log(beta) + (1 - beta) * math.log1p(-beta))
    torch.testing.assert_close(ours(p, q), torch.full((4,), most), rtol=1e-5, atol=0)
    assert all(grad.isfinite().all() for grad in gradients(ours, p, q, torch.ones(4)))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_nearly_equal_rows_are_never_negative(direction):
    logits = torch.randn(64, 5000) * 5
    nearly = logits * (1 + 1e-6) + 3.0
    divergence = exact_kl(logits, nearly, direction=direction).kl
    assert ((divergence >= 0) & (divergence < 1e-6)).all()


@pytest.mark.parametrize("classes", [10, 700, 9000])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_infinite_logits(classes, direction, dtype):
    """Banned classes in either row or both, rows of -inf, +inf and NaN."""
    p, q = sample((12, classes), dtype)
    part = classes - classes // 5
    p[0, :part] = -INF  # whole chunks
    q[1, :part] = -INF
    p[2, :part] = q[2, :part] = -INF
    p[3, : classes // 2], q[3, classes // 3 :] = -INF, -INF
    p[4], p[4, -1] = torch.tensor(-INF), 1.0  # one class is left
    q[5], q[5, -1] = torch.tensor(-INF), 1.0
    q[6, 1], p[6, 1] = -INF, -150.0  # banned where the other has next to nothing
    p[7], q[8] = -INF, -INF
    p[9, 2], q[10, classes - 1] = INF, INF
    p[11, classes - 1] = float("nan")
    ours = exact_kl(p, q, direction=direction).kl
    truth = with_zeros(p, q, BETA[direction])
    if direction != "forward":
        truth[6] = with_zeros(p[6].masked_fill(p[6] == -150, -INF), q[6], BETA[direction])
    assert truth[:7].isnan().sum() == 0
    no_worse(ours, truth.float(), truth, 2e-6)


@pytest.mark.parametrize("beta", [0, 0.1, 0.5, 0.9, 1])
@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_banned_classes(beta, impl):
    """Of both rows, and of one, which the other must have too where the divergence is a KL."""
    p, q = sample((3, 5000))
    both = torch.rand(3, 5000) < 0.5
    p[both] = q[both] = -INF
    p[1, :3000] = -INF
    if 0 < beta < 1:
        q[1, 2500:3500], q[2, :4000] = -INF, -INF
    p, q = (p, q) if beta else (q, p)

    def ours(p, q):
        return exact_kl(p, q, **JENSEN_SHANNON, beta=beta, entropy=True, impl=impl)

    got, of_p = ours(p, q), p.double().softmax(-1)
    torch.testing.assert_close(got.kl.double(), with_zeros(p, q, beta), rtol=1e-5, atol=1e-6)
    entropy = -torch.xlogy(of_p, of_p).sum(-1)
    torch.testing.assert_close(got.entropy.double(), entropy, rtol=1e-6, atol=1e-6)
    for logits, grad in zip((p, q), gradients(ours, p, q, *torch.randn(2, 3)), strict=True):
        assert grad.isfinite().all()
        assert (grad[logits == -INF] == 0).all()
        assert grad.any(-1).all()


@pytest.mark.parametrize("offset", [-1e4, 1e4, -3e37, 3e37])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_rows_far_from_zero(offset, direction):
    p, q = sample((4, 6000))
    compare(p + offset, q - offset, BETA[direction], tol=2e-6)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_later_chunk_that_dwarfs_the_first(direction):
    """Relative to the first chunk's maxima these overflow; the chunk must start over."""
    p, q = sample((5, 20000))
    p[0, 9000] = q[1, 9000] = 300.0
    p[2, 5000:] += 70.0
    q[3, 5000:] -= 300.0
    p[4, 5000:] -= 300.0
    q[4, 9000:] += 200.0
    compare(p, q, BETA[direction], tol=2e-6)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("at", [600, 19999])
@pytest.mark.parametrize("peak", [8.0, 20.0, 42.0])
def test_peaks_late_in_their_rows(direction, at, peak):
    """What came before may be 2^60 times less likely than one class, and than two alike."""
    p, q = sample((4, 20000))
    p[0, at] = q[0, at] = p[1, at] = q[2, at] = p[3, at] = q[3, at] = peak
    p[3, 9000], q[3, 9000] = peak - 0.5, peak + 0.5
    truth, theirs = (definition(p.to(t), q.to(t), BETA[direction]) for t in (torch.double, p.dtype))
    ours = exact_kl(p, q, direction=direction, entropy=True)
    entropies = [torch.distributions.Categorical(logits=x).entropy() for x in (p, p.double())]
    for row in range(len(p)):
        no_worse(ours.kl[row], theirs[row], truth[row], 3e-7)
        no_worse(ours.entropy[row], *(x[row] for x in entropies), 3e-7)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("scale", "temperature"), [(30.0, 0.01), (1e4, 1e-3)])
def test_large_scaled_logits(direction, scale, temperature):
    """One number for a normalizer would leave no digits for the softmax of such logits."""
    p = (torch.rand(4, 6000) * 2 - 1) * scale
    p[:, 5] = p.max(-1).values - temperature  # a rival, or all gradients would be 0
    q = p + torch.randn(4, 6000) * temperature
    upstream = torch.randn(4) * temperature

    def path(p, q):
        return exact_kl(p, q, direction=direction, temperature=temperature).kl

    # What the logits' own rounding leaves of them.
    digits = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(path(p, q).double(), path(p.double(), q.double()), **digits)
    mine, exact = (gradients(path, p.to(t), q.to(t), upstream) for t in (p.dtype, torch.float64))
    for got, want in zip(mine, exact, strict=True):
        torch.testing.assert_close(got.double(), want, **digits)


def padded(call, p, q):
    return call(p, q)


def packed(call, p, q):
    kl, entropy = call(p.flatten(0, 1), q.flatten(0, 1))
    return kl.view(2, 3), entropy.view(2, 3)


def jagged(call, p, q):
    offsets = torch.tensor([0, 3, 6])
    rows = (torch.nested.nested_tensor_from_jagged(x.flatten(0, 1), offsets) for x in (p, q))
    kl, entropy = call(*rows)
    return kl.values().view(2, 3), entropy.values().view(2, 3)


def compiled(call, p, q):
    torch._dynamo.reset()
    return torch.compile(call, backend="aot_eager", fullgraph=True)(p, q)


@pytest.mark.parametrize("form", [padded, packed, jagged, compiled])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_first_classes_of_two_widths(form, dtype, direction):
    """What is beyond them is not read, and gets gradient 0."""
    p, q = sample((2, 3, 700), dtype)
    rows = torch.nn.functional.pad(p, (0, 4), value=INF), torch.nn.functional.pad(q, (0, 30))

    def ours(p, q):
        return form(partial(exact_kl, direction=direction, entropy=True, classes=700), p, q)

    def exact(p, q):
        p, q = p[..., :700].double(), q[..., :700].double()
        return definition(p, q, BETA[direction]), entropy_of(p)

    with pytest.raises(ValueError, match=r"ref_logits: .* got 730; pass classes="):
        exact_kl(*rows)
    torch.testing.assert_close(ours(*rows), exact(*rows), rtol=1e-5, atol=1e-5, check_dtype=False)
    found, truth = (gradients(path, *rows, *torch.ones(2, 2, 3)) for path in (ours, exact))
    for got, want in zip(found, truth, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert not got[..., 700:].any()


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    classes=st.integers(1, 70),
    direction=st.sampled_from(DIRECTIONS),
    shift=st.booleans(),
    keep=st.floats(0, 1),
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from(DTYPES),
)
def test_random_ragged_batches_equal_the_reference(
    lengths, classes, direction, shift, keep, seed, dtype
):
    generator = torch.Generator().manual_seed(seed)
    count = sum(lengths)
    p, q = (torch.randn(2, count, classes, generator=generator) * 5).to(dtype).unbind()
    mask = torch.rand(count, generator=generator) < keep
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    upstream = torch.randn(count, generator=generator)
    options = {"direction": direction, "offsets": offsets, "shift": shift}

    def path(p, q):
        impl = "reference" if p.dtype == torch.float64 else "cpu"
        return exact_kl(p, q, mask, impl=impl, **options).kl

    mine, exact = path(p, q), path(p.double(), q.double())
    torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=5e-6)
    rounding = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-5}
    for got, want in zip(
        gradients(path, p, q, upstream),
        gradients(path, p.double(), q.double(), upstream),
        strict=True,
    ):
        torch.testing.assert_close(got.double(), want, **rounding)
