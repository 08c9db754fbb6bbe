"""Causal language models of transformers: their log-probs at the cost of the decoder's forward."""

from fusedrl.models.log_probs import causal_log_probs
from fusedrl.models.without_adapters import WithoutAdapters

__all__ = ["WithoutAdapters", "causal_log_probs"]
