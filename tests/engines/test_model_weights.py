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
from vllm.model_executor.model_loader.utils import (
    initialize_model,
    process_weights_after_loading,
)
from vllm.utils.torch_utils import set_default_torch_dtype

from fusedrl.channel.layout import Layout
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


def config_of(folder):
    return EngineArgs(model=str(folder), **OPTIONS).create_engine_config()


def saved(folder, kind, **options):
    """A model of transformers, in ``folder`` too."""
    known = tiny.PACKING[kind]
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
    layout.write(model, views)
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
            x = torch.randn(3, width)
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


@pytest.mark.parametrize(
    ("kind", "said"),
    [("mixtral", r"model\.layers\.0\.mlp\.gate"), ("qwen3_moe", "packed from")],
)
def test_experts_are_refused_before_anything_changes(kind, said, tmp_path):
    model = saved(tmp_path, kind, tie_word_embeddings=False)
    config = config_of(tmp_path)
    engine = loaded(config)
    train(model)
    with pytest.raises(ValueError, match=said):
        update(engine, config, model)
    assert differences(engine, loaded(config_of(tmp_path))) == []
