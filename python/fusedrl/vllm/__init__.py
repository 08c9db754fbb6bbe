"""A weight channel into vLLM: whole versions for its engines, and the version of each token."""

from fusedrl.vllm.engine_weights import EngineWeights
from fusedrl.vllm.token_versions import token_versions

__all__ = [
    "EngineWeights",
    "token_versions",
]
