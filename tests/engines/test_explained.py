"""Planted differences of an engine and its trainer are named, and none where none is planted."""

import json
from copy import deepcopy

import pytest
import torch
from chat_templates import CHATML
from tiny_engines import offline, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from fusedrl.cli import main
from fusedrl.models import causal_log_probs
from fusedrl.vllm import explain_mismatch

CHAT = [{"role": "user", "content": "Is it late? Answer in one sentence."}]


@pytest.fixture(scope="module", autouse=True)
def checkpoint(folder):
    """Far from uniform predictions, and with a chat template."""
    tiny_model(folder, initializer_range=0.2)
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
    model.to(torch.bfloat16).float()


def other_eps(model):
    model.model.layers[1].input_layernorm.variance_epsilon = 1e-3


# In a row of two sequences, the second one goes on with the positions of the first.
def not_restarting(model):
    return lambda tokens, lengths: causal_log_probs(model, tokens, [sum(lengths)])


WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
WINDOWS = {**WINDOW, "layer_types": ["sliding_attention"] * 2}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 9000.0}}
LAYER = "model.layers.1.mlp.down_proj"
# What is planted, the kind of cause that is named, and where the first error beyond rounding is.
FAULTS = {
    "eps": ({"load": {"rms_norm_eps": 1e-4}}, "eps", "model.layers.0.input_layernorm"),
    "theta": ({"load": ROPE}, "RoPE", "model.rotary_emb"),
    "head": ({"change": noise("lm_head.weight")}, "stale head", "the logits"),
    "layer": ({"change": noise(f"{LAYER}.weight")}, "stale weights", LAYER),
    "window": ({"load": WINDOWS}, "sliding window", "model.layers.0.self_attn.o_proj"),
    "bias": ({"change": without_bias}, "weights", "model.layers.0.self_attn.qkv_proj"),
    "scale": ({"change": other_scale}, "attention", "model.layers.0.self_attn.o_proj"),
    "buffers": ({"change": rounded_buffers}, "RoPE", "model.rotary_emb"),
    "norm": ({"change": other_eps}, "norm", "model.layers.1.input_layernorm"),
    "packing": ({"log_probs": not_restarting}, "packing", None),
    "dtype": ({"load": {"dtype": torch.bfloat16}}, "dtype", None),
}
