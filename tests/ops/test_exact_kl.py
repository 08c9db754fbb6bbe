"""exact_kl: against float64, torch in float32, and its own contract."""

from __future__ import annotations

import math

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


def torch_path(logits, ref_logits, direction, temperature=1.0):
    """What users write: two log_softmax and a sum."""
    log_p, log_q = (torch.log_softmax(x / temperature, -1) for x in (logits, ref_logits))
    if direction == "forward":
        log_p, log_q = log_q, log_p
    p, q = log_p.exp(), log_q.exp()
    if direction != "jensen_shannon":
        return (p * (log_p - log_q)).sum(-1)
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    return (p * (log_p - log_m) + q * (log_q - log_m)).sum(-1) / 2


def with_zeros(logits, ref_logits, direction):
    """The same in float64, where probabilities may be 0."""
    p, q = (torch.softmax(x.double(), -1) for x in (logits, ref_logits))

    def kl(p, q):
        return (torch.xlogy(p, p) - torch.xlogy(p, q)).sum(-1)

    if direction == "jensen_shannon":
        return (kl(p, (p + q) / 2) + kl(q, (p + q) / 2)) / 2
    return kl(p, q) if direction == "reverse" else kl(q, p)


def sample(shape, dtype=torch.float32, apart=1.0):
    logits = torch.randn(shape) * 4
    return logits.to(dtype), (logits + torch.randn(shape) * apart).to(dtype)


def gradients(function, logits, ref_logits, upstream):
    leaves = [x.detach().clone().requires_grad_() for x in (logits, ref_logits)]
    out = function(*leaves)
    return torch.autograd.grad(out, leaves, upstream.to(out))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 25.0])
def test_no_worse_than_torch_in_float32(dtype, classes, direction, temperature):
    for apart in (6.0, 0.05):
        p, q = sample((9, classes), dtype, apart)
        ours = exact_kl(p, q, direction=direction, temperature=temperature).kl
        assert ours.dtype == torch.float32
        theirs = torch_path(p.float(), q.float(), direction, temperature)
        truth = torch_path(p.double(), q.double(), direction, temperature)
        no_worse(ours, theirs, truth, 1e-6 + 2e-7 * truth.max().item())


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
    truth = with_zeros(p, q, direction)
    truth[6] = with_zeros(p[6].masked_fill(p[6] == -150, -INF), q[6], direction)
    if direction == "forward":
        truth[6] = with_zeros(p[6], q[6], direction)
    assert truth[:7].isnan().sum() == 0
    no_worse(ours, truth.float(), truth, 2e-6)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_gradient_of_a_banned_class_is_zero(direction, impl):
    p, q = sample((3, 5000))
    both = torch.rand(3, 5000) < 0.5
    p[both] = q[both] = -INF
    p[1, :3000] = -INF  # has no mass of its own where the reference does
    if direction == "forward":
        p, q = q, p
    upstream = torch.randn(3)
    grads = gradients(
        lambda p, q: exact_kl(p, q, direction=direction, impl=impl).kl, p, q, upstream
    )
    for logits, grad in zip((p, q), grads, strict=True):
        assert grad.isfinite().all()
        assert (grad[logits == -INF] == 0).all()
        assert grad.any(-1).all()


@pytest.mark.parametrize("offset", [-1e4, 1e4, -3e37, 3e37])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_rows_far_from_zero(offset, direction):
    p, q = sample((4, 6000))
    p, q = p + offset, q - offset
    truth = torch_path(p.double(), q.double(), direction)
    no_worse(exact_kl(p, q, direction=direction).kl, torch_path(p, q, direction), truth, 2e-6)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_later_chunk_that_dwarfs_the_first(direction):
    """Relative to the first chunk's maxima these overflow; the chunk must start over."""
    p, q = sample((5, 20000))
    p[0, 9000] = q[1, 9000] = 300.0
    p[2, 5000:] += 70.0
    q[3, 5000:] -= 300.0
    p[4, 5000:] -= 300.0
    q[4, 9000:] += 200.0
    truth = torch_path(p.double(), q.double(), direction)
    theirs = torch_path(p, q, direction)
    no_worse(exact_kl(p, q, direction=direction).kl, theirs, truth, 2e-6)
    upstream = torch.randn(5)
    mine = gradients(lambda p, q: exact_kl(p, q, direction=direction).kl, p, q, upstream)
    path = gradients(lambda p, q: torch_path(p, q, direction), p, q, upstream)
    exact = gradients(lambda p, q: torch_path(p, q, direction), p.double(), q.double(), upstream)
    for got, other, want in zip(mine, path, exact, strict=True):
        no_worse(got, other, want, 2e-6)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("at", [600, 19999])
@pytest.mark.parametrize("peak", [8.0, 20.0, 42.0])
def test_peaks_late_in_their_rows(direction, at, peak):
    """What came before may be 2^60 times less likely than one class, and than two alike."""
    p, q = sample((4, 20000))
    p[0, at] = q[0, at] = p[1, at] = q[2, at] = p[3, at] = q[3, at] = peak
    p[3, 9000], q[3, 9000] = peak - 0.5, peak + 0.5
    truth, theirs = (torch_path(x, y, direction) for x, y in ((p.double(), q.double()), (p, q)))
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
