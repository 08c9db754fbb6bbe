"""Tensors without values: every op answers with shapes and dtypes, on ``meta`` and when fake."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from .every_case import FEW, leaves_of

KINDS = [(torch.float32, True), (torch.bfloat16, False), (torch.float64, True)]


def described(tensors):
    return [(tuple(x.shape), x.dtype, x.requires_grad) for x in tensors]


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize(("dtype", "requires_grad"), KINDS)
def test_meta_in_meta_out(name, dtype, requires_grad):
    case = FEW[name]
    expected = case.call(leaves_of(case, dtype, "cpu", requires_grad))
    results = case.to("meta").call(leaves_of(case, dtype, "meta", requires_grad))
    assert all(x.is_meta for x in results)
    assert described(results) == described(expected)


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize(("dtype", "requires_grad"), KINDS[:2])
def test_fake_in_fake_out(name, dtype, requires_grad):
    case = FEW[name]
    expected = described(case.call(leaves_of(case, dtype, "cpu", requires_grad)))
    leaves, fake = leaves_of(case, dtype, "cpu", requires_grad), FakeTensorMode()
    with fake:
        inputs = {name: fake.from_tensor(x) for name, x in leaves.items()}
        results = case.mapped(fake.from_tensor).call(inputs)
        assert described(results) == expected
        if requires_grad:
            torch.autograd.backward([x.sum() for x in results])


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", FEW)
def test_a_companion_on_another_device_is_refused(name, device):
    there = {"cpu": "meta", "meta": "cpu"}[device]
    case = FEW[name].to(device)
    arguments = case.inputs | case.others
    for moved in [k for k, v in arguments.items() if isinstance(v, torch.Tensor) and v.dim()][1:]:
        change = {moved: torch.empty_like(arguments[moved], device=there)}
        with pytest.raises(ValueError, match=f"^{moved}: expected device {device}, got {there}"):
            case.op(**arguments | change)


def test_a_default_device_changes_nothing():
    for name, case in FEW.items():
        expected = case.call(case.inputs)
        with torch.device("meta"):
            results = case.call(case.inputs)
        assert all(map(torch.equal, results, expected)), name
