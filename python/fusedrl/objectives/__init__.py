"""torchrl's losses for language models, computed from hidden states."""

from fusedrl.objectives.grpo import DAPO, CISPOLoss, GRPOLoss
from fusedrl.objectives.metrics import loss_metrics

__all__ = ["DAPO", "CISPOLoss", "GRPOLoss", "loss_metrics"]
