"""Log-probs under causal language models of transformers, without logits of all tokens."""

from fusedrl.models.log_probs import causal_log_probs
from fusedrl.models.without_adapters import WithoutAdapters

__all__ = ["WithoutAdapters", "causal_log_probs"]
