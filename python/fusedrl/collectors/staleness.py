"""Drops batches that are too old to be handed out."""

from __future__ import annotations

import logging
from typing import Any

from fusedrl.collectors.checks import check_staleness

logger = logging.getLogger("fusedrl")


def bounded(part: str, doc: str) -> Any:
    """An attribute ``max_staleness`` of a collector, whose value a part of the collector keeps.

    Args:
        part: the collector's attribute with the part.
        doc: the docstring of the attribute.
    """

    def read(self: Any) -> Any:
        return getattr(self, part).max_staleness

    def write(self: Any, value: Any) -> None:
        check_staleness(value, self.policy_version_tracker or False)
        getattr(self, part).max_staleness = value

    return property(read, write, doc=doc)


def is_too_old(late: int, most: int, dropped: int, counter: str) -> bool:
    """Whether to drop a batch; the first time is logged.

    Args:
        late: how many versions the oldest turn of the batch is behind.
        most: how many versions it may be behind.
        dropped: how many turns were dropped before.
        counter: the class and attribute that count dropped turns, for the log.
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
