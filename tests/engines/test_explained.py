"""Planted differences of an engine and its trainer are named, and none where none is planted."""

import json
import re
from pathlib import Path

import pytest
import torch
from chat_templates import CHATML
from shown import assert_prints, texts
from tiny_engines import offline, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from fusedrl.cli import main
from fusedrl.models import causal_log_probs
from fusedrl.vllm import explain_mismatch

CHAT = [{"role": "user", "content": "Is it late? Answer in one sentence."}]


@pytest.fixture(scope="module", autouse=True)
def checkpoint(folder):
    """Far from uniform predictions, with biases and a chat template."""
    model = tiny_model(folder, initializer_range=0.2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHATML.replace("GENERATION", "").replace("END", "")
    tokenizer.save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        yield


@pytest.fixture(scope="module")
def llm(folder, checkpoint):
    with offline(folder) as llm:
        yield llm


@pytest.fixture
def explained(folder, llm):
    """What is said of a trainer that loads the engine's checkpoint with some options."""

    def explain(change=lambda model: None, load=(), tokenizer=None, **options):
        model = AutoModelForCausalLM.from_pretrained(folder, **dict(load)).eval()
        with torch.no_grad():
            change(model)
        if "log_probs" in options:
            options["log_probs"] = options["log_probs"](model)
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(folder)
        found = explain_mismatch(model, llm, CHAT, tokenizer, **options)
        print(found)
        return found

    return explain


def noise(name, scale=0.02):
    def change(model):
        weight = model.get_parameter(name)
        weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)) * scale)

    return change


def without_bias(model):
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias = None


def other_scale(model):
    for layer in model.model.layers:
        layer.self_attn.scaling *= 1.01


def rounded_buffers(model):
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.bfloat16().float()


def other_eps(model):
    model.model.layers[1].input_layernorm.variance_epsilon = 0.1


# In a row of two sequences, the second one goes on with the positions of the first.
def not_restarting(model):
    return lambda tokens, lengths: causal_log_probs(model, tokens, [sum(lengths)])


WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
WINDOWS = {**WINDOW, "layer_types": ["sliding_attention"] * 2}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 9000.0}}
LAYERS = "model.layers."
DOWN = f"{LAYERS}1.mlp.down_proj"
# What is planted, the kind of cause that is named, and where the first error beyond rounding is.
IN_THE_TRAINER = {
    "dtype": ({"load": {"dtype": torch.bfloat16}}, "dtype", None),
    "eps": ({"load": {"rms_norm_eps": 1e-4}}, "eps", f"{LAYERS}0.input_layernorm"),
    "theta": ({"load": ROPE}, "RoPE", "model.rotary_emb"),
    "head": ({"change": noise("lm_head.weight")}, "stale head", "the head"),
    "layer": ({"change": noise(f"{DOWN}.weight")}, "stale weights", DOWN),
    "window": ({"load": WINDOWS}, "sliding window", f"{LAYERS}0.self_attn"),
    "bias": ({"change": without_bias}, "weights", f"{LAYERS}0.self_attn.qkv_proj"),
    "scale": ({"change": other_scale}, "attention", f"{LAYERS}0.self_attn"),
    "buffers": ({"change": rounded_buffers}, "RoPE", "model.rotary_emb"),
    "norm": ({"change": other_eps}, "norm", f"{LAYERS}1.input_layernorm"),
    "packing": ({"log_probs": not_restarting}, "packing", None),
    "trainer's temperature": ({"temperature": 0.7}, "temperature", None),
}


@pytest.mark.parametrize("fault", IN_THE_TRAINER)
def test_what_is_planted_in_the_trainer_is_named_alone(fault, explained):
    options, kind, place = IN_THE_TRAINER[fault]
    found = explained(**options)
    assert [cause.kind for cause in found.causes] == [kind]
    assert found.first is None if place is None else found.first.name == place
    assert found.cost.ess < found.cost.tokens


def test_two_causes_are_named_beside_each_other(explained):
    found = explained(lambda model: model.to(torch.bfloat16).float())
    assert [cause.kind for cause in found.causes] == ["stale weights", "RoPE"]
    assert found.first.name == "model.rotary_emb"


