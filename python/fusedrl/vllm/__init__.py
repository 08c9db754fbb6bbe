"""A weight channel into vLLM: whole versions for its engines, and the version of each token."""

from fusedrl.vllm.token_versions import token_versions
from fusedrl.vllm.weights import EngineWeights

__all__ = [
    "EngineWeights",
    "token_versions",
]
