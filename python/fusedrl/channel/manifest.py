"""The description of a channel, by which other processes open it."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from fusedrl.channel.checks import seconds
from fusedrl.channel.layout import Layout


class Manifest(NamedTuple):
    """The description of a channel, which the channel's memory contains as JSON.

    Attributes:
        layout: the layout of a slot.
        timeout: seconds that publisher and readers wait unless a call says otherwise.
        checksum: whether each version comes with a checksum of its bytes.
        memory: what a reader needs to open the slots, with their ``"kind"``.
    """

    layout: Layout
    timeout: float
    checksum: bool
    memory: dict[str, Any]

    def to_bytes(self) -> bytes:
        """The description as JSON."""
        return json.dumps({**self._asdict(), "layout": self.layout.to_json()}).encode()

    @classmethod
    def of(cls, text: bytes) -> Manifest:
        """The description that another process wrote; every part of it is checked.

        Raises:
            RuntimeError: the text does not come from :meth:`to_bytes`.
        """
        try:
            fields = json.loads(text)
            made = cls(
                Layout.from_json(fields["layout"]),
                seconds("timeout", fields["timeout"]),
                fields["checksum"],
                fields["memory"],
            )
            if not (isinstance(made.checksum, bool) and isinstance(made.memory["kind"], str)):
                raise ValueError("expected 'checksum' to be a bool, and memory of a kind")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise damaged(error) from error
        return made


def damaged(error: Exception) -> RuntimeError:
    """The error to raise for a description that cannot be read."""
    return RuntimeError(
        f"channel: expected its own description, got {type(error).__name__}: {error}; it is "
        "damaged, or of another version of fusedrl: make another channel"
    )
