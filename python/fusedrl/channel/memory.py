"""The memory of a channel's slots, as one process sees it, and what describes it to others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fusedrl import _host
from fusedrl.channel.layout import Layout


class Memory:
    """The slots of a channel as one process sees them: here in the channel's file in host memory.

    A slot is a flat tensor of bytes that owns its mapping: the memory is unmapped when the last
    tensor over it is freed. Copies in host memory are synchronous, so nothing has to order them.

    Args:
        end: this process's end of the channel; the slots of a reader are read-only.
        slots: number of slots.
        nbytes: size of a slot in bytes.
    """

    MANIFEST: ClassVar = {"kind": "host"}
    device: torch.device = torch.device("cpu")
    asynchronous = False  # whether computation may go on after the call that launches it

    def __init__(self, end: _host.Publisher | _host.Reader, slots: int, nbytes: int) -> None:
        self._end, self._nbytes = end, nbytes
        self.count = slots

    def slot(self, index: int, lease: _host.Lease | None = None) -> Tensor:
        """The bytes of a slot; the tensor keeps a ``lease`` of the slot, if there is one."""
        return torch.from_dlpack(self._end.slot_tensor(index, self._nbytes, lease))

    def before_write(self, index: int) -> None:
        """Make the publisher's copies wait for earlier writes to this slot."""

    def after_write(self, index: int) -> None:
        """Mark the end of the publisher's copies, which readers wait for."""

    def before_read(self, index: int) -> None:
        """Make the reader's computation wait for the publisher's copies."""

    def give_back(self, index: int, lease: int) -> None:
        """Let ``_host.give_back`` have a lease of a slot once the computation so far has ended."""

    def wait_for_reads(self) -> None:
        """Wait for the computation so far, and for what :meth:`give_back` was given."""

    def manifest(self) -> dict[str, Any]:
        """What another process needs to open this memory, in types that JSON has."""
        return self.MANIFEST

    def close(self, in_use_by: Sequence[int] = ()) -> None:
        """Free the memory that no tensor and none of the processes with these pids still uses."""


class Manifest(NamedTuple):
    """The description of a channel, which the channel's memory contains as JSON.

    Attributes:
        layout: the layout of a slot.
        timeout: seconds that publisher and readers wait unless a call says otherwise.
        memory: what a reader needs to open the slots, with their ``"kind"``.
    """

    layout: Layout
    timeout: float
    memory: dict[str, Any]

    def to_bytes(self) -> bytes:
        """The description as JSON."""
        return json.dumps({**self._asdict(), "layout": self.layout.to_json()}).encode()

    @classmethod
    def of(cls, text: bytes) -> Manifest:
        """The description that another process wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "layout": Layout.from_json(fields["layout"])})
