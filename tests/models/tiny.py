"""Tiny random causal language models of many architectures."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from watching import Watch

from fusedrl.models.capabilities import capabilities_of

VOCAB = 100
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
WINDOW = {"sliding_window": 6}

# What packs, by model type; windows are shorter than the sequences of the tests.
PACKING: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.5},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 3.0, **WINDOW},
    "gemma3_text": {"head_dim": 8, **WINDOW},
    "granite": {"logits_scaling": 3.0},
    "llama": {},
    "mistral": WINDOW,
    "mixtral": {"num_local_experts": 4},
    "olmo2": {},
    "phi3": {},
    "qwen2": {},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {**_EXPERTS, "head_dim": 8},
    "smollm3": {},
    "starcoder2": {},
}


def config_of(kind: str, **options: Any) -> Any:
    if kind == "opt":  # learned positions, and a projection behind the decoder
        return transformers.OPTConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            word_embed_proj_dim=16,
            **options,
        )
    if kind == "gpt2":  # learned positions, which no mask moves
        return transformers.GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, **options
        )
    if kind == "mamba":  # a recurrent state instead of attention
        return transformers.MambaConfig(
            vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, **options
        )
    return transformers.AutoConfig.for_model(kind, **{**_SIZES, **PACKING.get(kind, {}), **options})


def model_of(kind: str, attention: str | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config_of(kind, **options), attn_implementation=attention
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:  # far from uniform predictions
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def definition(model: Any, tokens: Tensor, lengths: list[int], mask: Tensor | None) -> Tensor:
    """Log-probs of each sequence alone, through log_softmax of all its logits."""
    rows = []
    for row in tokens.split(lengths):
        picked = torch.zeros(len(row))
        if len(row) > 1:
            logits = model(input_ids=row[None]).logits[0, :-1].float()
            log_probs = logits.log_softmax(-1).gather(-1, row[1:, None]).squeeze(-1)
            picked = torch.cat((picked[:1], log_probs))
        rows.append(picked)
    packed = torch.cat(rows)
    return packed if mask is None else packed * mask


def counted(model: Any) -> list[int]:
    """How many tokens each call of a model embeds from now on, after its comparison."""
    counts: list[int] = []
    inputs = model.get_input_embeddings()
    watch = Watch(lambda module, args, output: counts.append(args[0].numel()))
    inputs.register_forward_hook(watch)
    capabilities_of(model)
    counts.clear()
    return counts
