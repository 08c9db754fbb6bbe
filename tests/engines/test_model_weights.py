"""Versions into models of vLLM of many architectures, without an engine around them."""

import socket

import pytest
import torch
from safetensors.torch import load_file
from tiny_engines import OPTIONS, VOCABULARY, save_tokenizer, train
from transformers import AutoModelForCausalLM
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.utils import (
    initialize_model,
    process_weights_after_loading,
)
from vllm.utils.torch_utils import set_default_torch_dtype

from fusedrl.channel.layout import Layout
from fusedrl.compat import transformers
from fusedrl.compat import vllm as compat
from fusedrl.vllm.model_weights import ModelWeights

from ..models import tiny

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 256,
}
HEADS = {"head_dim": 32}
# The first four have one weight for embedding and head in vLLM. The last three run on classes of
# transformers there, which vLLM changes: no second model of theirs can be made in this process.
ONLY_TIED = ["cohere", "gemma", "gemma2", "gemma3_text", "smollm3", "starcoder2"]
ONLY_UNTIED = ["olmo2"]
BOTH = ["granite", "llama", "mistral", "phi3", "qwen2", "qwen3"]
# On a CPU, vLLM packs experts: those of 16 wide into another shape, those of 64 into the same.
# A router of GLM-4 has a bias, which the experts have too.
EXPERTS = [
    ("mixtral", {}),
    *(("qwen3_moe", {"moe_intermediate_size": n}) for n in (16, 64)),
    (
        "glm4_moe",
        HEADS
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        | {"first_k_dense_replace": 1},
    ),
]
# vLLM's reload copies its experts and sinks to nowhere.
GPT_OSS = HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}


def config_of(folder, **options):
    return EngineArgs(model=str(folder), **{**OPTIONS, **options}).create_engine_config()


def saved(folder, kind, **options):
    """A model of transformers, in ``folder`` too."""
    known = tiny.PACKING.get(kind, {})
    heads = HEADS if "head_dim" in known or "qwen3" in kind else {}
    torch.manual_seed(0)
    config = tiny.config_of(kind, **{**known, **SIZES, **heads, **options})
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


def loaded(config):
    """A model as vLLM's engine has it once it has started."""
    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
        model = initialize_model(config)
        model.load_weights(
            list(load_file(f"{config.model_config.model}/model.safetensors").items())
        )
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    return model.eval()


def update(engine, config, model):
    layout = Layout.of(model)
    views = layout.views(torch.empty(layout.nbytes, dtype=torch.uint8))
    layout.write(layout.match(model), views)
    with set_current_vllm_config(config):
        ModelWeights(engine, config, layout).load(views)


def differences(engine, fresh):
    """Parameters and packed products of two models of vLLM that are not equal."""
    found = [
        name
        for (name, one), other in zip(engine.named_parameters(), fresh.parameters(), strict=True)
        if one.shape != other.shape or not torch.equal(one, other)
    ]
    for (name, one), other in zip(engine.named_modules(), fresh.modules(), strict=True):
        if hasattr(one, "cpu_linear"):  # which has a copy of the weight, in a form of its own
            width = getattr(one, "embedding_dim", None) or one.input_size
            x = torch.randn(3, width, dtype=one.weight.dtype)
            if not torch.equal(
                one.cpu_linear(x, one.weight, None), other.cpu_linear(x, other.weight, None)
            ):
                found.append(f"{name}, packed")
    return found


