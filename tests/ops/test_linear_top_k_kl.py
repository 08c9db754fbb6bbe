"""linear_top_k_kl: against top_k_kl of the same logits in float64."""

from __future__ import annotations

import sys

import pytest
import torch
from programs import python

from fusedrl import linear_top_k_kl, top_k_kl
from fusedrl.ops.exact_kl import DIRECTIONS
from fusedrl.ops.top_k_kl.teachers import TAILS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (7, 4), (33, 300), (5, 4097), (70, 9000)]  # rows, classes


def sample(rows, classes, dtype=torch.float32, width=24, k=6):
    """Hidden states, weight, bias, ids and the teacher's log-probs."""
    head = torch.randn(rows, width), torch.randn(classes, width) * 0.4, torch.randn(classes)
    teacher, ids = (torch.randn(rows, classes) * 3).log_softmax(-1).topk(min(k, classes))
    return [x.to(dtype) for x in head], ids, teacher


def materialised(head, ids, teacher, softcap=None, scale=1.0, **options):
    """top_k_kl of logits that exist, in float64."""
    hidden, weight, bias = (x.double() for x in head)
    logits = scale * (hidden @ weight.T + bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return top_k_kl(logits, ids, teacher, impl="reference", **options)


def ours(head, ids, teacher, **options):
    hidden, weight, bias = head
    return linear_top_k_kl(hidden, weight, ids, teacher, bias=bias, **options)


def gradients(function, head, upstream):
    leaves = [x.detach().clone().requires_grad_() for x in head]
    out = function(leaves)
    return torch.autograd.grad(out, leaves, upstream.to(out))


OPTIONS = [{}, {"softcap": 3.0, "scale": 1.7, "temperature": 0.8}, {"batch_invariant": True}]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_values_and_gradients_of_materialised_logits(dtype, shape, direction, tail, options):
    head, ids, teacher = sample(*shape, dtype)
    ids[0, 0] = -1
    options = {"direction": direction, "tail": tail, **options}
    truth_options = {k: v for k, v in options.items() if k != "batch_invariant"}
    upstream = torch.randn(shape[0])

    def path(head):
        return ours(head, ids, teacher, **options)

    def exact(head):
        return materialised(head, ids, teacher, **truth_options)

    values = path(head)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values.double(), exact(head), rtol=2e-5, atol=1e-5)
    for got, want in zip(
        gradients(path, head, upstream), gradients(exact, head, upstream), strict=True
    ):
        assert got.dtype == dtype
        size = want.abs().max().item()
        torch.testing.assert_close(
            got.double(), want.double(), rtol=2 * torch.finfo(dtype).eps, atol=2e-5 * (1 + size)
        )


@pytest.mark.parametrize("frozen", [(), (0,), (1, 2), (0, 2)], ids=str)
def test_only_what_requires_grad_gets_one(frozen):
    head, ids, teacher = sample(9, 300)
    upstream = torch.randn(9)
    everything = gradients(lambda head: ours(head, ids, teacher), head, upstream)
    leaves = [x.clone().requires_grad_(i not in frozen) for i, x in enumerate(head)]
    ours(leaves, ids, teacher).backward(upstream)
    for i, (leaf, grad) in enumerate(zip(leaves, everything, strict=True)):
        assert leaf.grad is None if i in frozen else torch.equal(leaf.grad, grad)


def test_reference_passes_gradcheck():
    head, ids, teacher = sample(4, 9, torch.float64, width=3, k=4)
    mask = torch.tensor([True, False, True, True])

    def function(*head):
        return ours(head, ids, teacher, mask=mask, softcap=2.0, scale=1.3)

    assert torch.autograd.gradcheck(function, [x.requires_grad_() for x in head])


def test_a_row_in_blocks_of_a_fixed_size_stands_alone():
    head, ids, teacher = sample(150, 5000)
    options = {"batch_invariant": True}
    whole = ours(head, ids, teacher, **options)
    for rows in (torch.randperm(150), torch.tensor([5]), torch.arange(40, 130)):
        part = ours([head[0][rows], *head[1:]], ids[rows], teacher[rows], **options)
        assert torch.equal(part, whole[rows])


def test_under_autocast():
    head, ids, teacher = sample(9, 300)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = ours(head, ids, teacher)
    assert mixed.dtype == torch.float32
    assert torch.equal(mixed, ours([x.bfloat16() for x in head], ids, teacher))


# 2048 tokens of which 30% are kept, too many to store; a tensor of logits would have 250 MiB.
MEMORY = """
import sys
from pathlib import Path

import torch
from fusedrl import linear_top_k_kl, top_k_kl

torch.manual_seed(0)
torch.set_num_threads(1)


def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(x.split()[1]) for x in lines if x.startswith(field))


def run(hidden, weight, *teacher):
    if sys.argv[1] == "materialise":
        kl = top_k_kl(hidden @ weight.T, *teacher)
    else:
        kl = linear_top_k_kl(hidden, weight, *teacher)
    kl.sum().backward()


def batch(tokens, classes):
    ids = torch.rand(tokens, classes // 100).topk(32).indices
    mask = torch.arange(tokens) % 10 < 3
    hidden, weight = torch.randn(tokens, 256), torch.randn(classes, 256)
    return hidden.requires_grad_(), weight.requires_grad_(), ids, torch.full(ids.shape, -6.0), mask


run(*batch(64, 3200))
arguments = batch(2048, 32000)
arguments[1].grad = torch.ones_like(arguments[1])
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
run(*arguments)
# The new gradient is added to the one that is there: it is no part of what the op needs.
print(status("VmHWM") - before - arguments[1].nbytes)
"""


def extra_memory(way):
    done = python("-c", MEMORY, way)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_memory_is_bounded():
    logits = 2048 * 32000 * 4
    assert extra_memory("fused") < logits / 10
    assert extra_memory("materialise") > 1.5 * logits
