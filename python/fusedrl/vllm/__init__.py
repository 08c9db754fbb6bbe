"""A weight channel into vLLM: whole versions for its engines, and the version of each token."""

from fusedrl.vllm.engine_weights import EngineWeights
from fusedrl.vllm.served_adapters import ServedAdapters
from fusedrl.vllm.token_versions import token_versions

__all__ = [
    "EngineWeights",
    "ServedAdapters",
    "token_versions",
]
