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

from fusedrl import TokenLogProbs, linear_token_log_probs
from fusedrl.ops import _stored

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OFFSETS = torch.tensor([0, 3, 3, 4, 9])
INF, NAN = float("inf"), float("nan")


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [1, 7, 4095, 4096, 4097, 5000])  # around a tile of classes
@pytest.mark.parametrize("width", [1, 3, 64])
def test_no_worse_than_torch_in_the_same_dtype(dtype, classes, width):
    *inputs, tokens = problem(9, classes, width, dtype)
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


def test_the_reference_is_the_formula():
    *inputs, tokens = problem(7, 40, 6, torch.float64)
    options = {"temperature": 0.8, "scale": 1.3, "softcap": 2.0}
    upstream = torch.randn(2, 7)
    mine, formula = (
        results(path, inputs, tokens, upstream, **options) for path in (reference, torch_path)
    )
    torch.testing.assert_close(mine, formula)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_reference_passes_gradcheck(softcap):
    *inputs, tokens = problem(5, 7, 3, torch.float64)
    mask = torch.tensor([True, False, True, True, True])

    def function(hidden, weight, bias):
        options = {"temperature": 0.8, "scale": 1.5, "softcap": softcap, "mask": mask}
        return tuple(reference(hidden, weight, bias, tokens, **options))

    assert torch.autograd.gradcheck(function, [x.requires_grad_() for x in inputs])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(9,), (3, 3)], ids=["packed", "padded"])
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_layouts_equal_the_reference(dtype, shape, shift, masked):
    hidden, weight, bias, tokens = problem(9, 1100, 16, dtype)
    hidden, tokens = hidden.view(*shape, 16), tokens.view(shape)
    options = {
        "mask": torch.rand(shape) < 0.6 if masked else None,
        "offsets": OFFSETS if len(shape) == 1 else None,
        "shift": shift,
    }
    upstream = torch.randn(2, *shape)
    mine, truth = (
        results(path, (hidden, weight, bias), tokens, upstream, kind, **options)
        for path, kind in ((compiled, None), (reference, torch.float64))
    )
    for got, exact in zip(mine[0], truth[0], strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=3e-6, atol=3e-6)
        assert torch.equal(got == 0, exact == 0)
    rounding = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {}
    for got, exact in zip(mine[1], truth[1], strict=True):
        torch.testing.assert_close(got, exact.to(dtype), **rounding)
    # Rows that no kept token reads are zero, not almost.
    assert torch.equal(mine[1][0].any(-1), truth[1][0].any(-1))


def test_padded_equals_packed_and_nested():
    lengths = [4, 1, 6]
    hidden, weight, _, tokens = problem(18, 1030, 12)
    hidden, tokens = hidden.view(3, 6, 12), tokens.view(3, 6)
    there, offsets = torch.arange(6) < torch.tensor(lengths)[:, None], torch.tensor([0, 4, 5, 11])
    keep = torch.rand(11) < 0.7
    flat, flat_tokens = hidden[there], tokens[there]
    options = {"shift": True, "temperature": 0.9, "batch_invariant": True}

    def run(*args, **more):
        return linear_token_log_probs(args[0], weight, *args[1:], **options, **more).log_probs

    packed = run(flat, flat_tokens, keep, offsets=offsets)
    mask = torch.zeros(3, 6, dtype=torch.bool)
    mask[there] = keep
    padded = run(hidden, tokens, mask)
    assert torch.equal(padded[there], packed)
    assert (padded[~mask] == 0).all()
    jagged_args = [
        torch.nested.nested_tensor_from_jagged(x, offsets) for x in (flat, flat_tokens, keep)
    ]
    jagged = run(*jagged_args)
    assert jagged.layout == torch.jagged
    assert torch.equal(jagged.values(), packed)
    assert torch.equal(jagged.offsets(), offsets)
    strided = run(
        *(torch.nested.nested_tensor(list(x.split(lengths))) for x in (flat, flat_tokens, keep))
    )
    assert strided.layout == torch.strided
    assert torch.equal(torch.cat(strided.unbind()), packed)
    more = {**options, "entropy": True}
    both = linear_token_log_probs(jagged_args[0], weight, *jagged_args[1:], **more)
    assert isinstance(both, TokenLogProbs)
    expected = linear_token_log_probs(flat, weight, flat_tokens, keep, offsets=offsets, **more)
    assert torch.equal(both.log_probs.values(), expected.log_probs)
    assert torch.equal(both.entropy.values(), expected.entropy)


