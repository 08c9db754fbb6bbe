"""``causal_log_probs`` of models on a GPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch

pytest.importorskip("transformers")  # which a machine with a GPU may lack

from fusedrl.models import causal_log_probs
from fusedrl.models.capabilities import capabilities_of

from .test_log_probs import LENGTHS, MASK, TOKENS, close
from .tiny import definition, model_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2", "opt"])
def test_log_probs_are_those_of_the_cpu(kind):
    model = model_of(kind)
    expected = definition(model, TOKENS, LENGTHS, MASK)
    out = causal_log_probs(model.cuda(), TOKENS.cuda(), LENGTHS, MASK.cuda()).log_probs
    assert out.is_cuda
    close(out.cpu(), expected, 1e-3)


@pytest.mark.skipif(
    importlib.util.find_spec("flash_attn") is None, reason="flash_attn is not installed"
)
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_flash_attention_keeps_packed_sequences_apart(kind):
    model = model_of(kind, attention="flash_attention_2", hidden_size=128).bfloat16().cuda()
    assert capabilities_of(model).parts is not None
    together = causal_log_probs(model, TOKENS, LENGTHS, MASK).log_probs
    alone = causal_log_probs(model, TOKENS, LENGTHS, MASK, max_tokens_per_forward=1).log_probs
    close(together, alone, 5e-2)


def test_gradients_are_those_of_the_cpu():
    grads = []
    for device in ("cpu", "cuda"):
        model = model_of("qwen2").to(device)
        causal_log_probs(model, TOKENS, LENGTHS, MASK).log_probs.sum().backward()
        grads.append(model.model.embed_tokens.weight.grad.cpu())
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-3)
