"""Drop-in replacements for torchrl's LLM transforms, based on the fused ops."""

from fusedrl.transforms.kl_computation import KLComputation
from fusedrl.transforms.kl_reward import KLRewardTransform
from fusedrl.transforms.ray import RayKLRewardTransform, RayRetrieveKL
from fusedrl.transforms.retrieve_kl import RetrieveKL
from fusedrl.transforms.retrieve_log_prob import RetrieveLogProb

__all__ = [
    "KLComputation",
    "KLRewardTransform",
    "RayKLRewardTransform",
    "RayRetrieveKL",
    "RetrieveKL",
    "RetrieveLogProb",
]