def test_jagged_gradient_reaches_the_values():
    *inputs, tokens = problem(9, 50, 4)
    nested_tokens = torch.nested.nested_tensor_from_jagged(tokens, OFFSETS)

    def nested(hidden, weight, bias, tokens):
        jagged = torch.nested.nested_tensor_from_jagged(hidden, OFFSETS)
        out = compiled(jagged, weight, bias, nested_tokens, shift=True)
        return tuple(x.values() for x in out)

    def packed(hidden, weight, bias, tokens):
        return compiled(hidden, weight, bias, tokens, offsets=OFFSETS, shift=True)

    upstream = torch.randn(2, 9)
    mine, want = (results(path, inputs, tokens, upstream) for path in (nested, packed))
    for got, expected in zip(mine[0] + [*mine[1]], want[0] + [*want[1]], strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("poison", [NAN, INF])
def test_what_a_dropped_token_holds_reaches_neither_result_nor_gradient(impl, shift, poison):
    *inputs, tokens = problem(12, 1100, 8)
    mask = torch.arange(12) % 3 != 0
    rows = mask.roll(-1) if shift else mask  # those that a kept token reads
    mask[0] &= not shift
    rows[-1] &= not shift
    options = {"mask": mask, "offsets": torch.tensor([0, 12]), "shift": shift, "impl": impl}
    upstream = torch.randn(2, 12)
    clean = results(compiled, inputs, tokens, upstream, **options)
    inputs[0][~rows] = poison
    dirty = results(compiled, inputs, tokens.masked_fill(~mask, -100), upstream, **options)
    for got, want in zip(dirty[0] + [*dirty[1]], clean[0] + [*clean[1]], strict=True):
        assert torch.equal(got, want)
    assert all((x[~mask] == 0).all() and x[mask].all() for x in dirty[0])
    assert (dirty[1][0][~rows] == 0).all()
    assert dirty[1][0][rows].any(-1).all()


def test_packed_shift_never_reads_the_neighbour():
    hidden, weight, bias, tokens = problem(9, 30, 5)
    options = {"offsets": OFFSETS, "shift": True}
    mine, grads = results(compiled, (hidden, weight, bias), tokens, torch.ones(2, 9), **options)
    for start, end in itertools.pairwise(OFFSETS.tolist()):
        own = hidden[start:end]
        want = torch_path(own[:-1], weight, bias, tokens[start:end][1:])
        for got, expected in zip(mine, want, strict=True):
            torch.testing.assert_close(got[start:end][1:], expected, rtol=1e-5, atol=1e-5)
            assert not got[start:end][:1].any()
        assert not grads[0][start:end][-1:].any()  # no token reads a sequence's last row


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


def test_rows_that_are_not_finite_are_nan_alone():
    hidden, weight, bias, tokens = problem(6, 1100, 8)
    hidden[1, 3], hidden[4, 0] = NAN, INF
    good = torch.tensor([0, 2, 3, 5])
    mine = compiled(hidden, weight, bias, tokens)
    want = compiled(hidden[good], weight, bias, tokens[good])
    for got, expected in zip(mine, want, strict=True):
        torch.testing.assert_close(got[good], expected)
        assert got[[1, 4]].isnan().all()


@pytest.mark.parametrize("classes", [4097, 5000])
def test_a_later_tile_that_dwarfs_the_first(classes):
    hidden, weight, bias, tokens = problem(5, classes, 8)
    bias[4096:] += 300.0
    tokens[:3] = torch.tensor([4096, 3, 4095])
    check((hidden, weight, bias), tokens)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)], ids=str)
