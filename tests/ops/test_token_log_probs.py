"""token_log_probs: against float64, torch in the same dtype, and its own contract."""

from __future__ import annotations

import numpy
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


def test_reference_passes_gradcheck():
    logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(0, 7, (5,))
    mask = torch.tensor([True, False, True, True, True])

    def function(x):
        return tuple(token_log_probs(x, tokens, mask, temperature=0.8, entropy=True))

    assert torch.autograd.gradcheck(function, (logits,))


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("shift", [False, True])
def test_compiled_equals_reference_forward_and_backward(shift, entropy):
    offsets = torch.tensor([0, 3, 3, 4, 9])
    base, tokens = torch.randn(9, 50), torch.randint(0, 50, (9,))
    mask = torch.rand(9) < 0.7
    upstream = torch.randn(2, 9)
    grads, values = [], []
    for impl in ("cpu", "reference"):
        logits = base.clone().requires_grad_()
        out = token_log_probs(
            logits, tokens, mask, offsets=offsets, shift=shift, entropy=entropy, impl=impl
        )
        out = [x for x in out if x is not None]
        torch.autograd.backward(list(out), list(upstream[: len(out)]))
        values.append(torch.stack(tuple(out)).detach())
        grads.append(logits.grad)
    torch.testing.assert_close(*values, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)


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


def test_padded_equals_packed_and_jagged():
    lengths = [4, 1, 6]
    logits, tokens = torch.randn(3, 6, 33), torch.randint(0, 33, (3, 6))
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    padded = token_log_probs(logits, tokens, mask, shift=True).log_probs
    packed_logits, packed_tokens = logits[mask], tokens[mask]
    offsets = torch.tensor([0, 4, 5, 11])
    packed = token_log_probs(packed_logits, packed_tokens, offsets=offsets, shift=True).log_probs
    assert torch.equal(padded[mask], packed)
    assert (padded[~mask] == 0).all()
    nested_tokens = torch.nested.nested_tensor_from_jagged(packed_tokens, offsets)
    nested_logits = torch.nested.nested_tensor_from_jagged(packed_logits, offsets)
    jagged = token_log_probs(nested_logits, nested_tokens, shift=True).log_probs
    assert jagged.layout == torch.jagged
    assert torch.equal(jagged.values(), packed)
    assert torch.equal(jagged.offsets(), nested_tokens.offsets())
    strided = token_log_probs(
        torch.nested.nested_tensor(list(packed_logits.split(lengths))),
        torch.nested.nested_tensor(list(packed_tokens.split(lengths))),
        shift=True,
    ).log_probs
    assert strided.layout == torch.strided
    assert torch.equal(torch.cat(strided.unbind()), packed)


