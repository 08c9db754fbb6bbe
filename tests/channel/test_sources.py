"""What is published: names and values of modules, wrappers, adapters, shards; what is refused."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from models.tiny import model_of
from tensordict import TensorDict
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fusedrl import VanillaLocalWeightUpdater
from fusedrl.channel.layout import Layout
from fusedrl.channel.tensors import weights_of

from .test_layout import values_of
from .test_loading import target_of

peft = pytest.importorskip("peft")


def values(weights: Any, merge_adapters: bool = False) -> dict[str, torch.Tensor]:
    found = weights_of(weights, merge_adapters)
    return {name: weight.value() for name, weight in found.items() if weight.saved}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def adapted(model: nn.Module, **options: Any) -> Any:
    """A peft model whose adapters change its answers."""
    torch.manual_seed(1)
    config = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of adapted embeddings that are tied
        return peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**{**config, **options}))


def unloaded(model: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return copy.deepcopy(model).merge_and_unload()


@pytest.fixture
def group(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_names_and_values_are_those_of_the_state_dict():
    model = model_of("qwen2")
    assert equal(values(model), model.state_dict())
    assert not any("inv_freq" in name for name in values(model))
    assert not any(tensor.requires_grad for tensor in values(model).values())


@pytest.mark.parametrize(
    "wrap",
    [
        torch.compile,
        nn.DataParallel,
        checkpoint_wrapper,
        lambda m: nn.DataParallel(torch.compile(m)),
        lambda m: nn.Sequential(torch.compile(m[0]), checkpoint_wrapper(m[1])),
    ],
    ids=["compile", "parallel", "checkpoint", "both", "inside"],
)
def test_wrappers_leave_no_trace_in_the_names(wrap):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    assert equal(values(wrap(model)), model.state_dict())
    weights = TensorDict.from_module(model)
    assert equal(values(weights), model.state_dict())


def test_distributed_data_parallel_is_seen_through(group):
    model = nn.Linear(2, 1)
    wrapped = nn.parallel.DistributedDataParallel(model)
    assert equal(values(wrapped), model.state_dict())


def test_fully_sharded_weights_are_made_whole(group):
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False))
    model[2].weight = model[1].weight
    expected = copy.deepcopy(model).state_dict()
    layout = Layout.of(model)
    fully_shard(model)
    assert Layout.of(model) == layout
    assert equal(values(model), expected)
    assert all(type(s) is torch.Tensor for s in values_of(layout, model))
    views = layout.views(torch.zeros(layout.nbytes, dtype=torch.uint8))
    layout.write(layout.match(model), views)
    assert all(torch.equal(views[i], expected[name]) for name, i in layout.view_of.items())
    layout.write(layout.match(model), None)
    sharded = list(model.parameters())
    with torch.no_grad():
        model(torch.ones(1, 3))
        assert type(model[0].weight) is nn.Parameter  # gathered, and stale after the next step
        torch._foreach_add_(sharded, 1.0)
    expected = {name: tensor + 1 for name, tensor in expected.items()}
    assert equal(values(model), expected)
    assert equal(values(model.state_dict()), expected)
    with pytest.raises(TypeError, match=r"module: 0.weight: .* got a DTensor"):
        target_of(model, layout, "copy")


def test_weights_that_cannot_be_made_whole_are_refused(group):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = nn.Sequential(FullyShardedDataParallel(nn.Linear(3, 2), device_id=torch.device("cpu")))
    with pytest.raises(TypeError, match=r"weights: 0: .* got FullyShardedDataParallel; shard with"):
        Layout.of(model)


class Quantised(torch.Tensor):
    pass


class ExtraState(nn.Linear):
    def get_extra_state(self):
        return {"calls": 1}


class OwnState(nn.Linear):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "scale"] = torch.ones(1)


class Unsaved(nn.Linear):
    """Its state dict has a buffer of its own of persistent=False."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def state_dict(self, *args, **options):
        return {**super().state_dict(*args, **options), "scale": self.scale}


class Asked(nn.Linear):
    def state_dict(self, path):
        raise AssertionError


def split() -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_state_dict_post_hook(
        lambda _, state, *__: state.update(zip("qk", state.pop("weight").chunk(2), strict=True))
    )
    return model


@pytest.mark.parametrize(
    "make", [split, lambda: Unsaved(2, 2), lambda: Asked(2, 2), lambda: nn.Sequential(Asked(2, 2))]
)
def test_a_state_dict_may_split_repeat_or_ask_for_arguments(make):
    assert [name.split(".")[-1] for name in values(make())] == ["weight", "bias"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (torch.ones(2).as_subclass(Quantised), "got Quantised; publish the dequantised"),
        (nn.Parameter(torch.ones(2, device="meta")), "got a meta tensor; load"),
        (torch.eye(2).to_sparse(), r"torch.sparse_coo; convert it with .to_dense\(\)"),
        (torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged), "got NestedTensor"),
        (nn.UninitializedParameter(), "got a lazy parameter; run the module once first"),
        (torch.quantize_per_tensor(torch.ones(2), 1, 0, torch.qint8), "got torch.qint8"),
        ("text", "got str; leave it out"),
        (None, "got NoneType; leave it out"),
    ],
)
def test_what_is_not_a_plain_tensor_is_refused_by_name(entry, message):
    for weights in ({"w": torch.ones(1), "layer.odd": entry}, {"layer": {"odd": entry}}):
        with pytest.raises(TypeError, match=f"weights: layer.odd: expected .* {message}"):
            Layout.of(weights)


