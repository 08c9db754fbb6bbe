"""linear_exact_kl: against float64, exact_kl of logits in float32, and its own contract."""

from __future__ import annotations

import pytest
import torch
from accuracy import no_worse
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad

from fusedrl import exact_kl, linear_exact_kl
from fusedrl.ops.exact_kl import DIRECTIONS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAMES = ("hidden", "weight", "bias", "ref_hidden", "ref_weight", "ref_bias")
# Around the classes of a tile, and several tiles.
CLASSES = [1, 7, 4095, 4096, 4097, 5000]
SHAPES = [
    {},
    {"softcap": 3.0},
    {"ref_softcap": 2.0, "ref_scale": 0.5},
    {"softcap": 3.0, "ref_softcap": 5.0, "scale": 1.7, "ref_scale": 0.6},
]


def sample(shape, classes=50, widths=(16, 24), dtype=torch.float32, apart=2.0):
    """The six tensors of two heads whose logits are of order 1."""
    heads = []
    for width, spread in zip(widths, (1.0, apart), strict=True):
        heads += [
            torch.randn(*shape, width) * spread,
            torch.randn(classes, width) / width**0.5,
            torch.randn(classes) * spread,
        ]
    return [x.to(dtype) for x in heads]


def ours(heads, mask=None, **options):
    hidden, weight, bias, ref_hidden, ref_weight, ref_bias = heads
    return linear_exact_kl(
        hidden, weight, ref_hidden, ref_weight, mask, bias=bias, ref_bias=ref_bias, **options
    )


def logits_of(hidden, weight, bias, scale=None, softcap=None):
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits if scale is None else logits * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def materialised(
    heads, mask=None, *, scale=None, softcap=None, ref_scale=None, ref_softcap=None, **options
):
    """What users write: two heads, then the divergence of their logits."""
    logits = logits_of(*heads[:3], scale, softcap)
    ref_logits = logits_of(*heads[3:], ref_scale, ref_softcap)
    return exact_kl(logits, ref_logits, mask, impl="reference", **options)


def gradients(function, heads, upstream, wanted=range(6)):
    leaves = [None if x is None else x.detach().clone() for x in heads]
    asked = [leaves[i].requires_grad_() for i in wanted]
    out = function(leaves)
    return torch.autograd.grad(out, asked, upstream.to(out))