def test_nothing_to_do(shape):
    hidden, weight = (
        torch.randn(*shape, 5, requires_grad=True),
        torch.randn(8, 5, requires_grad=True),
    )
    tokens = torch.zeros(shape, dtype=torch.int64)
    for shift in (False, True):
        offsets = torch.tensor([0, 0]) if len(shape) == 1 else None
        out = compiled(hidden, weight, None, tokens, offsets=offsets, shift=shift)
        assert out.log_probs.shape == out.entropy.shape == tokens.shape
        grads = torch.autograd.grad(out.log_probs.sum() + out.entropy.sum(), (hidden, weight))
        assert grads[0].shape == hidden.shape
        assert torch.equal(grads[1], torch.zeros_like(weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_tokens_dropped(dtype):
    *inputs, _ = problem(3, 1100, 5, dtype)
    inputs[0].fill_(NAN)
    mask = torch.zeros(3, dtype=torch.bool)
    out, grads = results(compiled, inputs, torch.full((3,), 9999), torch.ones(2, 3), mask=mask)
    for zeros in (*out, *grads):
        assert torch.equal(zeros, torch.zeros_like(zeros))


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_give_what_contiguous_copies_give(dtype):
    """Every other row, transposed, of a wider matrix, of one row; and their gradients."""
    storage = torch.randn(8, 2 * 6 * 10).to(dtype)
    hiddens = {
        "rows": storage.view(-1, 10)[::2],
        "columns": storage.view(-1, 20)[:, 3:13],
        "transposed": torch.randn(10, 48).to(dtype).T,
        "padded": storage.view(8, 6, 20)[::2, 1:5, 7:17],
        "swapped": storage.view(8, 12, 10).transpose(0, 1),
        "expanded": storage.view(-1, 10)[:1].expand(7, 10),
    }
    wide = torch.randn(2 * 1100, 13).to(dtype)
    weights = {"rows": wide[::2, :10], "transposed": torch.randn(10, 1100).to(dtype).T}
    for hidden, weight in itertools.product(hiddens.values(), weights.values()):
        tokens = torch.randint(0, 1100, hidden.shape[:-1])
        upstream = torch.randn(2, *tokens.shape)
        offsets = torch.tensor([0, tokens.numel()]) if tokens.dim() == 1 else None
        options = {"shift": True, "offsets": offsets}
        pairs = []
        for copy in (False, True):
            leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
            args = [x.contiguous() if copy else x for x in leaves]
            out = compiled(*args, None, tokens, **options)
            pairs.append((*out, *torch.autograd.grad(tuple(out), leaves, list(upstream))))
        for got, want in zip(*pairs, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_tied_weight_gets_both_gradients():
    ids, tokens = torch.randint(0, 50, (2, 6)), torch.randint(0, 50, (2, 6))
    upstream = torch.randn(2, 6)
    grads = []
    for tied, dtype in ((True, torch.float32), (False, torch.float64)):
        weight = torch.linspace(-1, 1, 400, dtype=dtype).view(50, 8).sin().requires_grad_()
        hidden = functional.embedding(ids, weight).tanh()
        if tied:
            log_probs = linear_token_log_probs(hidden, weight, tokens).log_probs
        else:
            log_probs = torch_path(hidden, weight, None, tokens)[0]
        grads.append(torch.autograd.grad(log_probs, weight, upstream.to(dtype))[0].double())
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)


class _Results(TorchDispatchMode):
    """Collects what the backward op returns."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.fusedrl.linear_token_log_probs_backward.default:
            self.sizes.append([x.numel() for x in out])
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_frozen_costs_no_gradient(dtype):
    *inputs, tokens = problem(9, 1100, 8, dtype)
    upstream = torch.randn(2, 9)
    whole = results(compiled, inputs, tokens, upstream)[1]
    for wanted in itertools.product([False, True], repeat=3):
        leaves = [x.detach().requires_grad_(want) for x, want in zip(inputs, wanted, strict=True)]
        out = compiled(*leaves, tokens)
        assert out.log_probs.requires_grad == any(wanted)
        if not any(wanted):
            continue
        with _Results() as ran:
            torch.autograd.backward(tuple(out), list(upstream))
        assert ran.sizes == [
            [x.numel() if want else 0 for x, want in zip(inputs, wanted, strict=True)]
        ]
        for leaf, want, grad in zip(leaves, wanted, whole, strict=True):
            assert torch.equal(leaf.grad, grad) if want else leaf.grad is None


def test_gradient_of_either_result_alone():
    *inputs, tokens = problem(9, 1100, 8)
    for only in (0, 1):
        leaves = [x.clone().requires_grad_() for x in inputs]
        upstream = torch.randn(9)
        mine = torch.autograd.grad(compiled(*leaves, tokens)[only], leaves, upstream)
        exact = [x.double().detach().requires_grad_() for x in inputs]
        want = torch.autograd.grad(reference(*exact, tokens)[only], exact, upstream.double())
        for got, expected in zip(mine, want, strict=True):
            torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_under_autocast_the_head_has_its_dtype(impl):
    """As torch.nn.functional.linear: inputs are cast; products are still summed in float32."""
    *inputs, tokens = problem(9, 1100, 16)
    upstream = torch.randn(2, 9)

    def cast(*args, **options):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return compiled(*args, impl=impl, **options)

    def by_hand(hidden, weight, bias, tokens):
        hidden, weight, bias = (x.bfloat16() for x in (hidden, weight, bias))
        return compiled(hidden, weight, bias, tokens, impl=impl)

    mine, want = (results(path, inputs, tokens, upstream) for path in (cast, by_hand))
    assert mine[0][0].dtype == mine[1][0].dtype == torch.float32
    for got, expected in zip(mine[0] + [*mine[1]], want[0] + [*want[1]], strict=True):
        torch.testing.assert_close(got, expected)


def test_int32_tokens_and_offsets():
    hidden, weight, _, tokens = problem(9, 40, 4)
    wide = linear_token_log_probs(hidden, weight, tokens, offsets=OFFSETS, shift=True).log_probs
    narrow = linear_token_log_probs(
        hidden, weight, tokens.int(), offsets=OFFSETS.int(), shift=True
    ).log_probs
    assert torch.equal(wide, narrow)


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
