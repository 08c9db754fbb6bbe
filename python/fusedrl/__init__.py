"""Compiled kernels and drop-in torchrl classes for LLM post-training.

Every name loads on first use: ``import fusedrl`` takes almost no time, an op imports torch, and a
transform imports torchrl. ``fusedrl.channel``, ``fusedrl.models`` and ``fusedrl.vllm`` have more.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "token_log_probs": "fusedrl.ops",
    "TokenLogProbs": "fusedrl.ops",
    "linear_token_log_probs": "fusedrl.ops",
    "VocabPart": "fusedrl.ops",
    "token_kl": "fusedrl.ops",
    "TokenKL": "fusedrl.ops",
    "ExactKL": "fusedrl.ops",
    "exact_kl": "fusedrl.ops",
    "linear_exact_kl": "fusedrl.ops",
    "top_k_kl": "fusedrl.ops",
    "linear_top_k_kl": "fusedrl.ops",
    "linear_policy_loss": "fusedrl.ops",
    "PolicyLoss": "fusedrl.ops",
    "importance_weights": "fusedrl.ops",
    "sampling_support": "fusedrl.ops",
    "support_log_probs": "fusedrl.ops",
    "ImportanceWeights": "fusedrl.ops",
    "Mismatch": "fusedrl.ops",
    "KLComputation": "fusedrl.transforms",
    "RetrieveLogProb": "fusedrl.transforms",
    "RetrieveKL": "fusedrl.transforms",
    "KLRewardTransform": "fusedrl.transforms",
    "RayRetrieveKL": "fusedrl.transforms",
    "RayKLRewardTransform": "fusedrl.transforms",
    "GRPOLoss": "fusedrl.objectives",
    "CISPOLoss": "fusedrl.objectives",
    "DAPO": "fusedrl.objectives",
    "SFTLoss": "fusedrl.objectives",
    "DistillationLoss": "fusedrl.objectives",
    "loss_metrics": "fusedrl.objectives",
    "WeightChannel": "fusedrl.channel",
    "WeightHandle": "fusedrl.channel",
    "WeightReader": "fusedrl.channel",
    "LocalWeightUpdaterBase": "fusedrl.weights",
    "RemoteWeightUpdaterBase": "fusedrl.weights",
    "VanillaLocalWeightUpdater": "fusedrl.weights",
    "MultiProcessedRemoteWeightUpdate": "fusedrl.weights",
    "RayRemoteWeightUpdater": "fusedrl.weights",
    "PolicyVersion": "fusedrl.collectors",
    "VersionChange": "fusedrl.collectors",
    "LLMCollector": "fusedrl.collectors",
    "AsyncCollector": "fusedrl.collectors",
    "aSyncDataCollector": "fusedrl.collectors",
    "RayLLMCollector": "fusedrl.collectors",
    "turn_metrics": "fusedrl.collectors",
    "ChannelWeightSyncScheme": "fusedrl.weights",
    "patch_torchrl": "fusedrl.integrations.torchrl",
    "patch_trl": "fusedrl.integrations.trl",
}

__all__ = ["__version__", *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from fusedrl.channel import WeightChannel as WeightChannel
    from fusedrl.channel import WeightHandle as WeightHandle
    from fusedrl.channel import WeightReader as WeightReader
    from fusedrl.collectors import AsyncCollector as AsyncCollector
    from fusedrl.collectors import LLMCollector as LLMCollector
    from fusedrl.collectors import PolicyVersion as PolicyVersion
    from fusedrl.collectors import RayLLMCollector as RayLLMCollector
    from fusedrl.collectors import VersionChange as VersionChange
    from fusedrl.collectors import aSyncDataCollector as aSyncDataCollector
    from fusedrl.collectors import turn_metrics as turn_metrics
    from fusedrl.integrations.torchrl import patch_torchrl as patch_torchrl
    from fusedrl.integrations.trl import patch_trl as patch_trl
    from fusedrl.objectives import DAPO as DAPO
    from fusedrl.objectives import CISPOLoss as CISPOLoss
    from fusedrl.objectives import DistillationLoss as DistillationLoss
    from fusedrl.objectives import GRPOLoss as GRPOLoss
    from fusedrl.objectives import SFTLoss as SFTLoss
    from fusedrl.objectives import loss_metrics as loss_metrics
    from fusedrl.ops import ExactKL as ExactKL
    from fusedrl.ops import ImportanceWeights as ImportanceWeights
    from fusedrl.ops import Mismatch as Mismatch
    from fusedrl.ops import PolicyLoss as PolicyLoss
    from fusedrl.ops import TokenKL as TokenKL
    from fusedrl.ops import TokenLogProbs as TokenLogProbs
    from fusedrl.ops import VocabPart as VocabPart
    from fusedrl.ops import exact_kl as exact_kl
    from fusedrl.ops import importance_weights as importance_weights
    from fusedrl.ops import linear_exact_kl as linear_exact_kl
    from fusedrl.ops import linear_policy_loss as linear_policy_loss
    from fusedrl.ops import linear_token_log_probs as linear_token_log_probs
    from fusedrl.ops import linear_top_k_kl as linear_top_k_kl
    from fusedrl.ops import sampling_support as sampling_support
    from fusedrl.ops import support_log_probs as support_log_probs
    from fusedrl.ops import token_kl as token_kl
    from fusedrl.ops import token_log_probs as token_log_probs
    from fusedrl.ops import top_k_kl as top_k_kl
    from fusedrl.transforms import KLComputation as KLComputation
    from fusedrl.transforms import KLRewardTransform as KLRewardTransform
    from fusedrl.transforms import RayKLRewardTransform as RayKLRewardTransform
    from fusedrl.transforms import RayRetrieveKL as RayRetrieveKL
    from fusedrl.transforms import RetrieveKL as RetrieveKL
    from fusedrl.transforms import RetrieveLogProb as RetrieveLogProb
    from fusedrl.weights import ChannelWeightSyncScheme as ChannelWeightSyncScheme
    from fusedrl.weights import LocalWeightUpdaterBase as LocalWeightUpdaterBase
    from fusedrl.weights import MultiProcessedRemoteWeightUpdate as MultiProcessedRemoteWeightUpdate
    from fusedrl.weights import RayRemoteWeightUpdater as RayRemoteWeightUpdater
    from fusedrl.weights import RemoteWeightUpdaterBase as RemoteWeightUpdaterBase
    from fusedrl.weights import VanillaLocalWeightUpdater as VanillaLocalWeightUpdater


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        # Python's traceback suggests a similar name only if name and obj are set.
        raise AttributeError(
            f"module 'fusedrl' has no attribute {name!r}", name=name, obj=sys.modules[__name__]
        )
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
