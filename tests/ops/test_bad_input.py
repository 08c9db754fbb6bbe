"""Unusual input has a correct answer or a refusal that names the argument."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from fusedrl import VocabPart, linear_token_log_probs, token_kl, token_log_probs

LOGITS, TOKENS = torch.linspace(-2, 2, 20).view(4, 5), torch.tensor([0, 1, 2, 3])
P, Q = torch.linspace(-3, -1, 4), torch.linspace(-2, -1.5, 4)


def scaled(temperature):
    return token_log_probs(LOGITS, TOKENS, temperature=temperature).log_probs


def penalised(coeff):
    return token_kl(P, Q, reward=P, coeff=coeff).reward


REAL_NUMBERS = [2, np.float16(2), np.float32(2), np.float64(2), np.int64(2), Fraction(2)]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", REAL_NUMBERS, ids=repr)
def test_every_real_number_is_a_scalar(value):
    assert torch.equal(scaled(value), scaled(2.0))
    assert torch.equal(penalised(value), penalised(2.0))
    for name in ("scale", "softcap", "temperature"):
        ours, expected = (
            linear_token_log_probs(
                LOGITS, torch.eye(LOGITS.shape[-1]), TOKENS, **{name: number}
            ).log_probs
            for number in (value, 2.0)
        )
        assert torch.equal(ours, expected)


def test_a_scalar_may_vary_under_vmap():
    temperatures = torch.tensor([0.5, 2.0])
    expected = torch.stack([scaled(0.5), scaled(2.0)])
    assert torch.equal(torch.vmap(scaled)(temperatures), expected)


HIDDEN, WEIGHT = torch.linspace(-2, 2, 12).view(4, 3), torch.linspace(-1, 1, 15).view(5, 3)


@pytest.mark.parametrize("name", ["hidden", "weight", "bias"])
def test_a_part_does_not_differentiate(name):
    inputs = {"hidden": HIDDEN, "weight": WEIGHT, "tokens": TOKENS, "bias": torch.zeros(5)}
    inputs[name] = inputs[name].clone().requires_grad_()
    with pytest.raises(ValueError, match=r"hidden: expected inputs .* torch.no_grad\(\)"):
        VocabPart.of(**inputs, vocab_offset=0)
    with torch.no_grad():
        assert isinstance(VocabPart.of(**inputs, vocab_offset=0), VocabPart)
