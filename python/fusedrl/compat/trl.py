"""What we need of TRL's private names."""

from __future__ import annotations

# Methods around which prefixes are shared.
LOSS = "_compute_loss"
LOG_PROBS = "_get_per_token_logps_and_entropies"
# A function of trl.trainer.utils: whether the head gets only the positions that are scored.
COMPACTS = "_use_triton"