@pytest.fixture(scope="module", autouse=True)
def one_worker(tmp_path_factory):
    """What a worker sets up before it loads a model."""
    folder = tmp_path_factory.mktemp("model")
    saved(folder, "llama")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with set_current_vllm_config(config_of(folder)):
        address = f"tcp://127.0.0.1:{port}"
        parallel_state.init_distributed_environment(1, 0, address, 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
    parallel_state._EP = parallel_state._EP or parallel_state._TP  # of models with experts
    yield
    parallel_state._EP = None
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


@pytest.mark.parametrize(
    ("kind", "tied"),
    [
        *((kind, True) for kind in [*BOTH, *ONLY_TIED]),
        *((kind, False) for kind in [*BOTH, *ONLY_UNTIED]),
    ],
)
def test_an_update_makes_the_model_that_a_checkpoint_would(kind, tied, tmp_path):
    model = saved(tmp_path / "old", kind, tie_word_embeddings=tied)
    config = config_of(tmp_path / "old")
    engine = loaded(config)
    for _ in range(2):
        train(model)
        update(engine, config, model)
    model.save_pretrained(tmp_path / "new")
    save_tokenizer(tmp_path / "new")
    fresh = loaded(config_of(tmp_path / "new"))
    assert differences(engine, fresh) == []
    assert differences(engine, loaded(config_of(tmp_path / "old"))) != []


def in_checkpoint(folder, model):
    """The weights by the names that a checkpoint has, where each expert has its own."""
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return load_file(folder / "model.safetensors")


@torch.no_grad()
def train_biases(model):
    """Those of routers, which are no parameters."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.add_(torch.randn_like(buffer))


def check_experts(kind, folder, dtype="float32", **sizes):
    model = saved(folder / "old", kind, tie_word_embeddings=False, **sizes)
    config = config_of(folder / "old", dtype=dtype)
    engine = loaded(config)
    for _ in range(2):
        train(model)
        train_biases(model)
        update(engine, config, in_checkpoint(folder / "new", model))
    assert differences(engine, loaded(config_of(folder / "new", dtype=dtype))) == []
    # Transformers has all experts of a layer in one tensor, which vLLM knows of some models.
    train(model)
    in_checkpoint(folder / "new", model)
    update(engine, config, model)
    assert differences(engine, loaded(config_of(folder / "new", dtype=dtype))) == []
    assert differences(engine, loaded(config_of(folder / "old", dtype=dtype))) != []


@pytest.mark.parametrize(("kind", "sizes"), EXPERTS)
def test_experts_of_a_checkpoint_load_again(kind, sizes, tmp_path):
    check_experts(kind, tmp_path, **sizes)


def test_weights_that_no_checkpoint_has_are_named_and_other_faults_are_raised(
    tmp_path, monkeypatch
):
    model = saved(tmp_path / "old", "mixtral", tie_word_embeddings=False)
    config = config_of(tmp_path / "old")
    engine, weights = loaded(config), dict(model.state_dict())
    name = "model.layers.0.mlp.experts.gate_up_proj"
    with pytest.raises(ValueError, match=rf"channel: expected a {name} that transformers can"):
        update(engine, config, weights | {name: torch.ones(7)})

    def fault(config):
        raise MemoryError("no room")

    monkeypatch.setattr(transformers, "in_checkpoint", fault)
    with pytest.raises(MemoryError, match="no room"):
        update(engine, config, weights)


def as_vllm_does(model, vllm_config, weights):
    """Its reload, which copies experts that are not packed over packed ones."""
    with set_current_vllm_config(vllm_config):
        initialize_layerwise_reload(model)
        model.load_weights(weights())
        finalize_layerwise_reload(model, vllm_config.model_config)


def test_weights_that_vllm_loads_once_are_refused_even_if_they_are_those_that_it_has(tmp_path):
    model = saved(tmp_path, "gpt_oss", tie_word_embeddings=False, **GPT_OSS)
    config = config_of(tmp_path)
    engine = loaded(config)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"got other weights[\s\S]*sinks[\s\S]*w13_weight"):
            update(engine, config, model)


def test_weights_that_a_reload_would_leave_wrong_are_refused(tmp_path, monkeypatch):
    model = saved(tmp_path / "old", "qwen3_moe", tie_word_embeddings=False, **EXPERTS[2][1])
    config = config_of(tmp_path / "old")
    engine = loaded(config)
    train(model)
    weights = in_checkpoint(tmp_path / "new", model)
    monkeypatch.setattr(compat, "load_again", as_vllm_does)
    with pytest.raises(RuntimeError, match=r"got other weights.*\s.*routed_experts\.w13_weight"):
        update(engine, config, weights)
