"""Every op on a GPU as graphs need it: nothing waits, a capture holds it, scalars may change."""

from __future__ import annotations

import itertools

import pytest
import torch

from fusedrl import linear_token_log_probs, token_kl, token_log_probs
from fusedrl.ops import _dispatch

from .every_case import EVERY, leaves_of

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
on_gpu = pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])


def case_of(name, device):
    """The case without what makes the host count the rows of a head."""
    case = EVERY[name].to(device)
    if name.startswith("linear"):
        dropped = {"mask": None, "shift": False}
        case = case._replace(others=case.others | dropped)
    return case


def step_of(name, device):
    """What calls the op and its backward pass, and the inputs that it reads."""
    case = case_of(name, device)
    inputs = leaves_of(case, device=device)
    upstream = [
        torch.linspace(1, 2, x.numel(), device=device).view_as(x) for x in case.call(inputs)
    ]

    def step():
        results = case.call(inputs)
        return [*results, *torch.autograd.grad(results, list(inputs.values()), upstream)]

    return step, inputs


each = pytest.mark.parametrize("name", EVERY)


@each
@on_gpu
def test_no_op_waits_for_the_device(name, device):
    step, _ = step_of(name, device)
    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@each
@on_gpu
def test_no_backward_pass_waits_where_rows_are_dropped(name, device):
    """The forward pass does, to count the rows of a head."""
    case = EVERY[name].to(device)
    inputs = leaves_of(case, device=device, requires_grad=True)
    results = case.call(inputs)
    upstream = [torch.ones_like(x) for x in results]
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(results, list(inputs.values()), upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@each
@on_gpu
def test_a_graph_holds_an_op_and_its_backward_pass(name, device):
    step, inputs = step_of(name, device)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    with torch.no_grad():
        for x in inputs.values():
            x.mul_(0.9)
    for _ in range(2):
        graph.replay()
    for got, want in zip(captured, step(), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("name", [name for name in EVERY if name.startswith("linear")])
def test_numbers_may_be_captured_that_an_op_makes_tensors_of(name, monkeypatch):
    """A tensor of the caller's on the CPU is refused; one that is made of a number is not."""
    monkeypatch.setattr(_dispatch, "is_capturing", lambda device: True)
    case = case_of(name, "cpu")
    case.call(leaves_of(case))


SLOW_ON_CPU = [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=GPU)]


@pytest.mark.parametrize("device", SLOW_ON_CPU)
def test_a_graph_with_little_overhead_follows_temperature_and_coeff(device):
    """Inductor captures what is around the ops, and keeps the first value of nothing."""

    def loss(hidden, weight, tokens, temperature, coeff):
        log_probs = linear_token_log_probs(
            hidden * 2, weight, tokens, temperature=temperature
        ).log_probs
        ref = token_log_probs(hidden.detach() @ weight.T, tokens, temperature=temperature).log_probs
        return (token_kl(log_probs, ref, reward=log_probs, coeff=coeff).reward * 3).sum()

    inputs = torch.randn(6, 8, device=device), torch.randn(17, 8, device=device)
    tokens = torch.randint(0, 17, (6,), device=device)
    compiled = torch.compile(loss, mode="reduce-overhead", fullgraph=True)
    changing = ((1.0, 0.1), (0.7, 0.1), (0.7, 0.4), (2.0, 0.0), (1.0, 0.1))
    for values, where in itertools.product(changing, {device, "cpu"}):
        scalars = [torch.tensor(x, dtype=torch.float64, device=where) for x in values]
        torch.compiler.cudagraph_mark_step_begin()
        found = []
        for run in (compiled, loss):
            leaves = [x.clone().requires_grad_() for x in inputs]
            value = run(*leaves, tokens, *scalars)
            grads = torch.autograd.grad(value, leaves)
            found.append([value.detach().clone(), *(x.clone() for x in grads)])
        torch.testing.assert_close(*found)
