"""Causal language models of transformers: their log-probs at the cost of the decoder's forward."""

from fusedrl.models.adapters import WithoutAdapters
from fusedrl.models.log_probs import causal_log_probs

__all__ = ["WithoutAdapters", "causal_log_probs"]
