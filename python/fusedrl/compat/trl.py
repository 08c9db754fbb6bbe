"""What we need of TRL's private names."""

from __future__ import annotations

from typing import Any

# Around the loss, the head is told which loss it is for; around the log-probs, prefixes are shared.
LOSS = "_compute_loss"
LOG_PROBS = "_get_per_token_logps_and_entropies"


def entropy_bonus_applies(trainer: Any) -> bool:
    """Whether the mean entropy of tokens counts in the next loss of a GRPO trainer."""
    if trainer.use_adaptive_entropy:
        return trainer._last_world_entropy <= trainer.args.entropy_target
    return trainer.entropy_coef != 0
