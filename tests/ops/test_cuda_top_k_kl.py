"""The CUDA kernels of top_k_kl and linear_top_k_kl: against float64, and what GPUs alone have."""

from __future__ import annotations

import pytest
import torch

from fusedrl import linear_top_k_kl, top_k_kl
from fusedrl.ops.exact_kl import DIRECTIONS
from fusedrl.ops.top_k_kl.teachers import TAILS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
DEVICE = torch.device("cuda")
IMPL = DEVICE.type
INF = float("inf")
CLASSES = [1, 7, 8, 17, 129, 1000, 4097, 50257, 151936]
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}  # of gradients
WIDTH = 64
SHAPES = pytest.mark.parametrize("shape", [(12,), (3, 4)], ids=["packed", "padded"])


@pytest.fixture(autouse=True)
def _full_float32():
    # The module computes its attributes, which monkeypatch cannot put back.
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, False
    yield
    matmul.allow_tf32 = before


def known(shape, classes, k=20):
    """Ids in any order, with a gap, and log-probs of a teacher."""
    teacher, ids = (
        (torch.randn(*shape, classes, device=DEVICE) * 3).log_softmax(-1).topk(min(k, classes))
    )
    order = torch.randperm(ids.shape[-1], device=DEVICE)
    ids = ids[..., order]
    if ids.shape[-1] > 2:
        ids[..., 1] = -1
    return ids, teacher[..., order]


def logits_of(shape, classes, dtype):
    return ((torch.randn(*shape, classes, device=DEVICE) * 4).to(dtype),)


def head_of(shape, classes, dtype):
    """Hidden states, weight and bias."""
    parts = (
        torch.randn(*shape, WIDTH, device=DEVICE),
        3 * torch.randn(classes, WIDTH, device=DEVICE) / WIDTH**0.5,
        torch.randn(classes, device=DEVICE),
    )
    return tuple(x.to(dtype) for x in parts)


def run(inputs, *teacher, impl=IMPL, **options):
    """Of logits, or of hidden states, weight and bias."""
    if len(inputs) == 1:
        return top_k_kl(*inputs, *teacher, impl=impl, **options)
    hidden, weight, bias = inputs
    return linear_top_k_kl(hidden, weight, *teacher, bias=bias, impl=impl, **options)


# What makes the inputs of either op.
OPS = pytest.mark.parametrize("make", [logits_of, head_of])


def compare(inputs, *teacher, batch_invariant=None, **options):
    """Forward and all gradients beside the reference on the same values in float64."""
    dtype, upstream = inputs[0].dtype, torch.randn(teacher[0].shape[:-1], device=DEVICE)
    results = []
    for impl, kind in ((IMPL, dtype), ("reference", torch.float64)):
        leaves = [x.detach().to(kind).requires_grad_() for x in inputs]
        fixed = {} if impl == "reference" or batch_invariant is None else {"batch_invariant": True}
        divergence = run(leaves, *teacher, impl=impl, **fixed, **options)
        grads = torch.autograd.grad(divergence, leaves, upstream.to(divergence))
        results.append((divergence.detach(), *grads))
    (mine, *grads), (exact, *exact_grads) = results
    assert mine.dtype == torch.float32
    torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=2e-5)
    tol = ROUNDING[dtype]
    for got, want in zip(grads, exact_grads, strict=True):
        assert got.dtype == dtype
        # Those of a head's logits are rounded to the dtype too, before they are multiplied.
        largest = 0.0 if len(inputs) == 1 else want.abs().max().item()
        torch.testing.assert_close(got.double(), want, rtol=tol, atol=2e-5 + tol * largest)
    rows_read = exact_grads[0].flatten(0, -2).any(-1)
    assert not grads[0].flatten(0, -2)[~rows_read].any()  # zero, not almost


@OPS
@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("tail", TAILS)
def test_sizes_and_dtypes(make, dtype, classes, direction, tail):
    options = {"direction": direction, "tail": tail, "temperature": 0.7}
    compare(make((5,), classes, dtype), *known((5,), classes), **options)


@OPS
@pytest.mark.parametrize("beta", [1e-3, 0.9])
def test_the_mixture_of_any_beta(make, beta):
    inputs = make((5,), 1001, torch.float32)
    compare(inputs, *known((5,), 1001), direction="jensen_shannon", beta=beta)


@OPS
@pytest.mark.parametrize("k", [1, 600, 1001])
def test_one_id_more_than_a_block_has_threads_and_all_classes(make, k):
    compare(make((5,), 1001, torch.float32), *known((5,), 1001, k))


@OPS
@SHAPES
@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("tail", TAILS)
def test_shifts_and_masks(make, dtype, shape, shift, tail):
    inputs, (ids, teacher) = make(shape, 1001, dtype), known(shape, 1001)
    mask = torch.arange(12, device=DEVICE).view(shape) % 3 != 0
    rows = mask.flatten().roll(-1).view(shape) if shift else mask
    inputs[0][~rows] = float("nan")
    ids[~mask], teacher[~mask] = 10**9, float("nan")
    offsets = torch.tensor([0, 4, 4, 5, 12], device=DEVICE) if len(shape) == 1 else None
    compare(inputs, ids, teacher, mask=mask, offsets=offsets, shift=shift, tail=tail)


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("batch_invariant", [None, True])
def test_heads_with_options(dtype, batch_invariant):
    options = {"softcap": 5.0, "scale": 0.5, "batch_invariant": batch_invariant}
    compare(head_of((9,), 1001, dtype), *known((9,), 1001), **options)


