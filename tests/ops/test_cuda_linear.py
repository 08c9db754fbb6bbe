"""linear_token_log_probs on a GPU, through CUDA kernels and Triton: values, memory, bits."""

from __future__ import annotations

import importlib.util
import itertools
from unittest import mock

import pytest
import torch
from accuracy import no_worse
from torch.nn import functional

from fusedrl import VocabPart, linear_exact_kl, linear_token_log_probs
from fusedrl.ops import _stored

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
DEVICE = torch.device("cuda")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PACKED = torch.tensor([0, 4, 4, 5, 12])
IMPLS = [
    "cuda",
    pytest.param(
        "triton",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("triton") is None, reason="triton is not installed"
        ),
    ),
]
impls = pytest.mark.parametrize("impl", IMPLS)


def problem(shape, classes, width, dtype):
    hidden = torch.randn(*shape, width, device=DEVICE)
    weight = torch.randn(classes, width, device=DEVICE) * 3 / width**0.5
    bias, tokens = torch.randn(classes, device=DEVICE), torch.randint(0, classes, shape)
    return (*(x.to(dtype) for x in (hidden, weight, bias)), tokens.to(DEVICE))


def torch_path(hidden, weight, bias, tokens, temperature):
    log_softmax = torch.log_softmax(functional.linear(hidden, weight, bias) / temperature, -1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return log_softmax.gather(-1, tokens[..., None]).squeeze(-1), entropy


def ours(hidden, weight, bias, tokens, **options):
    return linear_token_log_probs(hidden, weight, tokens, bias=bias, entropy=True, **options)


def results(path, inputs, tokens, upstream, dtype=None, **options):
    """Log-probs, entropy, and the gradients of hidden states, weight and bias."""
    leaves = [x.detach().to(dtype or x.dtype).clone().requires_grad_() for x in inputs]
    out = path(*leaves, tokens, **options)
    grads = torch.autograd.grad(
        tuple(out), leaves, [up.to(x) for up, x in zip(upstream, out, strict=True)]
    )
    return [x.detach() for x in out] + list(grads)


@impls
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [1, 7, 255, 256, 257, 1001, 32000])
@pytest.mark.parametrize("width", [1, 40, 513])
def test_no_worse_than_torch_in_the_same_dtype(impl, dtype, classes, width):
    *inputs, tokens = problem((9,), classes, width, dtype)
    upstream = torch.randn(2, 9, device=DEVICE)
    mine = results(ours, inputs, tokens, upstream, impl=impl, temperature=0.7)
    theirs = results(torch_path, inputs, tokens, upstream, temperature=0.7)
    truth = results(torch_path, inputs, tokens, upstream, torch.float64, temperature=0.7)
    assert all(grad.dtype == dtype for grad in mine[2:])
    # Of few products it is chance whose gradients of logits are rounded better. Triton's forward
    # pass adds up in another order than the products of the backward pass.
    of_grad = max(2e-5 if impl == "triton" else 5e-6, torch.finfo(dtype).eps)
    for got, other, exact, tol in zip(mine, theirs, truth, 2 * [5e-6] + 3 * [of_grad], strict=True):
        no_worse(got, other, exact, tol * max(1.0, exact.abs().max().item()))


@impls
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(12,), (3, 4)], ids=["packed", "padded"])
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_equals_the_reference(impl, dtype, shape, shift, masked):
    *inputs, tokens = problem(shape, 1001, 40, dtype)
    mask = torch.rand(shape, device=DEVICE) < 0.6 if masked else None
    options = {
        "mask": mask,
        "offsets": PACKED.to(DEVICE) if len(shape) == 1 else None,
        "shift": shift,
        "softcap": 4.0,
        "scale": 1.5,
    }
    upstream = torch.randn(2, *shape, device=DEVICE)
    truth = results(ours, inputs, tokens, upstream, torch.float64, impl="reference", **options)
    if masked and not shift:  # what is dropped is not read
        inputs[0][~mask] = float("nan")
        tokens = tokens.masked_fill(~mask, -100)
    mine = results(ours, inputs, tokens, upstream, impl=impl, **options)
    for got, exact in zip(mine[:2], truth[:2], strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)
        assert torch.equal(got == 0, exact == 0)
    eps = torch.finfo(dtype).eps
    for got, exact in zip(mine[2:], truth[2:], strict=True):
        atol = max(1e-5, 2 * eps * exact.abs().max().item())
        torch.testing.assert_close(got.double(), exact, rtol=max(2 * eps, 1e-5), atol=atol)
    assert torch.equal(mine[2].flatten(0, -2).any(-1), truth[2].flatten(0, -2).any(-1))


