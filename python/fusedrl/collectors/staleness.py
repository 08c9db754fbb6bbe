"""Batches that are too old to be handed out."""

from __future__ import annotations

import logging

logger = logging.getLogger("fusedrl")


def is_too_old(late: int, most: int, dropped: int, counter: str) -> bool:
    """Whether a batch is to be dropped, which is logged the first time.

    Args:
        late: versions that its oldest turn is behind.
        most: versions that it may be.
        dropped: turns that were dropped before.
        counter: class and attribute that count them, for the log.
    """
    if late <= most:
        return False
    if not dropped:
        logger.warning(
            "a batch was dropped, its oldest turn is %d versions old and max_staleness is %d; "
            "%s counts (this is said once)",
            late,
            most,
            counter,
        )
    return True
