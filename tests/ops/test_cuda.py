"""The CUDA kernels of both ops: against float64, and what GPUs alone have (streams, asserts)."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from accuracy import no_worse

from fusedrl import token_kl, token_log_probs
from fusedrl.ops.token_kl import ESTIMATORS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
DEVICE = torch.device("cuda")
HALVES = [torch.float32, torch.bfloat16, torch.float16]
# Around packs, warps and batches of packs; odd ones leave every other row misaligned.
CLASSES = [1, 2, 7, 8, 9, 15, 16, 17, 31, 127, 129, 1000, 4097, 16391, 50257, 151936]
PACKED = torch.tensor([0, 4, 4, 5, 12])


def ours(logits, tokens, *args, **kwargs):
    """Log-probs, and with them the entropy if it is asked for."""
    found = token_log_probs(logits, tokens, *args, impl="cuda", **kwargs)
    return found.log_probs if found.entropy is None else found


def torch_path(logits, tokens, temperature):
    log_softmax = torch.log_softmax(logits / temperature, -1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return log_softmax.gather(-1, tokens[..., None]).squeeze(-1), entropy


def sample(shape, dtype, scale=4.0):
    logits = (torch.randn(shape, device=DEVICE) * scale).to(dtype)
    return logits, torch.randint(0, shape[-1], shape[:-1], device=DEVICE)


def gradient(path, logits, tokens, *args, **kwargs):
    leaf = logits.detach().clone().requires_grad_()
    log_probs, entropy = path(leaf, tokens, *args, **kwargs)
    n = torch.arange(1, tokens.numel() + 1, device=DEVICE).reshape(tokens.shape) / tokens.numel()
    ((log_probs * n).sum() - (entropy * n * n).sum()).backward()
    return leaf.grad


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_no_worse_than_torch_in_the_same_dtype(dtype, classes, temperature):
    logits, tokens = sample((9, classes), dtype)
    mine = ours(logits, tokens, temperature=temperature, entropy=True)
    theirs = torch_path(logits, tokens, temperature)
    truth = torch_path(logits.double(), tokens, temperature)
    for got, other, exact in zip(mine, theirs, truth, strict=True):
        no_worse(got, other, exact, 3e-6)
    # Without entropy another kernel runs.
    torch.testing.assert_close(ours(logits, tokens, temperature=temperature), mine.log_probs)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("classes", CLASSES)
def test_gradient_no_worse_than_torch_in_the_same_dtype(dtype, classes):
    logits, tokens = sample((5, classes), dtype)
    grad = gradient(ours, logits, tokens, temperature=0.7, entropy=True)
    assert grad.dtype == dtype
    theirs = gradient(torch_path, logits, tokens, 0.7)
    no_worse(grad, theirs, gradient(torch_path, logits.double(), tokens, 0.7), 3e-6)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [(12, 1001), (3, 4, 1001)], ids=["packed", "padded"])
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_equals_the_reference(dtype, shape, shift, masked):
    logits, tokens = sample(shape, dtype)
    options = {
        "mask": torch.rand(shape[:-1], device=DEVICE) < 0.6 if masked else None,
        "offsets": PACKED.to(DEVICE) if len(shape) == 2 else None,
        "shift": shift,
        "temperature": 1.3,
        "entropy": True,
    }
    mine = token_log_probs(logits, tokens, impl="cuda", **options)
    exact = token_log_probs(logits.double(), tokens, impl="reference", **options)
    for got, want in zip(mine, exact, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=3e-6, atol=3e-6)

    def path(logits, tokens):
        impl = "reference" if logits.dtype == torch.float64 else "cuda"
        return token_log_probs(logits, tokens, impl=impl, **options)

    grad, truth = gradient(path, logits, tokens), gradient(path, logits.double(), tokens)
    torch.testing.assert_close(grad, truth.to(dtype))
    # Rows without a kept token are zero, not almost.
    assert torch.equal(grad.flatten(0, -2).any(-1), truth.flatten(0, -2).any(-1))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_dropped_rows_are_not_read(poison):
    logits, tokens = sample((12, 1001), torch.bfloat16)
    mask = torch.arange(12, device=DEVICE) % 3 != 0
    expected = ours(logits, tokens, mask, entropy=True)
    poisoned = logits.masked_fill(~mask[:, None], poison)
    wrong = tokens.masked_fill(~mask, -100)
    for got, want in zip(ours(poisoned, wrong, mask, entropy=True), expected, strict=True):
        assert torch.equal(got, want)
    grad = gradient(ours, poisoned, wrong, mask, entropy=True)
    assert torch.equal(grad, gradient(ours, logits, tokens, mask, entropy=True))
    assert not grad[~mask].any()


@pytest.mark.parametrize("dtype", HALVES)
def test_infinite_and_extreme_logits(dtype):
    logits, tokens = sample((6, 9001), dtype)
    logits[0, :4000] = -float("inf")
    logits[1, 1:] = -float("inf")
    logits[2, 3000:] = torch.finfo(dtype).min
    logits[3] = -float("inf")
    logits[4, 17] = float("nan")
    logits[5, 8999] = float("inf")
    tokens[:2] = torch.tensor([5000, 0])
    mine = ours(logits, tokens, temperature=0.5, entropy=True)
    exact = token_log_probs(
        logits.double(), tokens, temperature=0.5, entropy=True, impl="reference"
    )
    for got, want in zip(mine, exact, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=3e-6, atol=1e-5, equal_nan=True)
    grad = gradient(ours, logits[:3], tokens[:3], temperature=0.5, entropy=True)
    assert grad.isfinite().all()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("classes", [33, 1001, 50257])
def test_row_bits_depend_on_the_row_alone(dtype, classes):
    row, _ = sample((1, classes), dtype)
    token = torch.tensor([classes // 2], device=DEVICE)
    alone = ours(row, token, entropy=True)
    for before in range(8):  # every distance of the row's start from a 16-byte boundary
        storage = torch.zeros(before + 5 * classes, dtype=dtype, device=DEVICE)
        among = storage[before:].view(5, classes)
        among[3] = row
        for got, want in zip(ours(among, token.expand(5), entropy=True), alone, strict=True):
            assert torch.equal(got[3], want[0])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("classes", [32000, 151936])
def test_row_bits_where_blocks_share_a_row(dtype, classes):
    """Few rows are split among blocks, 640 are more than any GPU takes at a time."""
    logits, tokens = sample((640, classes), dtype)
    many, few = (ours(logits[:n], tokens[:n], entropy=True) for n in (640, 3))
    for got, want in zip(few, many, strict=True):
        assert torch.equal(got, want[:3])


@pytest.mark.parametrize("dtype", HALVES)
def test_strided_and_misaligned_views(dtype):
    wide, _ = sample((3, 7, 1010), dtype)
    for view in (wide[:, 1:, 5:1006], wide[:, ::2, 3:], wide[1:, :, :-1], wide.transpose(0, 1)):
        tokens = torch.randint(0, view.shape[-1], view.shape[:-1], device=DEVICE)
        dense = view.contiguous()
        for got, want in zip(
            ours(view, tokens, shift=True, entropy=True),
            ours(dense, tokens, shift=True, entropy=True),
            strict=True,
        ):
            assert torch.equal(got, want)
        args = {"shift": True, "entropy": True}
        leaf = wide.detach().clone().requires_grad_()
        same = leaf.as_strided(view.shape, view.stride(), view.storage_offset())
        log_probs, entropy = ours(same, tokens, **args)
        (grad,) = torch.autograd.grad((log_probs + entropy).sum(), same)
        other = dense.clone().requires_grad_()
        log_probs, entropy = ours(other, tokens, **args)
        assert torch.equal(grad, torch.autograd.grad((log_probs + entropy).sum(), other)[0])


@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5), (0, 3, 5)])
def test_nothing_to_do(shape):
    logits = torch.randn(shape, device=DEVICE, requires_grad=True)
    tokens = torch.zeros(shape[:-1], dtype=torch.int64, device=DEVICE)
    log_probs = ours(logits, tokens)
    assert log_probs.shape == shape[:-1]
    log_probs.sum().backward()
    assert logits.grad is not None
    assert logits.grad.shape == shape
    assert token_kl(log_probs, log_probs, impl="cuda").kl.shape == shape[:-1]


def test_more_than_two_to_the_31_logits():
    rows, classes = 2**15 + 9, 2**16 + 1
    if torch.cuda.get_device_properties(DEVICE).total_memory < 16 * 2**30:
        pytest.skip("needs 16 GiB of GPU memory")
    logits = torch.randn(classes, device=DEVICE).bfloat16().repeat(rows, 1)
    logits[-1] = logits[-1].flip(0)
    tokens = torch.full((rows,), 3, device=DEVICE)
    mask = torch.zeros(rows, dtype=torch.bool, device=DEVICE)
    mask[[0, -2, -1]] = True
    log_probs = ours(logits.requires_grad_(), tokens, mask)
    alone = ours(logits[[0, -1]].contiguous(), tokens[:2])
    assert torch.equal(log_probs[[0, -2, -1]], alone[[0, 0, 1]])
    (grad,) = torch.autograd.grad(log_probs.sum(), logits)
    assert torch.equal(grad[0], grad[-2])
    assert grad[-1, 3] > 0
    assert not grad[1:-2].any()


@pytest.mark.parametrize("dtype", [*HALVES, torch.float64])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("nan", ["propagate", "missing"])
@pytest.mark.parametrize("per", ["token", "sequence"])
def test_token_kl_equals_the_reference(dtype, estimator, nan, per):
    p = (-torch.rand(1500, device=DEVICE) * 3).to(dtype)
    q = (-torch.rand(1500, device=DEVICE) * 3).to(dtype)
    p[7] = q[600] = float("nan")
    mask = torch.rand(1500, device=DEVICE) < 0.8
    offsets = torch.tensor([0, 700, 700, 701, 1500], device=DEVICE)
    reward = torch.randn(1500 if per == "token" else 4, device=DEVICE).to(dtype)

    def run(impl, dtype):
        a, b = (x.to(dtype).detach().clone().requires_grad_() for x in (p, q))
        kl, penalised = token_kl(
            a,
            b,
            mask,
            offsets=offsets if per == "sequence" else None,
            estimator=estimator,
            reward=reward.to(dtype),
            coeff=0.3,
            nan=nan,
            impl=impl,
        )
        (kl.sum() * 2 - (penalised * torch.arange(1500, device=DEVICE) / 1500).sum()).backward()
        return kl, penalised, a.grad, b.grad

    for got, want in zip(run("cuda", dtype), run("reference", torch.float64), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got, want.to(dtype), equal_nan=True)


def kernels_of(function):
    """The names of the kernels and copies that a call runs on the device."""
    function()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    of_device = torch.autograd.DeviceType.CUDA
    return [event.name for event in profile.events() if event.device_type == of_device]


def test_kl_computation_is_one_kernel_over_a_stack():
    pytest.importorskip("torchrl")
    from tensordict import TensorDict, lazy_stack

    from fusedrl import KLComputation

    def of(device):
        generator = torch.Generator().manual_seed(0)
        made = [torch.randn(3, n, generator=generator).to(device) for n in range(1, 257)]
        keys = (("log_probs", "full"), ("ref_log_probs", "full"), "reward")
        return lazy_stack(
            [
                TensorDict(dict(zip(keys, (*x[:2].clone(), x[2:].mT.clone()), strict=True)))
                for x in made
            ]
        )

    transform, data, expected = KLComputation(coeff=0.1), of(DEVICE), of("cpu")
    names = kernels_of(lambda: transform(data.copy()))
    assert sum("forward_tokens" in name for name in names) == 1
    torch.cuda.set_sync_debug_mode("error")
    try:
        transform(data)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    transform(expected)
    for key in ("kl_penalty", "reward"):
        rows = zip(data.get(key, as_list=True), expected.get(key, as_list=True), strict=True)
        for mine, other in rows:
            torch.testing.assert_close(mine.cpu(), other)


def test_scalars_on_the_device_are_read_there():
    logits, tokens = sample((5, 1001), torch.bfloat16)
    temperature = torch.tensor(0.7, dtype=torch.float64, device=DEVICE)
    coeff = torch.tensor(0.1, dtype=torch.float64, device=DEVICE)
    expected = ours(logits, tokens, temperature=0.7)
    expected_reward = token_kl(expected, expected - 1, reward=expected, coeff=0.1).reward
    torch.cuda.set_sync_debug_mode("error")
    try:
        log_probs = ours(logits, tokens, temperature=temperature)
        reward = token_kl(log_probs, log_probs - 1, reward=log_probs, coeff=coeff).reward
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(log_probs, expected)
    assert torch.equal(reward, expected_reward)


def test_runs_in_a_cuda_graph():
    logits, tokens = sample((5, 1001), torch.float32)
    temperature = torch.ones((), dtype=torch.float64, device=DEVICE)
    ours(logits, tokens, temperature=temperature)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ours(logits, tokens, temperature=temperature)
    temperature.fill_(2.0)
    graph.replay()
    assert torch.equal(captured, ours(logits, tokens, temperature=2.0))


def test_runs_on_the_current_stream():
    target, tokens = sample((64, 8001), torch.float32)
    expected = ours(target, tokens)
    logits = torch.zeros_like(target)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)  # a kernel on another stream would read the zeros
        logits.copy_(target)
        log_probs = ours(logits, tokens)
        reward = token_kl(log_probs, log_probs, reward=log_probs, impl="cuda").reward
        torch.cuda.current_stream().synchronize()
    assert torch.equal(log_probs, expected)
    assert torch.equal(reward, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_runs_on_the_device_of_its_tensors():
    logits, tokens = sample((64, 8001), torch.float32)
    expected = ours(logits, tokens)
    with torch.cuda.device(0):
        logits, tokens = logits.to("cuda:1"), tokens.to("cuda:1")
        log_probs = ours(logits, tokens)
        kl = token_kl(log_probs, log_probs - 1, impl="cuda").kl
        assert torch.cuda.current_device() == 0
    assert log_probs.device == kl.device == logits.device
    assert torch.equal(log_probs.to(expected.device), expected)
    with pytest.raises(
        RuntimeError, match="temperature: expected a tensor on the CPU or on cuda:1"
    ):
        ours(logits, tokens, temperature=torch.ones((), device="cuda:0"))


@pytest.mark.parametrize("token", [-1, 5])
def test_a_kept_token_outside_the_vocabulary_trips_an_assert(token):
    script = f"""
import torch
from fusedrl import token_log_probs
tokens = torch.tensor([0, {token}], device="cuda")
token_log_probs(torch.zeros(2, 5, device="cuda"), tokens, impl="cuda")
torch.cuda.synchronize()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode != 0
    assert "tokens: expected values in [0, V)" in done.stderr
    assert "device-side assert" in done.stderr
