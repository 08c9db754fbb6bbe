"""Layouts: what is stored where, what their JSON may be, which weights they take."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictParams
from torch import nn

from fusedrl.channel import WeightChannel
from fusedrl.channel.layout import Layout
from fusedrl.channel.tensors import DTYPES, overwrite


class Tied(nn.Module):
    """Tied weights, a buffer of each sort, an empty parameter."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(3)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("cache", torch.ones(2), persistent=False)


def flat_of(layout: Layout) -> torch.Tensor:
    return torch.zeros(layout.nbytes, dtype=torch.uint8)


def values_of(layout: Layout, weights: Any) -> list[torch.Tensor]:
    """What a publish of weights copies."""
    return [weight.value() for weight in layout.match(weights).values()]


def stored(layout: Layout, weights: Any) -> dict[str, torch.Tensor]:
    """What readers get of weights that are published."""
    views = layout.views(flat_of(layout))
    torch._foreach_copy_(views, values_of(layout, weights))
    return {name: views[index] for name, index in layout.view_of.items()}


def test_every_entry_of_the_state_dict_is_stored_and_comes_back():
    model = Tied()
    layout = Layout.of(model)
    state = model.state_dict()
    assert [e.name for e in layout.entries] == [
        *("empty", "scale", "embed.weight", "head.weight", "norm.weight", "norm.bias"),
        *("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"),
    ]
    back = stored(layout, model)
    assert back.keys() == state.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(back[name], tensor, rtol=0, atol=0)
    kinds = {e.name: e.kind for e in layout.entries}
    assert kinds["scale"] == "parameter" and kinds["norm.num_batches_tracked"] == "buffer"


def test_offsets_are_aligned_and_apart():
    layout = Layout.of(Tied())
    assert layout.nbytes % 4096 == 0
    end = 0
    for entry in layout.stored:
        assert entry.offset % 64 == 0 and entry.offset >= end
        end = entry.offset + entry.nbytes
    assert end <= layout.nbytes


def test_tied_names_are_stored_once():
    layout = Layout.of(Tied())
    head = next(e for e in layout.entries if e.name == "head.weight")
    assert head.tied_to == "embed.weight" and head not in layout.stored
    nested = layout.tensordict(layout.views(flat_of(layout)))
    assert nested["head", "weight"] is nested["embed", "weight"]


def test_tensors_over_the_same_memory_are_tied_and_parts_of_it_are_not():
    fused = torch.randn(4, 3)
    weights = {"a": fused, "b": fused.view(4, 3), "c": fused[:2], "d": fused.t()}
    layout = Layout.of(weights)
    assert [e.tied_to for e in layout.entries] == [None, "a", None, None]
    back = stored(layout, weights)
    assert all(torch.equal(back[name], weights[name]) for name in weights)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_keeps_its_bits(name):
    bits = torch.arange(48, dtype=torch.uint8)
    tensor = (bits % 2).bool() if name == "bool" else bits.view(DTYPES[name])
    layout = Layout.from_json(Layout.of({"x": tensor}).to_json())
    view = stored(layout, {"x": tensor})["x"]
    assert view.dtype == DTYPES[name]
    assert torch.equal(view.view(torch.uint8), tensor.view(torch.uint8))


def test_a_dtype_casts_floating_entries_alone():
    layout = Layout.of(Tied(), dtype=torch.bfloat16)
    dtypes = {e.name: e.dtype for e in layout.entries}
    assert dtypes.pop("norm.num_batches_tracked") == torch.int64
    assert set(dtypes.values()) == {torch.bfloat16}
    model = Tied()
    torch.testing.assert_close(
        stored(layout, model)["embed.weight"], model.embed.weight.detach().bfloat16()
    )


