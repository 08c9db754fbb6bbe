"""The weight channel for vLLM: engines load whole versions and report them for each token."""

from fusedrl.vllm.token_versions import token_versions
from fusedrl.vllm.weights import EngineWeights

__all__ = [
    "EngineWeights",
    "token_versions",
]
