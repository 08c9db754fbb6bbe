"""linear_exact_kl: against float64, exact_kl of logits in float32, and its own contract."""

from __future__ import annotations

import pytest
import torch
from accuracy import no_worse
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedrl import exact_kl, linear_exact_kl
from fusedrl.ops.exact_kl import DIRECTIONS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
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
    """The divergence, or both results where the entropy is asked for."""
    hidden, weight, bias, ref_hidden, ref_weight, ref_bias = heads
    found = linear_exact_kl(
        hidden, weight, ref_hidden, ref_weight, mask, bias=bias, ref_bias=ref_bias, **options
    )
    return found.kl if found.entropy is None else torch.stack(tuple(found))


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
    found = exact_kl(logits, ref_logits, mask, impl="reference", **options)
    return found.kl if found.entropy is None else torch.stack(tuple(found))


def gradients(function, heads, upstream):
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in heads]
    out = function(leaves)
    return torch.autograd.grad(out, [x for x in leaves if x is not None], upstream.to(out))


def given_in(dtype, heads):
    return [None if x is None else x.to(dtype) for x in heads]


def compare(heads, mask=None, batch_invariant=False, **options):
    """Forward and every gradient, beside torch in float32 and the truth in float64."""

    def path(heads):
        return materialised(heads, mask, **options)

    def fused(heads):
        return ours(heads, mask, batch_invariant=batch_invariant, **options)

    floats, doubles = (given_in(t, heads) for t in (torch.float32, torch.float64))
    found, truth = fused(heads), path(doubles)
    assert found.dtype == torch.float32
    no_worse(found, path(floats), truth, 2e-6 + 1e-6 * truth.max().item())
    upstream = torch.randn_like(found)
    mine = gradients(fused, heads, upstream)
    theirs, exact = (gradients(path, x, upstream) for x in (floats, doubles))
    for got, other, want in zip(mine, theirs, exact, strict=True):
        assert got.dtype == heads[0].dtype
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("classes", [7, 5000])
@pytest.mark.parametrize("beta", [0, 1e-3, 0.2, 0.999, 1])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_any_beta_and_the_entropy(dtype, classes, beta, batch_invariant):
    options = {"direction": "jensen_shannon", "beta": beta, "entropy": True, "temperature": 0.7}
    options |= {"softcap": 3.0, "scale": 1.5}
    compare(sample((9,), classes, dtype=dtype), torch.rand(9) < 0.7, batch_invariant, **options)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("widths", [(1, 1), (3, 130), (130, 3)])
def test_widths_of_their_own(direction, widths):
    compare(sample((6,), 300, widths), direction=direction)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_more_rows_than_a_tile(dtype, direction, batch_invariant):
    """Gradients of the heads are sums over several blocks of rows, the last one not full."""
    mask = torch.arange(1100) % 17 != 3
    assert mask.sum() > 1024
    heads = sample((1100,), 1100, (8, 12), dtype)
    compare(heads, mask, batch_invariant, direction=direction, softcap=4.0)


@pytest.mark.parametrize("given", [(2,), (5,), ()])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_bias_on_one_side_or_none(given, direction):
    heads = sample((6,), 1030)
    for i in {2, 5} - set(given):
        heads[i] = None
    compare(heads, direction=direction)


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


@pytest.mark.parametrize("form", ["packed", "jagged", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_first_classes_of_two_heads(form, dtype, direction):
    """Rows of a head beyond them are not read, and get gradient 0."""
    heads = sample((6,), 50, dtype=dtype)
    wider = [*heads]
    for i, rows in ((1, 4), (2, 4), (4, 30), (5, 30)):
        wider[i] = torch.cat((heads[i], torch.full((rows, *heads[i].shape[1:]), torch.nan)))

    def path(heads):
        call, options = ours, {"direction": direction, "classes": 50}
        if form == "compiled":
            torch._dynamo.reset()
            call = torch.compile(ours, backend="aot_eager", fullgraph=True)
        elif form == "jagged":
            nested, offsets = torch.nested.nested_tensor_from_jagged, torch.tensor([0, 2, 6])
            heads = [nested(x, offsets) if i in (0, 3) else x for i, x in enumerate(heads)]
        found = call(heads, **options)
        return found.values() if found.is_nested else found

    def exact(heads):
        return materialised(given_in(torch.float64, heads), direction=direction)

    with pytest.raises(ValueError, match=r"ref_weight: .* got 80; pass classes="):
        ours(wider)
    torch.testing.assert_close(path(wider).double(), exact(heads), rtol=1e-5, atol=1e-5)
    found, truth = (gradients(*x, torch.ones(6)) for x in ((path, wider), (exact, heads)))
    for got, want in zip(found, truth, strict=True):
        torch.testing.assert_close(got[: len(want)], want, rtol=1e-5, atol=1e-5)
        assert not got[len(want) :].any()


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
