"""A weight channel into vLLM: whole versions for its engines, and the version of each token."""

from fusedrl.vllm.engine_weights import EngineWeights

__all__ = ["EngineWeights"]
