"""What torch asks of top_k_kl and linear_top_k_kl: schemas that tell the truth, and one graph."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from fusedrl import linear_top_k_kl, top_k_kl
from fusedrl.ops.exact_kl import DIRECTIONS

SAMPLES = {
    "packed": ((9,), torch.tensor([0, 3, 3, 9])),
    "padded": ((3, 3), None),
}
OPS = torch.ops.fusedrl


def teacher_of(shape):
    log_probs, ids = torch.randn(*shape, 20).log_softmax(-1).topk(4)
    ids[..., 0, 2] = -1
    return ids, log_probs


def batch(kind, shift):
    """What follows the rows in the ops' arguments."""
    shape, offsets = SAMPLES[kind]
    mask, temperature = torch.rand(shape) < 0.7, torch.tensor(0.9, dtype=torch.float64)
    return teacher_of(shape)[0], mask, offsets, shift, temperature


def head_of(shape, dtype=torch.float32):
    return [x.to(dtype) for x in (torch.randn(*shape, 6), torch.randn(20, 6), torch.randn(20))]


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shift", [False, True])
def test_opcheck_top_k_kl(kind, dtype, shift):
    args = torch.randn(*SAMPLES[kind][0], 20).to(dtype), *batch(kind, shift)
    torch.library.opcheck(OPS.top_k_kl_log_probs.default, args)
    results = OPS.top_k_kl_log_probs(*args)
    backward = (torch.randn_like(results[0]), *args, *results)
    torch.library.opcheck(OPS.top_k_kl_log_probs_backward.default, backward)


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("full", [False, True])
def test_opcheck_linear_top_k_kl(kind, dtype, full):
    hidden, weight, bias = head_of(SAMPLES[kind][0], dtype)
    args = (hidden, weight, bias if full else None, *batch(kind, full))
    args += (1.5, 4.0) if full else (1.0, 0.0)
    forward = (*args, full, 1 << 20)  # blocks of a fixed size store no products
    torch.library.opcheck(OPS.linear_top_k_kl_log_probs.default, forward)
    results = OPS.linear_top_k_kl_log_probs(*forward)
    for wanted in ((True, True, full), (True, False, False), (False, False, full)):
        backward = (torch.randn_like(results[0]), *args, *results, full, *wanted)
        torch.library.opcheck(OPS.linear_top_k_kl_log_probs_backward.default, backward)


@pytest.fixture
def graphs():
    """Counts the graphs that torch.compile makes."""
    torch._dynamo.reset()
    yield CompileCounter()
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("linear", [False, True])
def test_one_graph_over_twenty_temperatures(graphs, kind, direction, linear):
    shape, offsets = SAMPLES[kind]
    ids, teacher = teacher_of(shape)
    hidden, weight, bias = head_of(shape)
    mask, logits = torch.rand(shape) < 0.7, torch.randn(*shape, 20)
    options = {"direction": direction, "offsets": offsets, "shift": True}
    rows = (hidden if linear else logits).requires_grad_()

    def loss(rows, temperature):
        if linear:
            known = (ids, teacher, mask)
            kl = linear_top_k_kl(
                rows, weight, *known, bias=bias, softcap=3.0, temperature=temperature, **options
            )
        else:
            kl = top_k_kl(rows, ids, teacher, mask, temperature=temperature, **options)
        return kl.sum()

    compiled = torch.compile(loss, backend=graphs, fullgraph=True)
    for temperature in torch.linspace(0.5, 2.0, 20).unbind():
        expected = loss(rows, float(temperature))
        torch.testing.assert_close(compiled(rows, temperature), expected)
    assert graphs.frame_count == 1


def test_twenty_lengths_make_at_most_two_graphs(graphs):
    """One for the first length, one with the length as a symbol."""

    def loss(logits, ids, teacher):
        return top_k_kl(logits, ids, teacher, shift=True).sum()

    compiled = torch.compile(loss, backend=graphs, fullgraph=True)
    for length in range(5, 25):
        logits, known = torch.randn(2, length, 20), teacher_of((2, length))
        torch.testing.assert_close(compiled(logits, *known), loss(logits, *known))
    assert graphs.frame_count <= 2


@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
@pytest.mark.parametrize("frozen", [(), (0,), (1, 2)], ids=str)
def test_backward_through_aot_autograd(tail, frozen):
    torch._dynamo.reset()
    ids, teacher = teacher_of((9,))
    mask, offsets = torch.rand(9) < 0.7, torch.tensor([0, 3, 3, 9])
    options = {"tail": tail, "offsets": offsets, "shift": True}

    def loss(hidden, weight, bias):
        known = (ids, teacher, mask)
        from_hidden = linear_top_k_kl(hidden * 2, weight, *known, bias=bias, **options)
        from_logits = top_k_kl(hidden @ weight.T, *known, direction="forward", **options)
        return ((from_hidden - from_logits) * torch.arange(9)).sum()

    grads, head = [], head_of((9,))
    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        leaves = [x.clone().requires_grad_(i not in frozen) for i, x in enumerate(head)]
        function(*leaves).backward()
        grads.append([x.grad for x in leaves if x.requires_grad])
    torch.testing.assert_close(*grads)
    assert all(grad.any() for grad in grads[0])
