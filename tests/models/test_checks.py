"""What ``causal_log_probs`` refuses, and in which words; what it takes."""

from __future__ import annotations

import numpy
import pytest
import torch
import transformers
from torch import nn

from fusedrl.models import causal_log_probs

from .test_log_probs import LENGTHS, MASK, TOKENS, N, close
from .tiny import VOCAB, config_of, definition, model_of


def asked_for_logits():
    model = model_of("llama")
    model.register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"lengths": [N - 1]}, ValueError, r"tokens: expected \[54\] integers, the sum of"),
        ({"tokens": TOKENS > 3}, ValueError, r"tokens: expected \[55\] integers"),
        ({"tokens": TOKENS[None]}, ValueError, r"tokens: .*got \(1, 55\) of torch.int64"),
        ({"mask": MASK.float()}, ValueError, "mask: expected bool"),
        ({"mask": MASK[1:]}, ValueError, "mask: expected bool of shape"),
        ({"max_tokens_per_forward": 0}, ValueError, "max_tokens_per_forward: expected a positive"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changed, error, message):
    with pytest.raises(error, match=message):
        causal_log_probs(model_of("llama"), **{"tokens": TOKENS, "lengths": LENGTHS, **changed})


@pytest.mark.parametrize("kind", [torch.tensor, numpy.array, iter])
def test_lengths_and_tokens_may_be_any_integers(kind):
    out = causal_log_probs(model_of("llama"), TOKENS.to(torch.uint8), kind(LENGTHS)).log_probs
    close(out, definition(model_of("llama"), TOKENS, LENGTHS, None))


@pytest.mark.parametrize("model", [model_of("llama"), model_of("opt"), asked_for_logits()])
@pytest.mark.parametrize("wrong", [VOCAB, 10**6, -1, -100])
@pytest.mark.parametrize("kept", [True, False])
def test_ids_beyond_the_vocabulary_are_refused(model, wrong, kept):
    tokens = TOKENS.index_fill(0, torch.tensor(7), wrong)
    mask = torch.ones(N, dtype=torch.bool).index_fill(0, torch.tensor(7), kept)
    with pytest.raises(ValueError, match=rf"ids in \[0, 100\), .* got {wrong} at token 7"):
        causal_log_probs(model, tokens, LENGTHS, mask)


@pytest.mark.parametrize("fast", [True, False])
def test_ids_that_have_no_logit_are_refused_where_they_are_kept(fast):
    """As the ids of images are, which are embedded and never predicted."""
    model = model_of("llama") if fast else asked_for_logits()
    model.set_output_embeddings(nn.Linear(32, VOCAB - 10, bias=False))
    tokens = TOKENS.clamp(max=80).index_fill(0, torch.tensor(7), 95)
    mask = torch.ones(N, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"ids in \[0, 90\), the model's .* got 95 at token 7"):
        causal_log_probs(model, tokens, LENGTHS, mask)
    mask[7] = False
    with torch.no_grad():
        out = causal_log_probs(model, tokens, LENGTHS, mask).log_probs
        picked = tokens.index_fill(0, torch.tensor(7), 0)
        logits = model(input_ids=tokens[None, :17]).logits[0, :-1].log_softmax(-1)
        own = logits.gather(-1, picked[1:17, None]).squeeze(-1)
        close(out[1:17], own * mask[1:17])


def encoder_decoder():
    """Its tokens see those behind them through the encoder, to which it gives them by itself."""
    sizes = {
        f"{part}_{name}": 1
        for part in ("encoder", "decoder")
        for name in ("layers", "attention_heads")
    }
    config = transformers.BartConfig(vocab_size=100, d_model=16, **sizes)
    return transformers.BartForConditionalGeneration(config).eval()


def classifier():
    return transformers.LlamaForSequenceClassification(config_of("llama"))


def masked():
    """Its tokens see those behind them, unless it is told to be a decoder."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = transformers.BertConfig(vocab_size=100, num_attention_heads=2, **sizes)
    return transformers.BertForMaskedLM(config).eval()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (encoder_decoder, TypeError, "got BartForConditionalGeneration, whose logits depend on"),
        (
            masked,
            TypeError,
            "got BertForMaskedLM, whose logits depend on .* is_decoder=True",
        ),
        (classifier, ValueError, "expected logits of the 100 ids that it embeds, got only 2"),
    ],
)
def test_models_of_another_kind_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        causal_log_probs(make(), TOKENS, LENGTHS)


@pytest.mark.parametrize("kind", ["llama", "opt", "gpt2", "logits"])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_default_device_is_not_used(kind, device):
    """Everything is on the model's device, whatever tensors are made on by default."""
    model = asked_for_logits() if kind == "logits" else model_of(kind)
    with torch.no_grad():
        expected = definition(model, TOKENS, LENGTHS, MASK)
    torch.set_default_device(device)
    try:
        for mask in (MASK, None):
            out = causal_log_probs(model, TOKENS, LENGTHS, mask, entropy=True)
            assert [values.device.type for values in out] == ["cpu", "cpu"]
            close((out[0] * MASK.to("cpu")).detach(), expected)
        assert causal_log_probs(model, TOKENS[:0], []).log_probs.device.type == "cpu"
    finally:
        torch.set_default_device(None)  # "cpu" would leave a mode around every call


def test_a_part_of_the_classes_is_refused():
    """As a rank has it whose head is sharded over the vocabulary."""
    model = model_of("llama")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight[:50])
    with pytest.raises(ValueError, match=r"expected logits of the 100 ids .* got only 50"):
        causal_log_probs(model, TOKENS, LENGTHS)
