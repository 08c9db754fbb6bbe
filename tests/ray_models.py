"""Models and transforms that a Ray worker can import, and build as the test that asked does."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torchrl.modules.llm import TransformersWrapper
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

_TINY: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}


def tokenizer() -> Any:
    """Bytes as they are, so that nothing has to be trained or loaded."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=259,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator([], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )


def policy_model() -> Any:
    torch.manual_seed(1)
    return Qwen2ForCausalLM(Qwen2Config(**_TINY)).eval()


def reference_model() -> Any:
    torch.manual_seed(2)
    return LlamaForCausalLM(LlamaConfig(**_TINY)).eval()


def wrapped(model: Any, log_probs_key: str, **options: Any) -> TransformersWrapper:
    options = {"input_mode": "history", "generate": False, "return_log_probs": True, **options}
    return TransformersWrapper(model, tokenizer=tokenizer(), log_probs_key=log_probs_key, **options)


def policy(**options: Any) -> TransformersWrapper:
    return wrapped(policy_model(), "gen_log_probs", **options)


def reference(**options: Any) -> TransformersWrapper:
    return wrapped(reference_model(), "ref_log_probs", **options)


def padding_policy() -> TransformersWrapper:
    return policy(pad_output=True)


def padding_reference() -> TransformersWrapper:
    return reference(pad_output=True)


def tokens_reference() -> TransformersWrapper:
    return reference(input_mode="tokens")


def broken() -> TransformersWrapper:
    raise LookupError("no such checkpoint")
