"""torchrl's losses for language models, computed from hidden states."""

from fusedrl.objectives.grpo import DAPO, CISPOLoss, GRPOLoss

__all__ = ["DAPO", "CISPOLoss", "GRPOLoss"]
