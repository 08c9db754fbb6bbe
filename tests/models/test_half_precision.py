"""Systematic errors that the rounding of half precision could hide from the comparison."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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
    assert (found.parts is not None) == (kind in PACKING) and found.together
