"""What an op says of a tensor that is ``None``: which one it needs."""

from __future__ import annotations

import pytest
import torch

from fusedrl import (
    exact_kl,
    importance_weights,
    linear_exact_kl,
    linear_policy_loss,
    linear_token_log_probs,
    linear_top_k_kl,
    token_kl,
    token_log_probs,
    top_k_kl,
)

LOGITS, HIDDEN, WEIGHT = torch.randn(2, 3, 5), torch.randn(2, 3, 4), torch.randn(5, 4)
TOKENS, LOG_PROBS = torch.zeros(2, 3, dtype=torch.int64), -torch.ones(2, 3)
TEACHER = LOGITS.log_softmax(-1).topk(2)

CALLS = {
    token_kl: {"log_probs": LOG_PROBS, "ref_log_probs": LOG_PROBS},
    importance_weights: {"log_probs": LOG_PROBS, "rollout_log_probs": LOG_PROBS},
    token_log_probs: {"logits": LOGITS, "tokens": TOKENS},
    linear_token_log_probs: {"hidden": HIDDEN, "weight": WEIGHT, "tokens": TOKENS},
    exact_kl: {"logits": LOGITS, "ref_logits": LOGITS},
    linear_exact_kl: {
        "hidden": HIDDEN,
        "weight": WEIGHT,
        "ref_hidden": HIDDEN,
        "ref_weight": WEIGHT,
    },
    top_k_kl: {"logits": LOGITS, "ids": TEACHER.indices, "teacher_log_probs": TEACHER.values},
    linear_top_k_kl: {
        "hidden": HIDDEN,
        "weight": WEIGHT,
        "ids": TEACHER.indices,
        "teacher_log_probs": TEACHER.values,
    },
    linear_policy_loss: {
        "hidden": HIDDEN,
        "weight": WEIGHT,
        "tokens": TOKENS,
        "mask": None,
        "advantages": torch.ones(2),
    },
}


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (op, name)
        for op, given in CALLS.items()
        for name, value in given.items()
        if value is not None
    ],
)
def test_a_tensor_that_is_none_is_told_what_to_pass(op, name):
    op(**CALLS[op])
    with pytest.raises(TypeError, match=rf"^{name}: expected .*, got NoneType; pass (the|one) "):
        op(**CALLS[op] | {name: None})