def hooked() -> nn.Module:
    model = nn.Linear(1, 1)
    model.register_state_dict_post_hook(lambda _, state, prefix, *__: state.update(own=prefix))
    return model


@pytest.mark.filterwarnings("ignore:torch.ao.quantization:DeprecationWarning")
@pytest.mark.parametrize(
    ("part", "name"),
    [
        (lambda: ExtraState(1, 1), "0._extra_state"),
        (lambda: OwnState(1, 1), "0.scale"),
        (lambda: torch.compile(OwnState(1, 1)), "0._orig_mod.scale"),
        (hooked, "own"),
        (lambda: torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(2, 2))), "0.0.sc"),
    ],
    ids=["extra", "saved", "compiled", "hook", "quantised"],
)
def test_state_beside_parameters_and_buffers_is_refused(part, name):
    """It would be left out, and readers would go on with what they have."""
    model = nn.Sequential(part())
    own = TensorDict({"0": torch.ones(1)})
    for use in (Layout.of, VanillaLocalWeightUpdater(None, own)):
        with pytest.raises(TypeError, match=f"weights: {name}.*: expected a parameter or a buffer"):
            use(model)
    plain = Layout.of(nn.Sequential(nn.Linear(1, 1)))
    with pytest.raises(TypeError, match=f"weights: {name}"):
        plain.match(model)


LORA = {
    "linear": {},
    "dora": {"use_dora": True},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "biased": {"lora_bias": True, "target_modules": ["q_proj"]},
    "saved": {"modules_to_save": ["norm"]},
    "tokens": {"trainable_token_indices": [1, 3]},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", LORA)
def test_merged_weights_are_those_of_merge_and_unload_and_change_nothing(kind, dtype):
    base = copy.deepcopy(model_of("qwen2")).to(dtype)
    base.config.tie_word_embeddings = False
    base.lm_head.weight = nn.Parameter(base.lm_head.weight.detach().clone())
    model = adapted(base, **LORA[kind])
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(torch.randn_like(param), alpha=0.1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    flags = [p.requires_grad for p in model.parameters()]
    merged = values(model, True)
    assert equal(merged, unloaded(model).state_dict())
    assert not equal(merged, base.state_dict())
    assert equal(model.state_dict(), before)
    assert [p.requires_grad for p in model.parameters()] == flags
    layout = Layout.of(model, merge_adapters=True)
    assert equal(dict(zip(merged, values_of(layout, model), strict=True)), merged)
    views = layout.views(torch.zeros(layout.nbytes, dtype=torch.uint8))
    layout.write(layout.match(model), views)
    assert equal(dict(zip(merged, views, strict=True)), merged)


class Blocks(nn.Module):
    """Layers that peft merges each in its own way."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.conv = nn.Conv2d(2, 4, 3)
        self.experts = nn.ParameterDict(
            {"gate": torch.randn(3, 8, 6), "down": torch.randn(3, 6, 8)}
        )

    def forward(self, x):
        return x


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["attention"]},
        {"target_modules": ["conv"]},
        {"target_modules": [], "target_parameters": ["experts.gate", "experts.down"]},
    ],
    ids=["attention", "conv", "parameters"],
)
def test_layers_of_every_sort_are_merged_as_peft_merges_them(options):
    base = Blocks()
    model = adapted(base, **options)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    merged = values(model, True)
    assert equal(merged, unloaded(model).state_dict())
    assert not equal(merged, base.state_dict())
    assert equal(model.state_dict(), before)


def test_all_active_adapters_are_merged_and_no_other():
    model = adapted(model_of("qwen2"))
    model.add_adapter("second", peft.LoraConfig(init_lora_weights=False, target_modules=["o_proj"]))
    one = values(model, True)
    assert equal(one, unloaded(model).state_dict())
    model.base_model.set_adapter(["default", "second"])
    both = values(model, True)
    assert equal(both, unloaded(model).state_dict())
    assert not equal(one, both)


def test_merged_weights_load_into_the_plain_model_and_not_into_the_adapted():
    model = adapted(model_of("qwen2"))
    layout = Layout.of(model, merge_adapters=True)
    views = layout.views(torch.zeros(layout.nbytes, dtype=torch.uint8))
    torch._foreach_copy_(views, values_of(layout, model))
    reader = copy.deepcopy(model_of("qwen2"))
    target_of(reader, layout, "alias").load(views)
    tokens = torch.arange(8)[None]
    torch.testing.assert_close(
        reader.eval()(tokens).logits, model.eval()(tokens).logits, rtol=1e-4, atol=1e-4
    )
    with pytest.raises(ValueError, match="module: expected a model without adapters"):
        target_of(model, layout, "copy")
    again = values_of(layout, unloaded(model))
    assert all(torch.equal(a, b) for a, b in zip(again, views, strict=True))


def test_merged_adapters_of_sharded_models_are_made_whole(group):
    from torch.distributed.fsdp import fully_shard

    model = adapted(model_of("qwen2"))
    expected = values(model, True)
    fully_shard(model)
    assert equal(values(model, True), expected)
