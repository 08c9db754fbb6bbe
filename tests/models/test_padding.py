"""Models that padding changes are computed one sequence at a time."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from fusedrl.models import causal_log_probs
from fusedrl.models.capabilities import capabilities_of

from .test_log_probs import LENGTHS, MASK, TOKENS, close
from .tiny import VOCAB, definition, model_of


def cpmant():
    """It takes padding to be on the left, whatever mask it is given."""
    torch.manual_seed(0)
    config = transformers.CpmAntConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_attention_heads=4,
        dim_head=8,
        dim_ff=48,
        num_hidden_layers=2,
        prompt_types=4,
        prompt_length=4,
        segment_types=4,
        position_bias_num_buckets=16,
        position_bias_max_distance=64,
    )
    model = transformers.CpmAntForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    return model.eval()


def hooked(model):
    model.register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize("way", ["parts", "logits"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_model_that_takes_padding_to_be_on_the_left(way, dtype):
    model = cpmant().to(dtype)
    model = model if way == "parts" else hooked(model)
    assert not capabilities_of(model).batches
    tokens = TOKENS.clamp(min=1)  # 0 is its padding token
    expected = definition(model, tokens, LENGTHS, MASK)
    close(
        causal_log_probs(model, tokens, LENGTHS, MASK).log_probs,
        expected,
        1e-5 if dtype == torch.float32 else 0.1,
    )


@torch.no_grad()
def test_others_share_padded_batches():
    for model in (model_of("opt"), hooked(model_of("llama"))):
        assert capabilities_of(model).batches
        sizes = []
        model.get_input_embeddings().register_forward_hook(
            lambda _, args, out, sizes=sizes: sizes.append(len(args[0]))
        )
        causal_log_probs(model, TOKENS, LENGTHS)
        assert max(sizes) > 1
