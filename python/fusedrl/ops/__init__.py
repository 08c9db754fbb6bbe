"""The kernels, one package an op: the public function, its reference, its autograd."""

from fusedrl.ops.token_kl import TokenKL, token_kl
from fusedrl.ops.token_log_probs import TokenLogProbs, token_log_probs

__all__ = ["TokenKL", "TokenLogProbs", "token_kl", "token_log_probs"]
