"""Weights for a ``vllm.LLM`` that a peft model trains, or that answers with adapters of its own."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_engines import completion, expected, offline, tiny_model

from fusedrl import WeightChannel
from fusedrl.vllm import EngineWeights

pytestmark = pytest.mark.slow

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def llm(folder, model):
    with offline(folder, enable_lora=True, max_lora_rank=8) as llm:
        yield llm


def adapted(base):
    """A peft model around ``base``, whose adapters have been trained."""
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=16, target_modules=ALL_LINEAR)
    model = get_peft_model(base, config).eval()
    train_adapters(model)
    return model


@torch.no_grad()
def train_adapters(model):
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.add_(torch.randn_like(parameter) * 0.1)


def tokens_of(llm, **request):
    return list(completion(llm, **request).token_ids)


def test_merged_adapters_are_the_weights_of_every_request(llm, tmp_path):
    model = adapted(tiny_model(tmp_path))
    with model.disable_adapter():
        base = expected(model)
    with WeightChannel.create(model, merge_adapters=True) as channel:
        weights = EngineWeights(channel, llm)
        for version in range(1, 4):
            train_adapters(model)
            assert weights.update() == version
            assert tokens_of(llm) == expected(model) != base


def test_adapters_that_are_not_merged_are_refused_with_the_remedy(llm, tmp_path):
    with (
        WeightChannel.create(adapted(tiny_model(tmp_path))) as channel,
        pytest.raises(Exception, match=r"merge_adapters=True[\s\S]*lora_A"),
    ):
        EngineWeights(channel, llm).update()


def test_adapters_that_the_engine_reads_from_files_lie_above_each_version(llm, tmp_path):
    from vllm.lora.request import LoRARequest

    base = tiny_model(tmp_path / "base")
    model = adapted(base)
    model.save_pretrained(tmp_path / "adapters")
    request = LoRARequest("of files", 1, str(tmp_path / "adapters"))
    plain = {name.replace(".base_layer", ""): p for name, p in base.named_parameters()}
    plain = {name: p for name, p in plain.items() if "lora_" not in name}
    with WeightChannel.create(plain) as channel:
        weights = EngineWeights(channel, llm)
        for _ in range(3):
            with torch.no_grad():
                for parameter in plain.values():
                    parameter.add_(torch.randn_like(parameter) * 0.05)
            weights.update()
            assert tokens_of(llm, lora_request=request) == expected(model)
            with model.disable_adapter():
                assert tokens_of(llm) == expected(model)
