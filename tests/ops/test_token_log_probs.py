"""token_log_probs: against float64, torch in the same dtype, and its own contract."""

from __future__ import annotations

import pytest
import torch
from accuracy import no_worse
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedrl import TokenLogProbs, token_log_probs

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Around vector blocks and chunks, and vocabularies that are no multiple of either.
CLASSES = [1, 2, 7, 16, 31, 32, 33, 100, 4095, 4096, 4097, 10007]


def torch_path(logits, tokens, temperature=1.0):
    """What users write: log_softmax in the logits' dtype, then gather."""
    log_softmax = torch.log_softmax(logits / temperature, -1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return log_softmax.gather(-1, tokens[..., None]).squeeze(-1), entropy


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 25.0])
def test_no_worse_than_torch_in_the_same_dtype(dtype, classes, temperature):
    logits = (torch.randn(9, classes) * 6).to(dtype)
    tokens = torch.randint(0, classes, (9,))
    ours = token_log_probs(logits, tokens, temperature=temperature, entropy=True)
    theirs = torch_path(logits, tokens, temperature)
    truth = torch_path(logits.double(), tokens, temperature)
    assert ours.log_probs.dtype == ours.entropy.dtype == torch.float32
    for mine, other, exact in zip(ours, theirs, truth, strict=True):
        no_worse(mine, other, exact, 3e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [1, 17, 4100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradient_no_worse_than_torch_in_the_same_dtype(dtype, classes, temperature):
    base = (torch.randn(6, classes) * 3).to(dtype)
    tokens = torch.randint(0, classes, (6,))
    upstream, of_entropy = torch.randn(6), torch.randn(6)

    def gradient(logits, path):
        logits = logits.clone().requires_grad_()
        log_probs, entropy = path(logits, tokens, temperature)
        loss = (log_probs * upstream.to(log_probs)).sum() + (entropy * of_entropy.to(entropy)).sum()
        loss.backward()
        return logits.grad

    def ours(logits, tokens, temperature):
        return token_log_probs(logits, tokens, temperature=temperature, entropy=True)

    grad = gradient(base, ours)
    assert grad.dtype == dtype
    no_worse(grad, gradient(base, torch_path), gradient(base.double(), torch_path), 3e-6)


def test_packed_shift_never_scores_a_first_token_from_its_neighbour():
    lengths = [3, 0, 1, 5]
    logits, tokens = torch.randn(9, 20), torch.randint(0, 20, (9,))
    offsets = torch.tensor([0, 3, 3, 4, 9])
    packed = token_log_probs(logits, tokens, offsets=offsets, shift=True).log_probs
    start = 0
    for length in lengths:
        own = slice(start, start + length)
        expected = torch_path(logits[own][:-1], tokens[own][1:])[0]
        torch.testing.assert_close(packed[own][1:], expected, rtol=1e-5, atol=1e-6)
        assert length == 0 or packed[start] == 0
        start += length


@pytest.mark.parametrize("classes", [10, 5000, 9000])
def test_infinite_logits(classes):
    """Banned classes and tiles, rows of -inf, of one class, of +inf and with NaN, as in torch."""
    logits = torch.randn(7, classes)
    tokens = torch.randint(classes // 2, classes, (7,))
    logits[0, : classes // 3] = float("-inf")
    logits[1, : classes - 1 - classes // 5] = float("-inf")  # whole chunks
    logits[2] = float("-inf")
    logits[3] = float("-inf")
    logits[3, tokens[3]] = 2.0
    logits[4, tokens[4]] = float("-inf")
    logits[5, 0] = float("inf")
    logits[6, classes - 1] = float("nan")
    truth = torch.log_softmax(logits.double(), -1).gather(-1, tokens[:, None]).squeeze(-1)
    no_worse(token_log_probs(logits, tokens).log_probs, truth.float(), truth, 2e-6)
    rows = [0, 1, 3, 4]
    x = logits[rows].requires_grad_()
    out = token_log_probs(x, tokens[rows], entropy=True)
    assert out.entropy.isfinite().all()
    out.entropy.sum().backward(retain_graph=True)
    out.log_probs.sum().backward()
    assert x.grad.isfinite().all()
    banned = logits[rows] == float("-inf")
    banned[torch.arange(4), tokens[rows]] = False
    assert (x.grad[banned] == 0).all()


@pytest.mark.parametrize("offset", [-1e4, 1e4, -3e37, 3e37])
def test_rows_far_from_zero(offset):
    """All-negative rows (a running maximum must not start at 0) and logits no exponent can hold."""
    logits = torch.randn(4, 6000) * 3 + offset
    tokens = torch.randint(0, 6000, (4,))
    theirs, truth = (torch_path(logits.to(t), tokens)[0] for t in (logits.dtype, torch.double))
    no_worse(token_log_probs(logits, tokens).log_probs, theirs, truth, 2e-6)


@pytest.mark.parametrize(("scale", "temperature"), [(30.0, 0.01), (1e4, 1e-3), (65504.0, 1.0)])
def test_gradient_of_large_scaled_logits(scale, temperature):
    """One number for the normaliser would leave no digits for the softmax of such logits."""
    base = (torch.rand(4, 6000) * 2 - 1) * scale
    base[:, 5] = base.max(-1).values - temperature  # a rival, or all gradients would be 0
    tokens = torch.randint(0, 6000, (4,))
    grads = []
    for dtype in (torch.float32, torch.float64):
        x = base.to(dtype).clone().requires_grad_()
        out = token_log_probs(x, tokens, temperature=temperature, entropy=True)
        (out.log_probs * 0.3 + out.entropy).sum().backward()
        grads.append(x.grad.double() * temperature)
    # The quotient by the temperature is itself rounded, as torch's is.
    torch.testing.assert_close(*grads, rtol=2e-5, atol=2e-5)


def test_a_later_chunk_that_dwarfs_the_first():
    """Relative to the first chunk's maximum these overflow; the row must start over."""
    logits = torch.randn(3, 20000)
    logits[0, 9000] = 500.0
    logits[1, 5000:] += 70.0
    logits[2, 5000:] -= 500.0
    tokens = torch.tensor([9000, 6000, 10])
    theirs, truth = (torch_path(logits.to(t), tokens) for t in (logits.dtype, torch.double))
    ours = token_log_probs(logits, tokens, entropy=True)
    for mine, other, exact in zip(ours, theirs, truth, strict=True):
        no_worse(mine, other, exact, 2e-6)


@pytest.mark.parametrize("at", [0, 600, 5000, 31999])  # in the first chunk, at its end, and later
@pytest.mark.parametrize("peak", [3.0, 8.0, 20.0, 30.0, 42.0])
@pytest.mark.parametrize("rival", [False, True])
def test_a_peak_anywhere_in_its_row(at, peak, rival):
    """Where it comes late, what came before it may be 2^60 times less likely."""
    logits = torch.randn(16, 32000)
    logits[:, at] = peak
    if rival:
        logits[:, 20000] = peak - 0.5
    tokens = torch.full((16,), at)
    truth, theirs = torch_path(logits.double(), tokens), torch_path(logits, tokens)
    logits.requires_grad_()
    ours = token_log_probs(logits, tokens, entropy=True)
    for mine, other, exact in zip(ours, theirs, truth, strict=True):
        no_worse(mine.detach(), other, exact, 3e-7)
    assert (ours.log_probs <= 0).all() and (ours.entropy >= 0).all()
    (grad,) = torch.autograd.grad(ours.log_probs.sum(), logits)
    # 1 - p from the other classes alone: of 42, float64 keeps 7e-15, which is a fifth of it.
    odds = (logits.detach().double() - peak).exp().index_fill(1, torch.tensor(at), 0).sum(1)
    torch.testing.assert_close(grad[:, at].double(), odds / (1 + odds), rtol=0.2, atol=0)


@pytest.mark.parametrize("certainty", [2.0, 8.0, 14.0])
def test_sure_token_keeps_its_gradient(certainty):
    """The true class has gradient 1 - p, -expm1(log p): 1 - exp loses all digits near p = 1."""
    logits = torch.zeros(1, 100)
    logits[0, 3] = certainty
    logits.requires_grad_()
    log_prob = token_log_probs(logits, torch.tensor([3])).log_probs
    log_prob.sum().backward()
    expected = -torch.expm1(log_prob.detach().double())
    torch.testing.assert_close(logits.grad[0, 3].double(), expected[0], rtol=1e-6, atol=0)


def test_float64_runs_through_the_reference_and_says_so_once(caplog):
    for _ in range(2):
        out = token_log_probs(torch.zeros(4, 5).double(), torch.zeros(4).long()).log_probs
    assert out.dtype == torch.float64
    assert len([r for r in caplog.records if "reference implementation" in r.message]) == 1


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    classes=st.integers(1, 70),
    shift=st.booleans(),
    keep=st.floats(0, 1),
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from(DTYPES),
)
def test_random_ragged_batches_equal_the_reference(lengths, classes, shift, keep, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    count = sum(lengths)
    logits = (torch.randn(count, classes, generator=generator) * 5).to(dtype)
    tokens = torch.randint(0, classes, (count,), generator=generator)
    mask = torch.rand(count, generator=generator) < keep
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    results = []
    for impl in ("cpu", "reference"):
        x = logits.clone().requires_grad_()
        out: TokenLogProbs = token_log_probs(
            x, tokens, mask, offsets=offsets, shift=shift, entropy=True, impl=impl
        )
        (out.log_probs * 0.3 - out.entropy).sum().backward()
        results.append((out.log_probs, out.entropy, x.grad.float()))
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(
            ours, reference, rtol=8e-3 if ours is results[0][2] else 1e-5, atol=5e-6
        )
