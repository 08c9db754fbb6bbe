"""Tiny models for engines of vLLM: made here, read from a folder as any user's is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

VOCABULARY = 512
PROMPT = [5, 6, 7, 8]
# vLLM's smallest heads on a CPU are of 32.
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 64 << 20,
    "max_model_len": 256,
}


def tiny_model(folder: Path, *, kind: str = "qwen2", seed: int = 0, **sizes: Any) -> nn.Module:
    """A float32 model with random weights, which is saved to ``folder`` with a tokenizer."""
    torch.manual_seed(seed)
    config, model = {
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[kind]
    made = model(config(**{**_SIZES, "tie_word_embeddings": False, **sizes})).eval()
    made.save_pretrained(folder)
    save_tokenizer(folder)
    return made


def save_tokenizer(folder: Path) -> None:
    """A token a byte, beside the model."""
    vocabulary = {"<pad>": 0, "<eos>": 1}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[character] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(folder)


@torch.no_grad()
def train(model: nn.Module) -> None:
    """Change all weights, so much that other tokens are the most likely ones."""
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.05)


def expected(model: Any, prompt: list[int] = PROMPT, tokens: int = 12) -> list[int]:
    """The tokens that transformers finds the most likely."""
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
    )
    return out[0, len(prompt) :].tolist()


def completion(
    llm: Any, prompt: list[int] = PROMPT, tokens: int = 12, lora_request: Any = None
) -> Any:
    """What an engine answers with the most likely tokens."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    [request] = llm.generate(
        [{"prompt_token_ids": prompt}], greedy, use_tqdm=False, lora_request=lora_request
    )
    return request.outputs[0]


def has_spans() -> bool:
    """Whether this vLLM names the version of each token, as 0.31 does not."""
    from vllm.outputs import CompletionOutput

    return "weight_versions" in CompletionOutput.__dataclass_fields__


def spans_of(answer: Any, version: str) -> list[tuple[str, int, int]]:
    """The versions of an answer, from where to where.

    Args:
        answer: of an engine.
        version: that the engine has, for all tokens where it names none.
    """
    if not has_spans():
        return [(version, 0, len(answer.token_ids))]
    return [(span.version, span.start, span.end) for span in answer.weight_versions]


@contextmanager
def offline(folder: Path, backend: Any = "fusedrl", **options: Any) -> Iterator[Any]:
    """A ``vllm.LLM`` that takes its weights from channels, or as another backend does."""
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    transfer = WeightTransferConfig(backend=backend)
    llm = LLM(str(folder), weight_transfer_config=transfer, **{**OPTIONS, **options})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown(timeout=0.5)


@contextmanager
def in_loop(loop: Any, folder: Path, **options: Any) -> Iterator[Any]:
    """An ``AsyncLLM`` that takes its weights from channels, in an ``asyncio.Runner``."""
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    transfer = WeightTransferConfig(backend="fusedrl")
    arguments = {**OPTIONS, "weight_transfer_config": transfer, **options}

    async def start() -> Any:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(folder), **arguments))

    engine = loop.run(start())
    try:
        yield engine
    finally:
        engine.shutdown(timeout=0.5)