def test_jagged_gradient_reaches_the_values():
    values = torch.randn(5, 8, requires_grad=True)
    offsets = torch.tensor([0, 2, 5])
    tokens = torch.nested.nested_tensor_from_jagged(torch.randint(0, 8, (5,)), offsets)
    logits = torch.nested.nested_tensor_from_jagged(values, offsets)
    token_log_probs(logits, tokens).log_probs.values().sum().backward()
    assert values.grad.abs().sum() > 0


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_what_a_dropped_token_holds_reaches_neither_result_nor_gradient(poison):
    base, tokens = torch.randn(6, 40), torch.randint(0, 40, (6,))
    mask = torch.tensor([True, False, True, True, False, True])
    clean = token_log_probs(base, tokens, mask, entropy=True)
    dirty = base.clone()
    dirty[~mask] = poison
    dirty.requires_grad_()
    ignored = tokens.masked_fill(~mask, -100)
    out = token_log_probs(dirty, ignored, mask, entropy=True)
    assert torch.equal(out.log_probs, clean.log_probs)
    assert torch.equal(out.entropy, clean.entropy)
    assert (out.log_probs[~mask] == 0).all()
    (out.log_probs.sum() + out.entropy.sum()).backward()
    assert dirty.grad.isfinite().all()
    assert (dirty.grad[~mask] == 0).all()


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
    truth = torch.log_softmax(logits.double(), -1).gather(-1, tokens[:, None]).squeeze(-1)
    theirs = torch.log_softmax(logits, -1).gather(-1, tokens[:, None]).squeeze(-1)
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
    truth = torch_path(logits.double(), tokens)
    ours = token_log_probs(logits, tokens, entropy=True)
    theirs = torch_path(logits, tokens)
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_contract_is_bitwise(dtype):
    """A row's bits are the same alone, in a batch, shuffled, and on 1 or 2 threads."""
    logits = (torch.randn(40, 9001) * 4).to(dtype)
    tokens = torch.randint(0, 9001, (40,))
    whole = torch.stack(token_log_probs(logits, tokens, entropy=True))
    alone = [
        torch.stack(token_log_probs(logits[i : i + 1], tokens[i : i + 1], entropy=True))
        for i in range(40)
    ]
    assert torch.equal(torch.cat(alone, 1), whole)
    order = torch.randperm(40)
    shuffled = torch.stack(token_log_probs(logits[order], tokens[order], entropy=True))
    assert torch.equal(shuffled, whole[:, order])
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert torch.equal(torch.stack(token_log_probs(logits, tokens, entropy=True)), whole)
    finally:
        torch.set_num_threads(threads)


def test_views_need_no_copy():
    """Sliced, misaligned, transposed, broadcast logits give what contiguous copies give."""
    storage = torch.randn(2 * 8 * 301 + 1, dtype=torch.bfloat16)
    misaligned = storage[1:].view(2, 8, 301)
    tokens = torch.randint(0, 200, (2, 8))
    for view in (
        misaligned,
        misaligned[:, :, 5:260],
        misaligned.expand(2, 8, 301)[:1].expand(2, 8, 301),
        misaligned.permute(0, 2, 1)[:, :, :].permute(0, 2, 1),
        torch.randn(301, 8, 2).permute(2, 1, 0),
    ):
        expected = token_log_probs(view.contiguous(), tokens, shift=True).log_probs
        assert torch.equal(token_log_probs(view, tokens, shift=True).log_probs, expected)
    sliced, part = misaligned[:, 2:7], tokens[:, 2:7]
    assert torch.equal(
        token_log_probs(sliced, part).log_probs,
        token_log_probs(sliced.contiguous(), part.contiguous()).log_probs,
    )
    rows = misaligned[0].requires_grad_()
    token_log_probs(rows[::2], tokens[0, ::2]).log_probs.sum().backward()


@pytest.mark.parametrize("shape", [(0, 5), (0, 3, 5), (2, 0, 5)])
def test_nothing_to_do(shape):
    logits = torch.randn(shape, requires_grad=True)
    tokens = torch.zeros(shape[:-1], dtype=torch.int64)
    out = token_log_probs(logits, tokens, entropy=True)
    assert out.log_probs.shape == out.entropy.shape == tokens.shape
    out.log_probs.sum().backward()
    assert logits.grad.shape == logits.shape


def test_all_tokens_dropped():
    logits = torch.full((3, 5), float("nan"), requires_grad=True)
    out = token_log_probs(logits, torch.full((3,), 99), torch.zeros(3, dtype=torch.bool)).log_probs
    assert (out == 0).all()
    out.sum().backward()
    assert (logits.grad == 0).all()


def test_int32_tokens_and_offsets():
    logits = torch.randn(4, 9)
    tokens, offsets = torch.randint(0, 9, (4,)), torch.tensor([0, 1, 4])
    wide = token_log_probs(logits, tokens, offsets=offsets, shift=True).log_probs
    narrow = token_log_probs(logits, tokens.int(), offsets=offsets.int(), shift=True).log_probs
    assert torch.equal(wide, narrow)


