"""importance_weights: errors name the argument, what was expected, what came and the remedy."""

from __future__ import annotations

import pytest
import torch

from fusedrl import importance_weights

NAN = float("nan")
GOOD = {"log_probs": torch.zeros(4), "rollout_log_probs": torch.zeros(4)}


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"rollout_log_probs": torch.zeros(5)}, ValueError, r"rollout_log_probs: expected shape"),
        ({"rollout_log_probs": [torch.zeros(4)]}, TypeError, "rollout_log_probs: expected a dense"),
        ({"log_probs": [torch.zeros(4)]}, TypeError, "rollout_log_probs: expected a list"),
        ({"log_probs": torch.zeros(4).long()}, TypeError, "log_probs: expected a floating"),
        ({"rollout_log_probs": torch.ones(4).long()}, TypeError, "rollout_log_probs: expected a f"),
        ({"log_probs": 1.0}, TypeError, "log_probs: expected a dense tensor .* got float"),
        ({"mask": torch.ones(4)}, TypeError, "mask: expected torch.bool, got torch.float32; conv"),
        ({"level": "batch"}, ValueError, "level: expected one of token, sequence, geometric, got"),
        ({"mode": "clip"}, ValueError, "mode: expected one of truncate, mask, got 'clip'"),
        ({"nan": "zero"}, ValueError, "nan: expected one of propagate, missing, got 'zero'"),
        ({"low": -0.1}, ValueError, "low: expected a number from 0 to 1e[+]30, got -0.1"),
        ({"high": NAN}, ValueError, "high: expected a number from 0 to 1e[+]30, got nan"),
        ({"high": "2"}, TypeError, "high: expected a real number or a floating-point tensor"),
        ({"low": 3.0}, ValueError, "low: expected at most high=2, got 3; swap the bounds"),
        ({"low": torch.tensor(3.0)}, ValueError, "low: expected at most high=2, got 3"),
        ({"high": torch.ones(2)}, ValueError, "high: expected a float or a .* of one element"),
        ({"level": "sequence"}, ValueError, r"offsets: expected .* pass offsets=torch.tensor"),
        ({"offsets": torch.tensor([0, 3])}, ValueError, "from 0 to 4"),
        ({"impl": "triton"}, ValueError, "impl: expected .* for importance_weights, got 'triton'"),
        (
            {key: torch.zeros(2, 2) for key in GOOD} | {"offsets": torch.tensor([0, 4])},
            ValueError,
            r"offsets: expected None with padded \[B, T\] log_probs",
        ),
        (
            {key: torch.zeros(2, 2, 2) for key in GOOD},
            ValueError,
            r"log_probs: expected \[N\] packed or \[B, T\] padded, got shape \(2, 2, 2\)",
        ),
        ({key: torch.tensor(0.0) for key in GOOD}, ValueError, r"got shape \(\)"),
    ],
)
def test_bad_input_names_argument_expectation_and_remedy(change, error, match):
    with pytest.raises(error, match=match):
        importance_weights(**{**GOOD, **change})


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (([torch.zeros(2)], []), "rollout_log_probs: expected 1 samples, got 0"),
        (([], [torch.zeros(1)]), "log_probs: expected at least one sample, got an empty list"),
        (
            ([torch.zeros(2), torch.zeros(3)], [torch.zeros(2), torch.zeros(4)]),
            r"rollout_log_probs: sample 1: expected shape \(3,\) as in log_probs, got \(4,\)",
        ),
        (([torch.zeros(2)],) * 2 + ([torch.ones(3).bool()],), "mask: sample 0: expected shape"),
        (([torch.zeros(2)],) * 2 + (None, torch.tensor([0, 2])), "offsets: expected None with a l"),
    ],
)
def test_bad_lists_name_the_sample(args, match):
    with pytest.raises(ValueError, match=match):
        importance_weights(*args)


def test_nested_companions():
    jagged = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    other = torch.nested.nested_tensor([torch.zeros(3), torch.zeros(2)], layout=torch.jagged)
    with pytest.raises(TypeError, match="rollout_log_probs: expected a nested tensor like log_pr"):
        importance_weights(jagged, torch.zeros(5))
    with pytest.raises(ValueError, match="rollout_log_probs: expected the sequence lengths of log"):
        importance_weights(jagged, other)
    with pytest.raises(ValueError, match="offsets: expected None with nested log_probs"):
        importance_weights(jagged, jagged, offsets=torch.tensor([0, 2, 5]))
