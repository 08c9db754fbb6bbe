"""A tiny model that transformers samples from, with the logits and log-probs of each token."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

SAMPLERS: dict[str, dict[str, Any]] = {
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "top_k": {"temperature": 0.7, "top_k": 12},
    "min_p": {"temperature": 1.5, "min_p": 0.1},
    "all": {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "temperature": {"temperature": 0.8},
}


class Sampled(NamedTuple):
    """What a sampler made: ``[B, T]`` tokens, their log-probs in it, the logits that it had."""

    model: Any
    sequences: Tensor
    tokens: Tensor
    logits: Tensor
    log_probs: Tensor
    limits: dict[str, Any]


def allowed_by_transformers(logits, temperature, top_k=None, top_p=None, min_p=None) -> Tensor:
    """Which classes its own processors leave of each row."""
    scores = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k is not None:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p is not None and top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p is not None:
        scores = MinPLogitsWarper(min_p)(None, scores)
    return scores > -torch.inf


def sampled(name: str) -> Sampled:
    """Answers to four prompts, with a seed."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, **layers, tie_word_embeddings=False)).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(40)  # an untrained model's distributions are nearly even
    limits = SAMPLERS[name]
    off: dict[str, Any] = {"top_k": 0, "top_p": 1.0}
    prompts = torch.randint(1, 97, (4, 5))
    out: Any = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        max_new_tokens=24,
        min_new_tokens=24,
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
        eos_token_id=None,
        pad_token_id=0,
        **off | limits,
    )
    tokens = out.sequences[:, 5:]
    of_sampler = torch.stack(out.scores, 1).log_softmax(-1)
    log_probs = of_sampler.gather(-1, tokens[..., None]).squeeze(-1)
    return Sampled(model, out.sequences, tokens, torch.stack(out.logits, 1), log_probs, limits)
