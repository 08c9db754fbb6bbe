"""Batches that are too old to be handed out."""

from __future__ import annotations

import logging
from typing import Any

from fusedrl.collectors.checks import check_staleness

logger = logging.getLogger("fusedrl")


def bounded(part: str, doc: str) -> Any:
    """The attribute ``max_staleness`` of a collector, which a part of it has.

    Args:
        part: the collector's attribute that has the part.
        doc: what it is.
    """

    def read(self: Any) -> Any:
        return getattr(self, part).max_staleness

    def write(self: Any, value: Any) -> None:
        check_staleness(value, self.policy_version_tracker or False)
        getattr(self, part).max_staleness = value

    return property(read, write, doc=doc)


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