@pytest.mark.parametrize(
    "form",
    [
        TensorDict.from_module,
        lambda m: TensorDict.from_module(m).data,
        lambda m: TensorDictParams(TensorDict.from_module(m)),
        lambda m: TensorDict.from_module(m).flatten_keys("."),
        lambda m: m.state_dict(),
        torch.compile,
    ],
    ids=["from_module", "data", "params", "dotted", "state dict", "compiled"],
)
def test_weights_of_any_form_fit_the_layout_of_the_module_and_the_reverse(form):
    model = Tied()
    for name, back in stored(Layout.of(model), form(model)).items():
        assert torch.equal(back, model.state_dict()[name])
    back = stored(Layout.of(form(model)), model)
    assert back.keys() - {"cache"} == model.state_dict().keys()


def test_one_error_lists_every_difference():
    layout = Layout.of({"a": torch.zeros(2), "b": torch.zeros(3).long(), "c": torch.zeros(1)})
    weights = {"a": torch.zeros(3), "b": torch.zeros(3), "d": torch.zeros(())}
    with pytest.raises(ValueError, match="weights: 4 differences") as error:
        layout.match(weights)
    assert str(error.value).splitlines()[1:] == [
        "  a: expected float32 (2,), got float32 (3,)",
        "  b: expected int64 (3,), got float32 (3,)",
        "  c: expected float32 (1,), got no such entry",
        "  d: expected no such entry, got float32 ()",
    ]
    many = Layout.of({f"w{i}": torch.zeros(1) for i in range(40)})
    with pytest.raises(ValueError, match="41 differences") as error:
        many.match({"x": torch.zeros(1)})
    lines = str(error.value).splitlines()
    assert len(lines) == 12 and lines[-1] == "  and 31 more"


def untied_copy(model: Tied) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("index", [(0, 0), (4, 2)])
def test_copies_of_a_tied_tensor_with_other_values_are_refused(index):
    weights = untied_copy(Tied())
    weights["head.weight"][index] = torch.nextafter(
        weights["head.weight"][index], torch.tensor(torch.inf)
    )
    layout = Layout.of(Tied())
    views = layout.views(flat_of(layout))
    message = r"head.weight: expected the values of embed.weight, .* ties them, got other values"
    with pytest.raises(ValueError, match=message):
        layout.write(layout.match(weights), views)
    assert not any(view.any() for view in views)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({}, "expected tensors whose .* got none"),
        ({"a": torch.ones(1), "a.b": torch.ones(1)}, "be nested by their dots, got .'a'"),
        ({"a..b": torch.ones(1)}, r"got .'a..b'"),
        ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, "expected one entry of this name"),
    ],
)
def test_names_that_cannot_be_nested_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        Layout.of(weights)


def test_a_dtype_that_values_cannot_be_cast_to_is_refused():
    for dtype in (torch.int32, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match="dtype: expected a float of 16 bits or more"):
            WeightChannel.create(Tied(), dtype=dtype)


def test_json_makes_an_equal_layout():
    layout = Layout.of(Tied(), dtype=torch.float16)
    again = Layout.from_json(layout.to_json())
    assert again == layout and again.hash == layout.hash and again.nbytes == layout.nbytes
    assert len(layout.hash) == 64
    assert Layout.of(Tied()).hash != layout.hash
    assert copy.deepcopy(layout) == layout


def test_memory_is_overwritten_as_copy_would_write_it():
    bits = torch.randint(-(2**31), 2**31, (300_001,), dtype=torch.int32)
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 3.4e38, -3.4e38, 1e-45])
    sources = [
        bits.view(torch.float32),  # every exponent; NaNs too
        special,
        special.double(),
        torch.randn(3, 5).T,
        torch.randn(4, dtype=torch.complex64).conj(),
        torch.arange(7),
        torch.empty(0),
        torch.tensor(2.5),
    ]
    for cast in (None, torch.bfloat16, torch.float16):
        dtypes = [cast if cast and s.is_floating_point() else s.dtype for s in sources]
        targets = [torch.empty(s.shape, dtype=d) for s, d in zip(sources, dtypes, strict=True)]
        overwrite(targets, sources)
        for target, source in zip(targets, sources, strict=True):
            torch.testing.assert_close(
                target, source.to(target.dtype), rtol=0, atol=0, equal_nan=True
            )
