"""Tensors without values: every op answers with shapes and dtypes, on ``meta`` and when fake."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedrl import VocabPart, token_log_probs
from fusedrl.integrations.trl import selective_log_softmax, selective_log_softmax_and_entropy

from .every_case import EVERY, leaves_of

KINDS = [(torch.float32, True), (torch.bfloat16, False), (torch.float64, True)]


def described(tensors):
    return [(tuple(x.shape), x.dtype, x.requires_grad) for x in tensors]


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(("dtype", "requires_grad"), KINDS)
def test_meta_in_meta_out(name, dtype, requires_grad):
    case = EVERY[name]
    expected = case.call(leaves_of(case, dtype, "cpu", requires_grad))
    results = case.to("meta").call(leaves_of(case, dtype, "meta", requires_grad))
    assert all(x.is_meta for x in results)
    assert described(results) == described(expected)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(("dtype", "requires_grad"), KINDS[:2])
def test_fake_in_fake_out(name, dtype, requires_grad):
    case = EVERY[name]
    expected = described(case.call(leaves_of(case, dtype, "cpu", requires_grad)))
    leaves, fake = leaves_of(case, dtype, "cpu", requires_grad), FakeTensorMode()
    with fake:
        inputs = {name: fake.from_tensor(x) for name, x in leaves.items()}
        results = case.mapped(fake.from_tensor).call(inputs)
        assert described(results) == expected
        if requires_grad:
            torch.autograd.backward([x.sum() for x in results])


@pytest.mark.parametrize("name", EVERY)
def test_a_gradient_has_the_shape_of_its_input(name):
    case = EVERY[name].to("meta")
    leaves = leaves_of(case, torch.bfloat16, "meta")
    grads = torch.autograd.grad([x.sum() for x in case.call(leaves)], list(leaves.values()))
    assert described(grads) == [(*entry[:2], False) for entry in described(leaves.values())]
    assert all(x.is_meta for x in grads)


def test_the_functions_of_trl():
    rows, tokens = torch.empty(2, 4, 5, device="meta"), torch.empty(2, 4, device="meta").long()
    assert selective_log_softmax(rows, tokens).shape == (2, 4)
    assert [x.shape for x in selective_log_softmax_and_entropy(rows, tokens)] == [(2, 4)] * 2


def test_the_reference_on_meta():
    out = token_log_probs(
        torch.empty(4, 5, device="meta", dtype=torch.float64),
        torch.empty(4, device="meta", dtype=torch.int64),
        impl="reference",
    ).log_probs
    assert out.is_meta
    assert (out.shape, out.dtype) == ((4,), torch.float64)


def test_jagged_meta():
    lengths = torch.tensor([0, 1, 4], device="meta")
    logits = torch.nested.nested_tensor_from_jagged(
        torch.empty(4, 5, device="meta"), lengths, min_seqlen=1, max_seqlen=3
    )
    tokens = torch.nested.nested_tensor_from_jagged(
        torch.empty(4, dtype=torch.int64, device="meta"), lengths, min_seqlen=1, max_seqlen=3
    )
    out = token_log_probs(logits, tokens).log_probs
    assert out.is_nested
    assert out.values().is_meta
    assert out.values().shape == (4,)


def test_shards_on_meta():
    rows = torch.empty(4, 3, device="meta"), torch.empty(5, 3, device="meta")
    tokens = torch.empty(4, dtype=torch.int64, device="meta")
    parts = [VocabPart.of(*rows, tokens, vocab_offset=n) for n in (0, 5)]
    assert VocabPart.combine(parts).log_probs.shape == (4,)


def test_other_implementations_are_refused_on_meta():
    logits = torch.empty(4, 5, device="meta")
    tokens = torch.empty(4, dtype=torch.int64, device="meta")
    for impl in ("cpu", "cuda"):
        with pytest.raises(
            ValueError, match=f"impl: expected tensors on {impl} with '{impl}', got meta"
        ):
            token_log_probs(logits, tokens, impl=impl)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", EVERY)
def test_a_companion_on_another_device_is_refused(name, device):
    there = {"cpu": "meta", "meta": "cpu"}[device]
    case = EVERY[name].to(device)
    arguments = case.inputs | case.others
    for moved in [k for k, v in arguments.items() if isinstance(v, torch.Tensor) and v.dim()][1:]:
        change = {moved: torch.empty_like(arguments[moved], device=there)}
        with pytest.raises(ValueError, match=f"^{moved}: expected device {device}, got {there}"):
            case.op(**arguments | change)


def test_a_scalar_on_meta_beside_data_on_the_cpu_is_refused():
    with pytest.raises(ValueError, match=r"temperature: .* beside the data on cpu, got meta"):
        token_log_probs(
            torch.zeros(4, 5),
            torch.zeros(4, dtype=torch.int64),
            temperature=torch.ones((), device="meta"),
        )


def test_a_default_device_changes_nothing():
    for name, case in EVERY.items():
        expected = case.call(case.inputs)
        with torch.device("meta"):
            results = case.call(case.inputs)
        assert all(map(torch.equal, results, expected)), name
