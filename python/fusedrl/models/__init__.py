"""Log-probs under causal language models of transformers, without materialising all logits."""

from fusedrl.models.log_probs import causal_log_probs
from fusedrl.models.other_adapters import WithAdapter, WithoutAdapters

__all__ = ["WithAdapter", "WithoutAdapters", "causal_log_probs"]
