"""linear_exact_kl over batches: masks, shifts, ragged rows, views, and rows that stand alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedrl.ops.exact_kl import DIRECTIONS

from .test_linear_exact_kl import DTYPES, SHAPES, gradients, materialised, ours, sample


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_a_dropped_token_holds_reaches_neither_result_nor_gradient(
    direction, batch_invariant, poison
):
    heads = sample((6,))
    mask = torch.tensor([True, False, True, True, False, True])
    upstream = torch.randn(6)

    def path(heads):
        return ours(heads, mask, direction=direction, batch_invariant=batch_invariant)

    clean, clean_grads = path(heads), gradients(path, heads, upstream)
    heads[0][~mask] = heads[3][~mask] = poison
    upstream[~mask] = poison
    dirty = path(heads)
    assert torch.equal(dirty, clean)
    assert (dirty[~mask] == 0).all() and (dirty[mask] > 0).all()
    grads = gradients(path, heads, upstream)
    for got, want in zip(grads, clean_grads, strict=True):
        assert torch.equal(got, want)
    for i in (0, 3):
        assert (grads[i][~mask] == 0).all()
        assert grads[i][mask].any(-1).all()


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_packed_shift_never_reads_the_neighbour(impl):
    lengths = [3, 0, 1, 5]
    heads = sample((9,))
    offsets = torch.tensor([0, 3, 3, 4, 9])

    def path(heads):
        return ours(heads, offsets=offsets, shift=True, impl=impl)

    packed, grads = path(heads), gradients(path, heads, torch.ones(9))
    start = 0
    for length in lengths:
        own = slice(start, start + length)
        of_sequence = [heads[0][own][:-1], *heads[1:3], heads[3][own][:-1], *heads[4:]]
        expected = materialised(of_sequence)
        torch.testing.assert_close(packed[own][1:], expected, rtol=1e-5, atol=1e-6)
        assert length == 0 or packed[start] == 0
        for i in (0, 3):
            assert length == 0 or not grads[i][own][-1].any()  # no token reads a last row
        start += length


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_padded_equals_packed_and_nested(direction):
    lengths = [4, 1, 6]
    heads = sample((3, 6), 33)
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    options = {"shift": True, "direction": direction, "temperature": 0.9, "batch_invariant": True}
    padded = ours(heads, mask, **options)
    flat, flat_ref, offsets = heads[0][mask], heads[3][mask], torch.tensor([0, 4, 5, 11])

    def of(hidden, ref_hidden, mask=None, **more):
        return ours([hidden, *heads[1:3], ref_hidden, *heads[4:]], mask, **options, **more)

    packed = of(flat, flat_ref, offsets=offsets)
    assert torch.equal(padded[mask], packed)
    assert (padded[~mask] == 0).all()
    assert torch.equal(of(flat, flat_ref, offsets=offsets.int()), packed)
    keep = torch.rand(11) < 0.7
    dropped = of(flat, flat_ref, keep, offsets=offsets)

    nested, nested_ref, nested_keep = (
        torch.nested.nested_tensor_from_jagged(x, offsets) for x in (flat, flat_ref, keep)
    )
    jagged = of(nested, nested_ref)
    assert jagged.layout == torch.jagged
    assert torch.equal(jagged.values(), packed)
    assert torch.equal(jagged.offsets(), offsets)
    assert torch.equal(of(nested, nested_ref, nested_keep).values(), dropped)
    strided = of(*(torch.nested.nested_tensor(list(x.split(lengths))) for x in (flat, flat_ref)))
    assert strided.layout == torch.strided
    assert torch.equal(torch.cat(strided.unbind()), packed)


def test_jagged_gradients_reach_both_values():
    heads = sample((5,))
    offsets = torch.tensor([0, 2, 5])

    def nested(heads):
        heads = list(heads)
        for i in (0, 3):
            heads[i] = torch.nested.nested_tensor_from_jagged(heads[i], offsets)
        return ours(heads).values()

    upstream = torch.randn(5)
    for got, want in zip(
        gradients(nested, heads, upstream), gradients(ours, heads, upstream), strict=True
    ):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_row_contract_with_batch_invariant_is_bitwise(dtype, direction):
    """A row's bits and its gradient's are the same alone, in a batch, on 1 or 2 threads."""
    heads = sample((90,), 1100, (40, 72), dtype)
    upstream = torch.randn(90)

    def run(rows):
        some = [heads[0][rows], *heads[1:3], heads[3][rows], *heads[4:]]

        def path(x):
            return ours(x, direction=direction, softcap=5.0, batch_invariant=True)

        return path(some), *gradients(path, some, upstream[rows], (0, 3))

    whole = run(torch.arange(90))
    order = torch.randperm(90)
    for rows in (*torch.arange(0, 90, 13)[:, None], order, order[:70]):
        for got, want in zip(run(rows), whole, strict=True):
            assert torch.equal(got, want[rows])
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for got, want in zip(run(torch.arange(90)), whole, strict=True):
                assert torch.equal(got, want)
    finally:
        torch.set_num_threads(threads)


VIEWS = {
    "rows apart": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "misaligned": lambda x: torch.cat([x[..., :1], x], -1)[..., 1:],
    "features apart": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("side", [0, 3])
def test_views_of_either_side(view, dtype, side):
    """Strides of one side alone give what contiguous copies of all give."""
    heads = sample((3, 4), 1030, dtype=dtype)
    upstream = torch.randn(3, 4)

    def path(heads):
        return ours(heads, shift=True)

    def strided(leaves):
        return path([VIEWS[view](x) if side <= i <= side + 1 else x for i, x in enumerate(leaves)])

    torch.testing.assert_close(strided(heads), path(heads))
    close = {"rtol": torch.finfo(dtype).eps * 2, "atol": 1e-6}
    mine, expected = gradients(strided, heads, upstream), gradients(path, heads, upstream)
    for got, want in zip(mine, expected, strict=True):
        torch.testing.assert_close(got, want, **close)


def test_broadcast_and_transposed_rows():
    _, weight, bias, _, ref_weight, ref_bias = sample((1,), 60)
    hidden = torch.randn(1, 4, 16).expand(3, 4, 16)
    ref_hidden = torch.randn(4, 3, 24).transpose(0, 1)
    heads = [hidden, weight, bias, ref_hidden, ref_weight, ref_bias]
    dense = [x.contiguous() for x in heads]
    assert torch.equal(ours(heads, shift=True), ours(dense, shift=True))
    upstream = torch.randn(3, 4)
    views = [x.requires_grad_() for x in heads]
    found = torch.autograd.grad(ours(views), views, upstream)
    for got, want in zip(found, gradients(ours, dense, upstream), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0), (4,)])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("impl", "batch_invariant"), [("cpu", False), ("cpu", True), ("reference", False)]
)
def test_nothing_to_do(shape, direction, impl, batch_invariant):
    """An empty batch, empty sequences, and a mask that drops everything."""
    heads = sample(shape)
    mask = torch.zeros(shape, dtype=torch.bool)

    def path(x):
        return ours(x, mask, direction=direction, impl=impl, batch_invariant=batch_invariant)

    assert torch.equal(path(heads), torch.zeros(shape))
    for leaf, grad in zip(heads, gradients(path, heads, torch.ones(shape)), strict=True):
        assert torch.equal(grad, torch.zeros_like(leaf))


def test_autocast_multiplies_in_its_dtype():
    heads, upstream = sample((5,), 200), torch.randn(5)

    def autocast(heads):
        with torch.autocast("cpu", torch.bfloat16):
            return ours(heads)

    halves = [x.bfloat16() for x in heads]
    assert torch.equal(autocast(heads), ours(halves))
    assert not torch.equal(autocast(heads), ours(heads))
    expected = gradients(ours, halves, upstream)
    for got, want in zip(gradients(autocast, heads, upstream), expected, strict=True):
        assert got.dtype == torch.float32
        assert torch.equal(got, want.float())
    doubles = [x.double() for x in heads]
    assert torch.equal(autocast(doubles), ours(doubles))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    classes=st.integers(1, 70),
    widths=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    direction=st.sampled_from(DIRECTIONS),
    shape=st.sampled_from(SHAPES),
    shift=st.booleans(),
    keep=st.floats(0, 1),
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from(DTYPES),
    batch_invariant=st.booleans(),
)
def test_random_ragged_batches_equal_the_reference(
    lengths, classes, widths, direction, shape, shift, keep, seed, dtype, batch_invariant
):
    torch.manual_seed(seed)
    count = sum(lengths)
    heads = sample((count,), classes, widths, dtype)
    mask = torch.rand(count) < keep
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    upstream = torch.randn(count)
    options = {"direction": direction, "offsets": offsets, "shift": shift, **shape}

    def kernel(heads):
        return ours(heads, mask, impl="cpu", batch_invariant=batch_invariant, **options)

    def reference(heads):
        return ours(heads, mask, impl="reference", **options)

    doubles = [x.double() for x in heads]
    torch.testing.assert_close(kernel(heads).double(), reference(doubles), rtol=1e-5, atol=1e-5)
    rounding = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 3e-5}
    for got, want in zip(
        gradients(kernel, heads, upstream), gradients(reference, doubles, upstream), strict=True
    ):
        torch.testing.assert_close(got.double(), want, **rounding)
