"""Systematic errors that the rounding of half precision could hide from the probe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from fusedrl.models import causal_log_probs
from fusedrl.models.capabilities import capabilities_of

from .test_log_probs import LENGTHS, MASK, TOKENS, close
from .tiny import PACKING, VOCAB, definition, model_of

HALF = [torch.bfloat16, torch.float16]


def changed(model: Any, change: Any) -> Any:
    """A model that changes its logits in a way that no configuration tells of."""
    original = type(model).forward

    class Changed(type(model)):
        def forward(self, *args, **kwargs):
            out = original(self, *args, **kwargs)
            out.logits = change(out.logits)
            return out

    model.__class__ = Changed
    return model


CHANGES = {
    "cap of 30": lambda x: 30 * torch.tanh(x / 30),
    "cap of 60": lambda x: 60 * torch.tanh(x / 60),
    "scale of 0.99": lambda x: 0.99 * x,
    "bias of some": lambda x: x + torch.nn.functional.one_hot(torch.tensor(7), VOCAB) * 0.25,
    "no padding class": lambda x: x.index_fill(-1, torch.tensor(0), -torch.inf),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("size", [0.02, 0.3])
@torch.no_grad()
def test_a_change_of_the_logits_is_seen(change, dtype, size):
    """Also on small logits, which a cap does not bend yet: training makes them larger."""
    model = model_of("qwen2")
    torch.nn.init.normal_(model.lm_head.weight, std=size)
    model = changed(model.to(dtype), CHANGES[change])
    assert capabilities_of(model).parts is None
    expected = definition(model, TOKENS, LENGTHS, MASK)
    # Equal but for how padding groups the sums of the decoder.
    close(causal_log_probs(model, TOKENS, LENGTHS, MASK), expected, 2e-3 if size == 0.02 else 0.2)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("kind", [*PACKING, "opt", "gpt2", "mamba"])
@torch.no_grad()
def test_honest_models_go_the_fast_way(kind, dtype):
    found = capabilities_of(model_of(kind).to(dtype))
    assert found.parts is not None and found.packs == (kind in PACKING) and found.pads


def recurrent_gemma() -> Any:
    return transformers.RecurrentGemmaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        lru_width=32,
        attention_window_size=16,
        logits_soft_cap=30.0,
    )


def xlstm() -> Any:
    return transformers.xLSTMConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        num_blocks=2,
        num_heads=4,
        qk_dim_factor=1.0,
        output_logit_soft_cap=30.0,
    )


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("make", [recurrent_gemma, xlstm])
@pytest.mark.parametrize("hidden", [False, True])
@torch.no_grad()
def test_caps_of_other_names(make, dtype, hidden, monkeypatch):
    """Known by name or, hidden from the configuration's reader, found by the probe."""
    if hidden:
        monkeypatch.setattr("fusedrl.models.split._softcap", lambda config: None)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(make()).eval()
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=3.0)
    model = model.to(dtype)
    found = capabilities_of(model)
    assert hidden == (found.parts is None)
    row = TOKENS[:17]
    ours = causal_log_probs(model, row, [17])
    theirs = definition(model, row, [17], None)
    close(ours, theirs, 1e-4 if dtype == torch.float32 else 0.15)
    states = model.get_decoder()(input_ids=row[None], use_cache=False).last_hidden_state
    assert model.get_output_embeddings()(states).abs().max() > 15, "where the cap bends"
