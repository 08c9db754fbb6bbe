"""Models whose numbers follow the length of the call, and how long a sequence may be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch.nn.parallel import DistributedDataParallel

from fusedrl.models import causal_log_probs
from fusedrl.models.capabilities import capabilities_of

from .test_log_probs import close
from .tiny import PACKING, VOCAB, config_of, counted, definition, model_of

# Short ones beside two that are longer than what the rotary embeddings were made for.
LENGTHS = [12, 60, 19, 5, 45, 20]
TRAINED = 24
N = sum(LENGTHS)
TOKENS = torch.randint(0, VOCAB, (N,), generator=torch.Generator().manual_seed(1))
MASK = torch.rand(N, generator=torch.Generator().manual_seed(2)) < 0.5


def early(lengths: list[int]) -> torch.Tensor:
    """Keeps the first half of each sequence: without the rest a long one looks short."""
    return torch.cat([torch.arange(n) < n // 2 for n in lengths])


def rope(kind: str, rope_type: str) -> dict[str, Any]:
    """Options of a configuration whose rotary embeddings follow the length of the call."""
    if rope_type == "dynamic":
        settings: dict[str, Any] = {"factor": 8.0}
        options: dict[str, Any] = {"max_position_embeddings": TRAINED}
    else:
        half = 4  # of the dimensions of a head
        settings = {"short_factor": [1.0] * half, "long_factor": [20.0, 9.0, 40.0, 3.0]}
        settings |= {"factor": 4.0, "original_max_position_embeddings": TRAINED}
        options = {"max_position_embeddings": 96}
    settings |= {"rope_type": rope_type, "rope_theta": 10000.0}
    if kind == "phi3":
        options["original_max_position_embeddings"] = TRAINED
    if kind == "mixtral":
        options["head_dim"] = 8
    if kind == "gemma3_text":
        settings = {"full_attention": settings, "sliding_attention": {"rope_type": "default"}}
        options["layer_types"] = ["full_attention", "sliding_attention"]
    return {"rope_parameters": settings, **options}


def following(kind: str, rope_type: str) -> Any:
    if kind == "phi3" and rope_type == "dynamic":
        pytest.skip("phi3 has longrope alone")
    return model_of(kind, **rope(kind, rope_type))


def alone(model: Any, mask: torch.Tensor | None) -> torch.Tensor:
    """The definition of a model that remembers no longer call: each sequence after a short one."""
    rows = []
    masks = [None] * len(LENGTHS) if mask is None else mask.split(LENGTHS)
    for row, keep in zip(TOKENS.split(LENGTHS), masks, strict=True):
        model(input_ids=TOKENS[None, :2])
        rows.append(definition(model, row, [len(row)], keep))
    return torch.cat(rows)


@pytest.mark.parametrize("rope_type", ["longrope", "dynamic"])
@pytest.mark.parametrize("kind", PACKING)
@torch.no_grad()
def test_sequences_beyond_the_threshold_run_alone_and_whole(kind, rope_type):
    model = following(kind, rope_type)
    assert capabilities_of(model).parts is not None and capabilities_of(model).below == TRAINED
    expected = alone(model, None)
    for mask in (MASK, early(LENGTHS)):
        out = causal_log_probs(model, TOKENS, LENGTHS, mask, max_tokens_per_forward=1000).log_probs
        close(out, expected * mask)


@pytest.mark.parametrize("rope_type", ["longrope", "dynamic"])
@torch.no_grad()
def test_short_sequences_still_share_a_row(rope_type):
    model = following("llama", rope_type)
    seen = counted(model)
    causal_log_probs(model, TOKENS, LENGTHS)
    together = sum(n - 1 for n in LENGTHS if n < TRAINED)
    assert seen == [together, 1, 45, 60], "1 makes it forget longer calls"


@pytest.mark.parametrize("kind", ["olmo", "falcon"])
@torch.no_grad()
def test_padded_batches_are_short_too(kind):
    """Of types that are not packed; their padding makes a call as long as its longest sequence."""
    settings = rope(kind, "dynamic")
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "intermediate_size": 48, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(kind, **sizes, **settings)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    found = capabilities_of(model)
    assert found.parts is None and found.batches and found.below == TRAINED
    close(causal_log_probs(model, TOKENS, LENGTHS, MASK).log_probs, alone(model, MASK))


@torch.no_grad()
def test_a_longer_call_before_is_forgotten():
    """The frequencies of dynamic NTK stay those of the longest call until a short one comes."""
    model = following("llama", "dynamic")
    expected = alone(model, None)
    model(input_ids=TOKENS[None])
    close(causal_log_probs(model, TOKENS, LENGTHS).log_probs, expected)
    model(input_ids=TOKENS[None])
    exactly = [TRAINED] * (N // TRAINED)
    tokens = TOKENS[: sum(exactly)]
    out = causal_log_probs(model, tokens, exactly).log_probs
    model(input_ids=TOKENS[None, :2])
    close(out, definition(model, tokens, exactly, None))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "starcoder2"])
@torch.no_grad()
def test_rotary_models_run_beyond_their_context(kind):
    model = model_of(kind, max_position_embeddings=32)
    close(
        causal_log_probs(model, TOKENS, LENGTHS).log_probs, definition(model, TOKENS, LENGTHS, None)
    )


@pytest.fixture
def group(tmp_path):
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", ["opt", "gptj", "ddp"])
def test_models_with_a_table_of_positions_refuse_more(kind, group):
    if kind != "gptj":
        config = config_of("opt")
    else:
        sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 8}
        options = {"vocab_size": VOCAB, "max_position_embeddings": 64, **sizes}
        config = transformers.AutoConfig.for_model(kind, **options)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    called = []
    model.get_input_embeddings().register_forward_hook(lambda *_: called.append(1))
    if kind == "ddp":
        model = DistributedDataParallel(model)
    with pytest.raises(ValueError, match="tokens: sequence 1: expected at most 64 tokens, the mo"):
        causal_log_probs(model, TOKENS[:75], [5, 70])
    assert not called, "on a GPU the model's own error ends the process"
