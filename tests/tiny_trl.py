"""A tiny model, and what TRL's trainers are made with, for tests that run them."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2MoeConfig

TEXTS = ["the cat sat on the mat", "a dog ran in the park", "no cat ran", "the dog sat"]
PAIRS = {
    "prompt": TEXTS,
    "chosen": [" and slept", " and barked at it", " today", " down"],
    "rejected": [" nowhere", " no", " in the", " on a cat mat"],
}


def save_model(folder: Any, experts: int = 0) -> str:
    """Write the model, a mixture of so many experts if any, and its tokenizer to one directory."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        [text for column in PAIRS.values() for text in column],
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=["<end>", "<pad>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<end>", pad_token="<pad>", padding_side="left"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if experts:
        sparse = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
        config = Qwen2MoeConfig(**sizes, **sparse, num_experts=experts, num_experts_per_tok=2)
    else:
        config = Qwen2Config(**sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def options(out: Any, **more: Any) -> dict[str, Any]:
    """Arguments of a trainer's configuration for two short steps on the CPU."""
    return {
        "output_dir": str(out),
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-4,  # or Adam makes whole steps of the rounding of gradients that cancel
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "seed": 3,
        "disable_tqdm": True,
        **more,
    }


def by_length(completions: list[str], **_: Any) -> list[float]:
    """A reward."""
    return [float(len(text) % 5) for text in completions]


def trained(make: Any, folder: str, out: Any) -> tuple[list[dict[str, float]], Any]:
    """What the steps log, times aside, and the weights after them."""
    torch.manual_seed(0)
    trainer = make(folder, out)
    trainer.train()
    logs = [
        {k: v for k, v in entry.items() if isinstance(v, float) and "time" not in k}
        for entry in trainer.state.log_history
        if "loss" in entry
    ]
    return logs, trainer.model.state_dict()