def test_several_tiles_of_rows_and_classes():
    compare(head_of((16389,), 5001, torch.bfloat16), *known((16389,), 5001))


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_infinite_logits(dtype, direction):
    (logits,) = logits_of((7,), 9001, dtype)
    ids = torch.arange(8900, 8905, device=DEVICE).expand(7, -1).clone()
    teacher = torch.full((7, 5), 0.15, device=DEVICE).log()
    logits[0, :4500] = -INF
    logits[1, :8900] = logits[2, 8901] = logits[3, :8900] = logits[3, 8905:] = -INF
    finite = 2 if direction == "forward" else 4
    compare((logits[:finite],), ids[:finite], teacher[:finite], direction=direction)
    logits[4], logits[5, 17], logits[6, 9000] = -INF, float("nan"), INF
    mine, exact = (
        top_k_kl(x, ids, teacher, direction=direction, impl=impl)
        for x, impl in ((logits, IMPL), (logits.double(), "reference"))
    )
    assert exact.isnan().tolist() == [False] * 4 + [True] * 3
    torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("classes", [33, 1001, 50257])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_row_bits_depend_on_the_row_alone(dtype, classes, direction):
    (row,), (ids, teacher) = logits_of((1,), classes, dtype), known((1,), classes)
    alone = run((row,), ids, teacher, direction=direction)
    among = ids.expand(5, -1), teacher.expand(5, -1)
    for before in range(8):  # every distance of the row's start from a 16-byte boundary
        storage = torch.zeros(before + 5 * classes, dtype=dtype, device=DEVICE)
        logits = storage[before:].view(5, classes)
        logits[3] = row
        assert torch.equal(run((logits,), *among, direction=direction)[3], alone[0])


@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_row_bits_of_heads_with_batch_invariant(dtype):
    (hidden, weight, bias), (ids, teacher) = head_of((600,), 1001, dtype), known((600,), 1001)
    whole = run((hidden, weight, bias), ids, teacher, batch_invariant=True)
    for rows in (slice(0, 1), slice(5, 300), slice(599, 600)):
        some = hidden[rows], weight, bias
        assert torch.equal(run(some, ids[rows], teacher[rows], batch_invariant=True), whole[rows])


@OPS
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_equal_distributions_have_no_divergence(make, direction):
    inputs = make((9,), 50257, torch.float32)
    logits = inputs[0] if len(inputs) == 1 else torch.addmm(inputs[2], inputs[0], inputs[1].T)
    teacher, ids = logits.double().log_softmax(-1).topk(30)
    divergence = run(inputs, ids, teacher, direction=direction)
    torch.testing.assert_close(divergence, torch.zeros_like(divergence), rtol=0, atol=2e-6)


@OPS
@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3), (4,)])
def test_nothing_to_do(make, shape):
    leaves = [x.requires_grad_() for x in make(shape, 50, torch.bfloat16)]
    mask = torch.zeros(shape, dtype=torch.bool, device=DEVICE)
    divergence = run(leaves, *known(shape, 50), mask=mask)
    assert torch.equal(divergence, torch.zeros(shape, device=DEVICE))
    divergence.sum().backward()
    assert not any(x.grad.any() for x in leaves)


def test_more_than_two_to_the_31_logits():
    rows, classes = 2**15 + 9, 2**16 + 1
    if torch.cuda.get_device_properties(DEVICE).total_memory < 16 * 2**30:
        pytest.skip("needs 16 GiB of GPU memory")
    logits = torch.randn(classes, device=DEVICE).bfloat16().repeat(rows, 1)
    logits[-1] = logits[-1].flip(0)
    ids, teacher = (x.expand(rows, -1) for x in known((1,), classes))
    mask = torch.zeros(rows, dtype=torch.bool, device=DEVICE)
    mask[[0, -2, -1]] = True
    divergence = run((logits.requires_grad_(),), ids, teacher, mask=mask)
    alone = run((logits[[0, -1]].contiguous(),), ids[:2], teacher[:2])
    assert torch.equal(divergence[[0, -2, -1]], alone[[0, 0, 1]])
    (grad,) = torch.autograd.grad(divergence.sum(), logits)
    assert torch.equal(grad[0], grad[-2])
    assert grad[-1].any()
    assert not grad[1:-2].any()


@OPS
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("tail", TAILS)
def test_never_waits_for_the_device_where_every_row_is_kept(make, direction, tail):
    inputs, teacher = make((9,), 1001, torch.bfloat16), known((9,), 1001)
    temperature = torch.tensor(0.7, dtype=torch.float64, device=DEVICE)
    options = {"direction": direction, "tail": tail}
    expected = run(inputs, *teacher, temperature=0.7, **options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        divergence = run(inputs, *teacher, temperature=temperature, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(divergence, expected)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_runs_in_a_cuda_graph(direction):
    inputs, teacher = logits_of((5,), 1001, torch.float32), known((5,), 1001)
    temperature = torch.ones((), dtype=torch.float64, device=DEVICE)
    run(inputs, *teacher, temperature=temperature, direction=direction)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(inputs, *teacher, temperature=temperature, direction=direction)
    temperature.fill_(2.0)
    graph.replay()
    assert torch.equal(captured, run(inputs, *teacher, temperature=2.0, direction=direction))