def test_nothing_is_named_where_nothing_is_planted(explained):
    found = explained()
    assert found.causes == [] and found.first is None
    assert found.cost.max_ratio < 1.0001


def test_sampling_that_the_trainer_ignores_is_named(folder, llm, explained, monkeypatch):
    (folder / "generation_config.json").write_text(json.dumps({"top_p": 0.7, "top_k": 20}))
    monkeypatch.setattr(llm, "default_sampling_params", None)
    found = explained()
    (folder / "generation_config.json").unlink()
    assert [cause.kind for cause in found.causes] == ["top_p", "top_k"]
    assert "generation_config.json" in found.causes[0].what
    assert found.cost.k3 > 0.01


def test_log_probs_before_the_temperature_are_named(explained):
    from vllm import SamplingParams

    found = explained(sampling_params=SamplingParams(temperature=0.7), temperature=0.7)
    assert [cause.kind for cause in found.causes] == ["temperature"]
    assert "logprobs_mode" in found.causes[0].what
    assert found.cost.max_ratio < 1.0001


def test_greedy_sampling_costs_what_the_likeliest_tokens_lack(explained):
    from vllm import SamplingParams

    found = explained(sampling_params=SamplingParams(temperature=0))
    assert [cause.kind for cause in found.causes] == ["temperature"]
    assert found.cost.max_ratio <= 1 and found.cost.k3 > 0.01


def test_another_prompt_is_named(folder, explained):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.bos_token = "<eos>"
    tokenizer.chat_template = "{{ bos_token + bos_token }}" + tokenizer.chat_template
    [cause] = explained(tokenizer=tokenizer).causes
    assert cause.kind == "template"
    assert "from token 0 on" in cause.what and "trainer begins with BOS twice" in cause.what


def test_adapters_that_the_engine_does_not_have_are_named(folder, llm):
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(folder)
    adapters = LoraConfig(
        target_modules=["o_proj"], layers_to_transform=[1], init_lora_weights=False
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = explain_mismatch(get_peft_model(model, adapters), llm, CHAT, tokenizer)
    assert [cause.kind for cause in found.causes] == ["stale weights"]
    assert found.first.name == f"{LAYERS}1.self_attn.o_proj" and found.cost.k3 > 1e-4


def test_sampling_beyond_a_support_is_named(explained):
    from vllm import SamplingParams

    options = {"repetition_penalty": 1.5, "top_p": 0.5, "logit_bias": {7: 5.0}}
    found = explained(sampling_params=SamplingParams(**options))
    assert {cause.kind for cause in found.causes} == set(options)
    assert found.cost.tokens == 0 and "cost: not known" in str(found)


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_nothing_is_named_in_bfloat16(kind, tmp_path):
    tiny_model(tmp_path, kind=kind, initializer_range=0.2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with offline(tmp_path, dtype="bfloat16") as llm:
        found = explain_mismatch(model, llm, "Is it late?", AutoTokenizer.from_pretrained(tmp_path))
    print(found)
    assert found.causes == [] and found.first is None


def test_the_command_prints_what_the_page_shows(folder, capsys):
    options = {"dtype": "bfloat16", "kv_cache_memory_bytes": 64 << 20, "max_model_len": 256}
    command = ["check", "--engine", "vllm", str(folder), "--engine-options", json.dumps(options)]
    assert main(command) == 1
    printed = capsys.readouterr().out
    print(printed)
    page = Path(__file__).parents[2] / "docs/reference/vllm.md"
    assert_prints(any_operation(texts(page, "console")), any_operation(printed), figures=False)


def any_operation(text: str) -> str:
    """Which operation is the first to differ depends on the CPU's kernels."""
    return re.sub("(first other bits): .* in .*,", r"\1: OPERATION in MODULE,", text)


def test_engines_that_cannot_be_watched_are_refused(llm, explained, monkeypatch):
    monkeypatch.setattr(llm.llm_engine.vllm_config.model_config, "enforce_eager", False)
    with pytest.raises(ValueError, match="enforce_eager=True"):
        explained()
