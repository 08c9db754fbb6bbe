"""A vLLM engine that is given new weights: by the channel, and by a checkpoint in memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import peers
from .harness import Case, Skipped

NEEDS = {peers.TRANSFORMERS, peers.VLLM}
DEVICES = {"cpu"}

OP = "vLLM update"
LAYERS, QUICK_LAYERS, HIDDEN, VOCAB = 10, 1, 768, 32000  # 85 to 105 million parameters
DTYPES = (torch.bfloat16, torch.float32)
MEMORY = Path("/dev/shm")  # a file system that no disk is behind


def cases(device: str, quick: bool, usable: set[str]) -> Iterator[Case | Skipped]:
    """Whole updates of a Qwen2, trainer's and engine's part, in bf16 and float32."""
    if not MEMORY.is_dir():
        yield Skipped(OP, f"compares with a checkpoint in {MEMORY}, which is not there")
        return
    for dtype in DTYPES:
        yield from update_case(dtype, QUICK_LAYERS if quick else LAYERS)


def update_case(dtype: torch.dtype, layers: int) -> Iterator[Case]:
    """The same engine takes weights both ways, in turn."""
    from fusedrl import WeightChannel
    from fusedrl.vllm import EngineWeights

    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        model = qwen2(folder, dtype, layers)
        with engine(folder, dtype) as llm, WeightChannel.create(model) as channel:
            weights = EngineWeights(channel, llm)
            copies = [torch.empty_like(p) for p in model.parameters()]

            def checkpoint(model: Any) -> None:
                model.save_pretrained(folder)
                llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})

            def copy(model: Any) -> None:
                torch._foreach_copy_(copies, list(model.parameters()))

            million = sum(p.numel() for p in model.parameters()) / 1e6
            with torch.no_grad():
                yield Case(
                    op=OP,
                    setting=f"{million:.0f}M parameters, {str(dtype).removeprefix('torch.')}",
                    make_input=lambda: model,
                    contenders={
                        "save_pretrained + reload_weights": checkpoint,
                        "fusedrl": lambda model: weights.update(),
                    },
                    timed_only={"publish alone": lambda model: channel.publish(), "copy": copy},
                    work=2.0 * sum(p.nbytes for p in model.parameters()),
                    host_bound=True,
                )


def qwen2(folder: str, dtype: torch.dtype, layers: int) -> nn.Module:
    """A model with random weights, saved to ``folder``."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=HIDDEN // 32,
        num_key_value_heads=HIDDEN // 64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    model: Any = Qwen2ForCausalLM(config).to(dtype)
    model.eval().save_pretrained(folder)
    return model


@contextmanager
def engine(folder: str, dtype: torch.dtype) -> Iterator[Any]:
    """A ``vllm.LLM`` that takes its weights from channels."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM  # pyright: ignore[reportMissingImports]
    from vllm.config import WeightTransferConfig  # pyright: ignore[reportMissingImports]

    llm = LLM(
        folder,
        dtype=str(dtype).removeprefix("torch."),
        skip_tokenizer_init=True,
        enforce_eager=True,
        use_tqdm_on_load=False,
        kv_cache_memory_bytes=64 << 20,
        max_model_len=256,
        weight_transfer_config=WeightTransferConfig(backend="fusedrl"),
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
