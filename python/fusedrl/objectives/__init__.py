"""torchrl's losses for language models, computed from hidden states."""

from fusedrl.objectives.grpo import DAPO, CISPOLoss, GRPOLoss
from fusedrl.objectives.metrics import loss_metrics
from fusedrl.objectives.supervised import DistillationLoss, SFTLoss

__all__ = ["DAPO", "CISPOLoss", "DistillationLoss", "GRPOLoss", "SFTLoss", "loss_metrics"]