@impls
def test_more_rows_than_a_block(impl):
    """The gradient of the weight adds up over several blocks of rows."""
    *inputs, tokens = problem((33000,), 700, 16, torch.float32)
    upstream = torch.randn(2, 33000, device=DEVICE)
    mine = results(ours, inputs, tokens, upstream, impl=impl)
    truth = results(ours, inputs, tokens, upstream, torch.float64, impl="reference")
    for got, exact in zip(mine, truth, strict=True):
        atol = 1e-5 * max(1.0, exact.abs().max().item())
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=atol)


@impls
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [7, 257, 32000])
@pytest.mark.parametrize("rises", [False, True])
def test_a_frozen_head(impl, dtype, classes, rises):
    """Its gradient of the hidden states adds up tile by tile, where the largest logits move."""
    hidden, weight, bias, tokens = problem((600,), classes, 40, dtype)
    bias.add_(torch.linspace(0, 12 if rises else -12, classes, device=DEVICE))
    upstream = torch.randn(600, device=DEVICE)

    def step(path, compute_dtype=dtype):
        x = hidden.detach().to(compute_dtype).requires_grad_()
        log_probs = path(x, weight.to(compute_dtype), bias.to(compute_dtype))
        return log_probs.detach(), *torch.autograd.grad((log_probs * upstream).sum(), x)

    def plain(hidden, weight, bias):
        return -functional.cross_entropy(
            functional.linear(hidden, weight, bias), tokens, reduction="none"
        )

    mine = step(lambda x, w, b: linear_token_log_probs(x, w, tokens, bias=b, impl=impl).log_probs)
    eps = torch.finfo(dtype).eps
    for got, other, exact in zip(mine, step(plain), step(plain, torch.float64), strict=True):
        no_worse(got, other, exact, max(2e-5, 2 * eps) * max(1.0, exact.abs().max().item()))


@impls
def test_nothing_to_do(impl):
    *inputs, tokens = problem((3,), 50, 8, torch.bfloat16)
    inputs[0].fill_(float("nan"))
    mask = torch.zeros(3, dtype=torch.bool, device=DEVICE)
    upstream = torch.ones(2, 3, device=DEVICE)
    for zeros in results(ours, inputs, tokens, upstream, impl=impl, mask=mask):
        assert not zeros.any()
    inputs[0], tokens = inputs[0][:0], tokens[:0]
    out = results(ours, inputs, tokens, upstream[:, :0], impl=impl)
    assert out[0].shape == (0,)
    assert not out[3].any()


