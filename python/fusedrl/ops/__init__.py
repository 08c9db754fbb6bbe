"""The ops, and functions in plain torch that call them."""

from fusedrl.ops.exact_kl import ExactKL, exact_kl
from fusedrl.ops.importance_weights import ImportanceWeights, Mismatch, importance_weights
from fusedrl.ops.linear_exact_kl import linear_exact_kl
from fusedrl.ops.linear_policy_loss import (
    RECIPES,
    PolicyLoss,
    PolicyRecipe,
    RatioStatistics,
    linear_policy_loss,
)
from fusedrl.ops.linear_token_log_probs import VocabPart, linear_token_log_probs
from fusedrl.ops.sampling_support import sampling_support, support_log_probs
from fusedrl.ops.token_kl import TokenKL, token_kl
from fusedrl.ops.token_log_probs import TokenLogProbs, token_log_probs
from fusedrl.ops.top_k_kl import linear_top_k_kl, top_k_kl

__all__ = [
    "RECIPES",
    "ExactKL",
    "ImportanceWeights",
    "Mismatch",
    "PolicyLoss",
    "PolicyRecipe",
    "RatioStatistics",
    "TokenKL",
    "TokenLogProbs",
    "VocabPart",
    "exact_kl",
    "importance_weights",
    "linear_exact_kl",
    "linear_policy_loss",
    "linear_token_log_probs",
    "linear_top_k_kl",
    "sampling_support",
    "support_log_probs",
    "token_kl",
    "token_log_probs",
    "top_k_kl",
]
