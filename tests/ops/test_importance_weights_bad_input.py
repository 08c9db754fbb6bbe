"""importance_weights: errors name the argument, what was expected, what came and the remedy."""

from __future__ import annotations

import pytest
import torch

from fusedrl import importance_weights


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
