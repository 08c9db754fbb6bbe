"""Collectors of dialogs, with policy-version tracking."""

# Re-exported from torchrl unchanged.
from torchrl.envs.llm.transforms.policy_version import VersionChange

from fusedrl.collectors.llm_collector import LLMCollector
from fusedrl.collectors.policy_version import PolicyVersion
from fusedrl.collectors.process.async_collector import AsyncCollector, aSyncDataCollector
from fusedrl.collectors.progress import turn_metrics
from fusedrl.collectors.ray_llm_collector import RayLLMCollector

__all__ = [
    "AsyncCollector",
    "LLMCollector",
    "PolicyVersion",
    "RayLLMCollector",
    "VersionChange",
    "aSyncDataCollector",
    "turn_metrics",
]
