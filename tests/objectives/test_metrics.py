"""loss_metrics: the figures of every loss, flat, as torchrl's and TRL's loggers take them."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.objectives.llm.grpo import GRPOLossOutput

from fusedrl import linear_policy_loss, loss_metrics

HIDDEN, WEIGHT, TOKENS = torch.ones(3, 4), torch.zeros(10, 4), torch.tensor([1, 7, 3])


def test_a_policy_loss_is_named_flat():
    result = linear_policy_loss(HIDDEN, WEIGHT, TOKENS, torch.ones(1), entropy_coeff=0.0)
    metrics = loss_metrics(result)
    assert metrics["loss/objective"] == pytest.approx(-1.0)
    assert metrics["loss/entropy"] == pytest.approx(torch.tensor(10.0).log().item())
    assert metrics["loss/ratio/clipped_high"] == 0.0
    assert not {"loss/kl", "loss/log_probs", "loss/entropies"} & metrics.keys()
    assert all(type(value) is float for value in metrics.values())


def test_the_output_of_a_torchrl_loss_and_a_tensordict_are_named_alike():
    figures = {"loss_objective": torch.tensor(2.0), "ESS": torch.tensor([0.5])}
    expected = {"train/objective": 2.0, "train/ESS": 0.5}
    assert loss_metrics(TensorDict(figures), prefix="train/") == expected
    output = GRPOLossOutput(
        **figures, clip_fraction=torch.tensor(0.25), kl_approx=torch.tensor(0.0)
    )
    assert loss_metrics(output, "train/") == expected | {
        "train/clip_fraction": 0.25,
        "train/kl_approx": 0.0,
    }


def test_what_is_no_loss_is_refused():
    with pytest.raises(TypeError, match="result: expected the result of a loss, got float; pass"):
        loss_metrics(2.0)