def compare(heads, mask=None, **options):
    """Forward and every gradient, beside torch in float32 and the truth in float64."""
    upstream = torch.randn(heads[0].shape[:-1])

    def path(heads):
        return materialised(heads, mask, **options)

    floats, doubles = ([x.to(t) for x in heads] for t in (torch.float32, torch.float64))
    divergence, truth = ours(heads, mask, **options), path(doubles)
    assert divergence.dtype == torch.float32
    no_worse(divergence, path(floats), truth, 2e-6 + 1e-6 * truth.max().item())
    mine = gradients(lambda heads: ours(heads, mask, **options), heads, upstream)
    theirs, exact = (gradients(path, x, upstream) for x in (floats, doubles))
    for name, got, other, want in zip(NAMES, mine, theirs, exact, strict=True):
        assert got.dtype == heads[0].dtype, name
        no_worse(got, other.to(got.dtype), want, 2e-6 + 1e-6 * want.abs().max().item())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_no_worse_than_torch_in_float32(dtype, classes, direction):
    compare(sample((9,), classes, dtype=dtype), direction=direction, temperature=0.7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_softcaps_and_scales_of_either_side(dtype, direction, shape):
    compare(sample((5,), 1030, dtype=dtype), direction=direction, temperature=1.3, **shape)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("widths", [(1, 1), (3, 130), (130, 3)])
def test_widths_of_their_own(direction, widths):
    compare(sample((6,), 300, widths), direction=direction)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_more_rows_than_a_tile(dtype, direction, batch_invariant):
    """Gradients of the heads are sums over several blocks of rows, the last one not full."""
    heads = sample((1100,), 1100, (8, 12), dtype)
    mask = torch.arange(1100) % 17 != 3
    assert mask.sum() > 1024
    options = {"direction": direction, "softcap": 4.0}
    upstream = torch.randn(1100)

    def path(heads):
        return materialised(heads, mask, **options)

    def fused(heads):
        return ours(heads, mask, batch_invariant=batch_invariant, **options)

    doubles = [x.double() for x in heads]
    no_worse(fused(heads), path([x.float() for x in heads]), path(doubles), 1e-5)
    rounding = {"rtol": torch.finfo(dtype).eps + 2e-6, "atol": 2e-5}
    mine, exact = gradients(fused, heads, upstream), gradients(path, doubles, upstream)
    for got, want in zip(mine, exact, strict=True):
        torch.testing.assert_close(got.double(), want, **rounding)


@pytest.mark.parametrize("given", [(2,), (5,), ()])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_bias_on_one_side_or_none(given, direction):
    heads = sample((6,), 1030)
    for i in {2, 5} - set(given):
        heads[i] = None
    zeros = [torch.zeros(1030) if x is None else x for x in heads]
    torch.testing.assert_close(ours(heads, direction=direction), ours(zeros, direction=direction))
    wanted = [i for i in range(6) if heads[i] is not None]
    upstream = torch.randn(6)
    for got, want in zip(
        gradients(lambda x: ours(x, direction=direction), heads, upstream, wanted),
        gradients(lambda x: ours(x, direction=direction), zeros, upstream, wanted),
        strict=True,
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_classes_that_biases_ban(direction, batch_invariant):
    """A bias of -inf leaves a class without probability; whole tiles of them, and in one row's."""
    heads = sample((4,), 5000)
    banned = torch.zeros(5000, dtype=torch.bool)
    banned[:4200] = banned[4900] = True
    heads[2][banned] = heads[5][banned] = -torch.inf
    # Where the policy has none of its own either: the divergence stays finite.
    side = 5 if direction == "forward" else 2
    heads[side][4300:4400] = -torch.inf
    truth = materialised([x.double() for x in heads], direction=direction)
    assert truth.isfinite().all()

    def path(x):
        return ours(x, direction=direction, batch_invariant=batch_invariant)

    torch.testing.assert_close(path(heads).double(), truth, rtol=1e-5, atol=1e-5)
    _, of_weight, of_bias, _, of_ref_weight, of_ref_bias = gradients(path, heads, torch.randn(4))
    for weight, bias in ((of_weight, of_bias), (of_ref_weight, of_ref_bias)):
        assert weight.isfinite().all() and bias.isfinite().all()
        assert not weight[banned].any() and not bias[banned].any()
        assert bias[~banned].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_same_head_on_both_sides_has_no_divergence(dtype, direction):
    hidden, weight, bias, *_ = sample((9,), 2500, dtype=dtype)
    heads = [hidden, weight, bias] * 2
    divergence = ours(heads, direction=direction, temperature=0.7)
    torch.testing.assert_close(divergence, torch.zeros(9), rtol=0, atol=1e-6)
    for grad in gradients(lambda x: ours(x, direction=direction), heads, torch.randn(9)):
        torch.testing.assert_close(grad, torch.zeros_like(grad), rtol=0, atol=2e-6)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_tied_weight_collects_the_gradients_of_both_sides(direction):
    hidden, weight, bias, ref_hidden, *_ = sample((9,), 1030, (16, 16))
    upstream = torch.randn(9)

    def path(heads):
        return ours(heads, direction=direction)

    apart = gradients(path, [hidden, weight, bias, ref_hidden, weight, bias], upstream)
    tied_weight, tied_bias = (x.clone().requires_grad_() for x in (weight, bias))
    out = path([hidden, tied_weight, tied_bias, ref_hidden, tied_weight, tied_bias])
    out.backward(upstream)
    torch.testing.assert_close(tied_weight.grad, apart[1] + apart[4])
    torch.testing.assert_close(tied_bias.grad, apart[2] + apart[5])


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("temperature", [0.3, 25.0])
def test_a_temperature_may_be_a_tensor(temperature, impl):
    heads = sample((5,))
    expected = ours(heads, temperature=temperature, impl=impl)
    for dtype in (torch.float32, torch.float64):
        tensor = torch.tensor(temperature, dtype=dtype)
        torch.testing.assert_close(ours(heads, temperature=tensor, impl=impl), expected)
    assert not torch.allclose(expected, ours(heads, impl=impl))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_what_requires_no_grad_gets_none(dtype, direction):
    """And does not change the bits of the others' gradients."""
    heads = sample((7,), 1030, dtype=dtype)
    upstream = torch.randn(7)

    def path(x):
        return ours(x, direction=direction, softcap=5.0, ref_softcap=4.0)

    every = gradients(path, heads, upstream)
    hidden, weight, bias, ref_hidden, ref_weight, ref_bias = range(6)
    for wanted in (
        (hidden, weight, bias),  # the reference is frozen
        (ref_hidden, ref_weight, ref_bias),
        (hidden, bias, ref_hidden, ref_bias),  # the weights are
        (hidden,),
        (weight,),
        (bias,),
        (ref_hidden,),
        (ref_weight,),
        (ref_bias,),
        (weight, ref_bias),
    ):
        leaves = [x.clone().requires_grad_(i in wanted) for i, x in enumerate(heads)]
        path(leaves).backward(upstream)
        for i, leaf in enumerate(leaves):
            if i in wanted:
                assert torch.equal(leaf.grad, every[i]), NAMES[i]
            else:
                assert leaf.grad is None, NAMES[i]


@pytest.mark.parametrize("jensen_shannon", [False, True])
def test_the_op_computes_no_gradient_that_nobody_wants(jensen_shannon):
    hidden, weight, bias, ref_hidden, ref_weight, ref_bias = sample((7,), 1030)
    head, ref_head = (hidden, weight, bias, 1.0, 0.0), (ref_hidden, ref_weight, ref_bias, 1.0, 0.0)
    one = torch.ones((), dtype=torch.float64)
    args = (*head, *ref_head, None, None, False, one, jensen_shannon, False)
    kl, statistics = torch.ops.fusedrl.linear_exact_kl(*args)
    none = torch.ops.fusedrl.linear_exact_kl_backward(kl, *args, statistics, *[False] * 6)
    assert all(grad.shape == (0,) for grad in none)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_reference_passes_gradcheck(direction):
    heads = [x.requires_grad_() for x in sample((5,), 7, (3, 2), torch.float64)]
    mask = torch.tensor([True, False, True, True, True])
    shape = {"scale": 1.2, "softcap": 4.0, "ref_softcap": 3.0}

    def function(*heads):
        return ours(heads, mask, direction=direction, temperature=0.8, **shape)

    assert function(*heads).dtype == torch.float64
    assert torch.autograd.gradcheck(function, heads)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_reference_equals_exact_kl_of_logits(direction, shape):
    heads = sample((2, 5), 40, dtype=torch.float64)
    mask = torch.rand(2, 5) < 0.7
    options = {"direction": direction, "shift": True, "temperature": 0.6, **shape}
    torch.testing.assert_close(
        ours(heads, mask, **options), materialised(heads, mask, **options), rtol=1e-12, atol=1e-12
    )


def test_no_second_derivative():
    heads = sample((3,))
    weight = heads[1].requires_grad_()
    (grad,) = torch.autograd.grad(ours(heads).square().sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("name", [*NAMES, "temperature"])
def test_a_forward_mode_tangent_is_refused(name):
    heads, temperature = sample((3,)), torch.tensor(0.7)
    plain = ours(heads, temperature=temperature)
    with forward_ad.dual_level():
        assert torch.equal(ours(heads, temperature=temperature), plain)
        if name == "temperature":
            temperature = forward_ad.make_dual(temperature, torch.tensor(1.0))
        else:
            i = NAMES.index(name)
            heads[i] = forward_ad.make_dual(heads[i], torch.randn_like(heads[i]))
        for context in (torch.enable_grad(), torch.no_grad()):
            with context, pytest.raises(NotImplementedError, match=f"^{name}: .*'reference'"):
                ours(heads, temperature=temperature)
        assert torch.isfinite(ours(heads, temperature=temperature, impl="reference")).all()


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
    options = {"shift": True, "direction": direction, "temperature": 0.9}
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
