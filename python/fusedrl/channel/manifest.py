"""What a channel says of itself to those who open it."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from fusedrl.channel.checks import seconds
from fusedrl.channel.layout import Layout


class Manifest(NamedTuple):
    """The description of a channel, which its memory has as JSON.

    Attributes:
        layout: of a slot.
        timeout: seconds that publisher and readers wait where they are not told otherwise.
        checksum: whether each version comes with a sum of its bytes.
        memory: what its slots are opened by, with their ``"kind"``.
    """

    layout: Layout
    timeout: float
    checksum: bool
    memory: dict[str, Any]

    def to_bytes(self) -> bytes:
        """As JSON."""
        return json.dumps({**self._asdict(), "layout": self.layout.to_json()}).encode()

    @classmethod
    def of(cls, text: bytes) -> Manifest:
        """What another process wrote, of which nothing is taken on trust.

        Raises:
            RuntimeError: anything but what :meth:`to_bytes` gives.
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
    """What to raise where a description is none."""
    return RuntimeError(
        f"channel: expected its own description, got {type(error).__name__}: {error}; it is "
        "damaged, or of another version of fusedrl: make another channel"
    )