def test_under_autocast_the_logits_stay_as_they_are():
    logits, tokens = torch.randn(4, 9), torch.randint(0, 9, (4,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(
            token_log_probs(logits, tokens).log_probs, token_log_probs(logits, tokens).log_probs
        )
        assert token_log_probs(logits, tokens).log_probs.dtype == torch.float32


GOOD = {"logits": torch.zeros(4, 5), "tokens": torch.zeros(4, dtype=torch.int64)}


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"logits": torch.zeros(4)}, ValueError, "logits: expected"),
        ({"logits": torch.zeros(4, 0)}, ValueError, "V of at least 1"),
        (
            {"logits": torch.zeros(4, 5, dtype=torch.int64)},
            TypeError,
            "logits: expected a floating",
        ),
        (
            {"tokens": torch.zeros(3, dtype=torch.int64)},
            ValueError,
            r"tokens: expected shape \(4,\)",
        ),
        ({"tokens": torch.zeros(4)}, TypeError, "tokens: expected an integer"),
        ({"mask": torch.ones(4)}, TypeError, "mask: expected torch.bool"),
        ({"mask": torch.ones(5, dtype=torch.bool)}, ValueError, r"mask: expected shape \(4,\)"),
        ({"shift": True}, ValueError, "offsets: expected the sequence boundaries"),
        ({"offsets": torch.tensor([0, 3])}, ValueError, "from 0 to 4"),
        ({"offsets": torch.tensor([0, 5, 4])}, ValueError, "non-decreasing"),
        ({"offsets": torch.tensor([0.0, 4.0])}, ValueError, "1-D int64"),
        ({"temperature": 0.0}, ValueError, r"temperature: expected a number from 1e-30 to 1e\+30"),
        ({"temperature": float("nan")}, ValueError, "temperature: expected a number .* got nan"),
        ({"temperature": torch.tensor(-1.0)}, ValueError, "temperature: expected a number"),
        ({"temperature": torch.ones(2)}, ValueError, "temperature: expected a float"),
        ({"temperature": torch.ones((), requires_grad=True)}, ValueError, "detach"),
        ({"tokens": torch.tensor([0, 1, 5, 2])}, RuntimeError, r"got 5 at token 2"),
        ({"tokens": torch.tensor([0, -100, 1, 2])}, RuntimeError, r"got -100 at token 1"),
        ({"impl": "cuda"}, ValueError, "expected tensors on cuda"),
        ({"impl": "triton"}, ValueError, "impl: expected .* for token_log_probs, got 'triton'"),
        ({"impl": "fast"}, ValueError, "impl: expected one of"),
        ({"logits": [[0.0]]}, TypeError, "logits: expected a dense tensor .* got list"),
        ({"tokens": [0, 1]}, TypeError, "tokens: expected a dense tensor .* got list"),
    ],
)
def test_bad_input_names_argument_expectation_and_remedy(change, error, match):
    with pytest.raises(error, match=match):
        token_log_probs(**{**GOOD, **change})


def test_explicit_cpu_refuses_a_dtype_it_has_no_kernel_for():
    with pytest.raises(ValueError, match="float32, bfloat16, float16"):
        token_log_probs(torch.zeros(4, 5).double(), GOOD["tokens"], impl="cpu")


def test_float64_runs_through_the_reference_and_says_so_once(caplog):
    from fusedrl.ops import _dispatch

    _dispatch._warned.clear()
    for _ in range(2):
        out = token_log_probs(torch.zeros(4, 5).double(), GOOD["tokens"]).log_probs
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


def test_flags_may_be_those_of_numpy():
    logits, tokens = torch.randn(2, 3, 7), torch.randint(0, 7, (2, 3))
    found, expected = (
        token_log_probs(logits, tokens, shift=flag).log_probs for flag in (numpy.True_, True)
    )
    assert torch.equal(found, expected) and (found[:, 0] == 0).all()
