"""top_k_kl and linear_top_k_kl over batches: masks, shifts, ragged rows, views, nothing at all."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedrl import linear_top_k_kl, top_k_kl
from fusedrl.ops.exact_kl import DIRECTIONS
from fusedrl.ops.top_k_kl.teachers import TAILS

from .test_top_k_kl import DTYPES, gradient, torch_path

INF = float("inf")
WEIGHT = torch.randn(30, 12, generator=torch.Generator().manual_seed(0))


def of_logits(rows, *teacher, **options):
    return top_k_kl(rows, *teacher, **options)


def of_hidden(rows, *teacher, **options):
    return linear_top_k_kl(rows, WEIGHT.to(rows.dtype), *teacher, **options)


def of_hidden_in_blocks(rows, *teacher, **options):
    return of_hidden(rows, *teacher, **options, batch_invariant=True)


OPS = pytest.mark.parametrize("op", [of_logits, of_hidden, of_hidden_in_blocks])


def sample(rows, k=4, dtype=torch.float32):
    """Rows that are logits of 12 classes, or hidden states of 12 features; ids and log-probs."""
    teacher, ids = (torch.randn(*rows, 12) * 2).log_softmax(-1).topk(k)
    return torch.randn(*rows, 12).to(dtype), ids, teacher


@OPS
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("poison", [float("nan"), INF, -INF])
def test_what_a_dropped_token_holds_reaches_neither_result_nor_gradient(op, tail, poison):
    rows, ids, teacher = sample((6,))
    mask = torch.tensor([True, False, True, True, False, True])
    upstream = torch.randn(6)

    def path(x):
        return op(x, ids, teacher, mask, tail=tail)

    clean, clean_grad = path(rows), gradient(path, rows, upstream)
    rows[~mask] = teacher[~mask] = upstream[~mask] = poison
    ids[~mask] = 10**9
    dirty = path(rows)
    assert torch.equal(dirty, clean)
    assert (dirty[~mask] == 0).all() and (dirty[mask] > 0).all()
    grad = gradient(path, rows, upstream)
    assert torch.equal(grad, clean_grad)
    assert (grad[~mask] == 0).all()
    assert grad[mask].any(-1).all()


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("dropped_ids", [10**9, -1])
def test_packed_shift_never_reads_the_neighbour(impl, dropped_ids):
    lengths = [3, 0, 1, 5, 0]
    logits, ids, teacher = sample((9,))
    offsets = torch.tensor([0, 3, 3, 4, 9, 9])
    ids[[0, 3, 4]], teacher[[0, 3, 4]] = dropped_ids, float("nan")  # first tokens

    def path(x):
        return top_k_kl(x, ids, teacher, offsets=offsets, shift=True, impl=impl)

    packed, grad = path(logits), gradient(path, logits, torch.ones(9))
    start = 0
    for length in lengths:
        own = slice(start, start + length)
        expected = torch_path(logits[own][:-1], ids[own][1:], teacher[own][1:])
        torch.testing.assert_close(packed[own][1:], expected, rtol=1e-5, atol=1e-6)
        assert length == 0 or packed[start] == 0
        assert length == 0 or not grad[own][-1].any()  # no token reads a sequence's last row
        start += length


@pytest.mark.parametrize("op", [of_logits, of_hidden_in_blocks])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_padded_equals_packed_and_nested(op, direction):
    lengths = [4, 1, 6]
    rows, ids, teacher = sample((3, 6))
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    options = {"shift": True, "direction": direction, "temperature": 0.9}
    padded = op(rows, ids, teacher, mask, **options)
    flat, offsets = [x[mask] for x in (rows, ids, teacher)], torch.tensor([0, 4, 5, 11])
    packed = op(*flat, offsets=offsets, **options)
    assert torch.equal(padded[mask], packed)
    assert (padded[~mask] == 0).all()
    assert torch.equal(op(*flat, offsets=offsets.int(), **options), packed)
    keep = torch.rand(11) < 0.7
    dropped = op(*flat, keep, offsets=offsets, **options)

    nested = [torch.nested.nested_tensor_from_jagged(x, offsets) for x in (*flat, keep)]
    jagged = op(*nested[:3], **options)
    assert jagged.layout == torch.jagged
    assert torch.equal(jagged.values(), packed)
    assert torch.equal(jagged.offsets(), offsets)
    assert torch.equal(op(*nested, **options).values(), dropped)
    strided = op(*(torch.nested.nested_tensor(list(x.split(lengths))) for x in flat), **options)
    assert strided.layout == torch.strided
    assert torch.equal(torch.cat(strided.unbind()), packed)


@OPS
def test_jagged_gradient_reaches_the_values(op):
    batch, offsets = sample((5,)), torch.tensor([0, 2, 5])
    upstream = torch.randn(5)

    def nested(x):
        rows = (torch.nested.nested_tensor_from_jagged(y, offsets) for y in (x, *batch[1:]))
        return op(*rows).values()

    expected = gradient(lambda x: op(x, *batch[1:]), batch[0], upstream)
    assert torch.equal(gradient(nested, batch[0], upstream), expected)


@OPS
def test_views_need_no_copy(op):
    """Sliced, misaligned, transposed, broadcast rows and ids give what contiguous copies give."""
    storage = torch.randn(2 * 8 * 14 + 1, dtype=torch.bfloat16)
    _, ids, teacher = sample((2, 8), 6)
    wide_ids, wide_teacher = sample((8, 2), 6)[1:]
    for view in (
        storage[1:].view(2, 8, 14)[..., 1:13],
        torch.randn(12, 8, 2).bfloat16().permute(2, 1, 0),
        torch.randn(1, 8, 12).bfloat16().expand(2, 8, 12),
    ):
        for part in (slice(1, 4), slice(0, 6, 2)):
            for all_ids, all_teacher in (
                (ids, teacher),
                (wide_ids.transpose(0, 1), wide_teacher.transpose(0, 1)),
            ):
                got = op(view, all_ids[..., part], all_teacher[..., part], shift=True)
                dense = (x[..., part].contiguous() for x in (all_ids, all_teacher))
                assert torch.equal(got, op(view.contiguous(), *dense, shift=True))


@OPS
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8])
def test_dtypes_of_ids_and_log_probs(op, dtype):
    rows, ids, teacher = sample((5,))
    ids[2, 1] = -1
    assert torch.equal(op(rows, ids.to(dtype), teacher), op(rows, ids, teacher))
    for other in (torch.bfloat16, torch.float16, torch.float64):
        rounded = teacher.to(other)
        assert torch.equal(op(rows, ids, rounded), op(rows, ids, rounded.float()))


@OPS
def test_no_gradient_reaches_the_teacher(op):
    rows, ids, teacher = sample((5,))
    out = op(rows, ids, teacher.requires_grad_())
    assert not out.requires_grad
    op(rows.requires_grad_(), ids, teacher).sum().backward()
    assert teacher.grad is None and rows.grad is not None


@OPS
@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
@pytest.mark.parametrize("shift", [False, True])
def test_nothing_to_do(op, shape, shift):
    rows, ids, teacher = sample(shape)
    offsets = torch.tensor([0, 0]) if len(shape) == 1 else None
    out = op(rows.requires_grad_(), ids, teacher, shift=shift, offsets=offsets)
    assert out.shape == shape
    out.sum().backward()
    assert rows.grad.shape == rows.shape
    everything = sample((3,))
    none = torch.zeros(3, dtype=torch.bool)
    leaf = everything[0].requires_grad_()
    op(leaf, *everything[1:], none).sum().backward()
    assert not leaf.grad.any()


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    classes=st.integers(1, 70),
    k=st.integers(1, 9),
    direction=st.sampled_from(DIRECTIONS),
    tail=st.sampled_from(TAILS),
    shift=st.booleans(),
    keep=st.floats(0, 1),
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from(DTYPES),
)
def test_random_ragged_batches_equal_the_reference(
    lengths, classes, k, direction, tail, shift, keep, seed, dtype
):
    generator = torch.Generator().manual_seed(seed)
    count, k = sum(lengths), min(k, classes)
    logits = (torch.randn(count, classes, generator=generator) * 4).to(dtype)
    apart = torch.randn(count, classes, generator=generator)
    teacher, ids = (logits.float() + apart).log_softmax(-1).topk(k)
    ids = ids.masked_fill(torch.rand(count, k, generator=generator) < 0.2, -1)
    mask = torch.rand(count, generator=generator) < keep
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    upstream = torch.randn(count, generator=generator)
    options = {"direction": direction, "tail": tail, "offsets": offsets, "shift": shift}

    def path(x):
        impl = "reference" if x.dtype == torch.float64 else "cpu"
        return top_k_kl(x, ids, teacher, mask, impl=impl, **options)

    # A rest that float32 cannot tell from none is known to 1e-6 of it.
    torch.testing.assert_close(path(logits).double(), path(logits.double()), rtol=1e-4, atol=1e-5)
    rounding = {"rtol": max(2 * torch.finfo(dtype).eps, 1e-4), "atol": 2e-5}
    mine, truth = gradient(path, logits, upstream), gradient(path, logits.double(), upstream)
    torch.testing.assert_close(mine.double(), truth, **rounding)
