"""What CUDA graphs ask of every op, seen without a GPU: ``meta`` stands for the device."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.utils import (
    is_cudagraph_unsafe_fx_node,
)
from torch.utils._python_dispatch import TorchDispatchMode

from fusedrl import linear_exact_kl, token_log_probs
from fusedrl.ops import _dispatch, _stored

from .every_case import EVERY, leaves_of

DROPS_ROWS = {name for name in EVERY if name.startswith("linear")}


class NoWaits(TorchDispatchMode):
    """Fails at a copy between host and device that is waited for; torch at a read on meta."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if kwargs and kwargs.get("non_blocking"):
            return out
        if func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_):
            source = args[1] if func.overloadpacket is torch.ops.aten.copy_ else args[0]
            assert source.device == out.device, f"{func} from {source.device} to {out.device}"
        return out


@pytest.fixture
def device(monkeypatch):
    """A device whose tensors count as tensors with values, so that what reads them shows."""
    monkeypatch.setattr(_dispatch, "has_values", lambda tensor: True)
    # Logits are stored for kept rows alone, whose number is not known there.
    monkeypatch.setattr(_stored, "MOST_BYTES", 0)
    return "meta"


@pytest.fixture
def capturing(monkeypatch):
    monkeypatch.setattr(_dispatch, "is_capturing", lambda device: True)


def ops():
    names = {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    return sorted(name for name in names if name.startswith("fusedrl::"))


@pytest.mark.parametrize("name", ops())
def test_inductor_captures_no_op(name):
    """They read scalars on the host, which a graph would keep, or wait for a number of rows."""
    if name == "fusedrl::rounds_grads":
        pytest.skip("its result is on the CPU, where nothing is captured")
    op = getattr(torch.ops.fusedrl, name.removeprefix("fusedrl::")).default
    node = torch.fx.Graph().call_function(op)
    assert is_cudagraph_unsafe_fx_node(node)


@pytest.mark.parametrize("name", EVERY)
def test_nothing_waits_for_the_device(device, name):
    case = EVERY[name].to(device)
    inputs = leaves_of(case, torch.bfloat16, device)
    with NoWaits():
        results = case.call(inputs)
        torch.autograd.backward(results, [torch.ones_like(x) for x in results])


@pytest.mark.parametrize("name", EVERY)
def test_a_capture_is_refused_where_the_host_has_to_count_rows(capturing, name):
    case = EVERY[name].to("meta")
    if name in DROPS_ROWS:
        with pytest.raises(
            RuntimeError, match=r"mask, shift: expected None .* capture of a CUDA graph"
        ):
            case.call(case.inputs)
    else:
        case.call(case.inputs)


def test_a_shift_drops_rows_too(capturing):
    hidden, weight = torch.empty(2, 4, 3, device="meta"), torch.empty(5, 3, device="meta")
    with pytest.raises(RuntimeError, match=r"None and False in the capture .*got shift=True"):
        linear_exact_kl(hidden, weight, hidden, weight, shift=True)


def test_a_scalar_on_the_cpu_is_refused_in_a_capture(capturing):
    rows = torch.empty(4, 5, device="meta"), torch.empty(4, dtype=torch.int64, device="meta")
    for fits in (0.7, torch.ones((), device="meta")):
        token_log_probs(*rows, temperature=fits)
    with pytest.raises(RuntimeError, match=r"temperature: .*\.to\('meta'\) before the capture"):
        token_log_probs(*rows, temperature=torch.ones(()))


def test_a_capture_is_of_the_current_stream_of_cuda(monkeypatch):
    asked = []
    monkeypatch.setattr(
        torch.cuda, "is_current_stream_capturing", lambda: asked.append(True) or True
    )
    assert not _dispatch.is_capturing(torch.device("cpu")) and not asked
    assert _dispatch.is_capturing(torch.device("cuda", 0)) and asked