@impls
def test_memory_is_bounded(impl):
    """The logits would take 2.3 GiB in bfloat16; beside inputs and gradients, 1 GiB is enough."""
    if torch.cuda.get_device_properties(DEVICE).total_memory < 8 * 2**30:
        pytest.skip("needs 8 GiB of GPU memory")
    hidden, weight, _, tokens = problem((8192,), 151936, 1024, torch.bfloat16)
    hidden.requires_grad_()
    weight.requires_grad_()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = linear_token_log_probs(hidden, weight, tokens, entropy=True, impl=impl)
    (out.log_probs.sum() + out.entropy.sum()).backward()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    assert extra - hidden.nbytes - weight.nbytes <= 2**30


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("direction", [None, "reverse", "jensen_shannon"])
def test_stored_logits_are_those_that_are_multiplied_again(direction, dtype):
    """One tile holds all of these, and the backward pass leaves it as it is."""
    inputs = problem((60,), 5003, 64, dtype)
    tokens, ref_hidden = inputs[-1], inputs[0].roll(1, 0)
    outcomes = []
    for most_bytes in (0, 1 << 24):
        hidden, weight, bias = (x.detach().clone().requires_grad_() for x in inputs[:-1])
        with mock.patch.object(_stored, "MOST_BYTES", most_bytes):
            if direction is None:
                out = linear_token_log_probs(
                    hidden, weight, tokens, bias=bias, softcap=3.0
                ).log_probs
            else:
                head = {"bias": bias, "softcap": 3.0, "direction": direction}
                out = linear_exact_kl(hidden, weight, ref_hidden, weight.detach(), **head).kl
        for _ in range(2):
            grads = torch.autograd.grad(out.sum(), [hidden, weight, bias], retain_graph=True)
            outcomes.append([out.detach(), *grads])
    for other in outcomes[1:]:
        assert all(torch.equal(x, y) for x, y in zip(outcomes[0], other, strict=True))


@impls
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("classes", "width"), [(4097, 64), (257, 129)])
def test_bits_of_a_row_are_its_own(impl, dtype, classes, width):
    """Alone, in any batch and at any position."""
    hidden, weight, bias, tokens = problem((600,), classes, width, dtype)
    options = {"impl": impl, "batch_invariant": True}
    whole = torch.stack(ours(hidden, weight, bias, tokens, **options))
    order = torch.randperm(600, device=DEVICE)
    for chosen in (order, order[:256], order[:257], order[:1], order[100:300]):
        part = ours(hidden[chosen], weight, bias, tokens[chosen], **options)
        assert torch.equal(torch.stack(part), whole[:, chosen])


@impls
def test_shards_combine_to_the_whole(impl):
    hidden, weight, bias, tokens = problem((40,), 3000, 64, torch.bfloat16)
    mask = torch.arange(40, device=DEVICE) % 5 != 2
    options = {"mask": mask, "temperature": 0.8, "impl": impl}
    whole = ours(hidden, weight, bias, tokens, **options)
    parts = [
        VocabPart.of(
            *(hidden, weight[first:end], tokens),
            bias=bias[first:end],
            vocab_offset=first,
            entropy=True,
            **options,
        )
        for first, end in itertools.pairwise([0, 1000, 1001, 3000])
    ]
    for got, want in zip(VocabPart.combine(parts[::-1]), whole, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_shift_of_padded_rows_does_not_wait_for_the_device():
    """The host knows which rows it drops. A mask, or sequences at offsets, are on the device."""
    *inputs, tokens = problem((3, 4), 1001, 40, torch.bfloat16)
    upstream = torch.randn(2, 3, 4, device=DEVICE)
    expected = results(ours, inputs, tokens, upstream, impl="cuda", shift=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        mine = results(ours, inputs, tokens, upstream, impl="cuda", shift=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, mine, expected))


@impls
def test_runs_on_the_current_stream(impl):
    target, weight, bias, tokens = problem((64,), 8001, 64, torch.bfloat16)
    expected = ours(target, weight, bias, tokens, impl=impl)
    hidden = torch.zeros_like(target)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)  # a kernel on another stream would read the zeros
        hidden.copy_(target)
        out = ours(hidden, weight, bias, tokens, impl=impl)
        torch.cuda.current_stream().synchronize()
    assert all(map(torch.equal, out, expected))


@impls
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_runs_on_the_device_of_its_tensors(impl):
    *inputs, tokens = problem((64,), 8001, 64, torch.bfloat16)
    upstream = torch.randn(2, 64, device=DEVICE)
    expected = results(ours, inputs, tokens, upstream, impl=impl)
    with torch.cuda.device(0):
        there = [x.to("cuda:1") for x in inputs]
        mine = results(ours, there, tokens.to("cuda:1"), upstream.to("cuda:1"), impl=impl)
        assert torch.cuda.current_device() == 0
    for got, want in zip(mine, expected, strict=True):
        assert got.device == torch.device("cuda:1")
        assert torch.equal(got.to(want.device), want)
