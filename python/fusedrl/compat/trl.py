"""The private names of TRL that fusedrl uses."""

from __future__ import annotations

# Methods within which prefixes are shared.
LOSS = "_compute_loss"
LOG_PROBS = "_get_per_token_logps_and_entropies"
# A function of trl.trainer.utils: whether the head gets only the scored positions.
COMPACTS = "_use_triton"
