"""Collectors of dialogs, and the versions of the policies that had them."""

from fusedrl.collectors.async_collector import AsyncCollector, aSyncDataCollector
from fusedrl.collectors.llm_collector import LLMCollector
from fusedrl.collectors.policy_version import PolicyVersion

__all__ = ["AsyncCollector", "LLMCollector", "PolicyVersion", "aSyncDataCollector"]
