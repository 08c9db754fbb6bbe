"""The memory of a channel's slots, as one process sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from fusedrl import _host
from fusedrl.channel.manifest import damaged


class Memory(Protocol):
    """The slots of a channel in one process, and what orders writes and reads of them.

    A slot is a flat tensor of bytes that owns its mapping: the memory is unmapped when the last
    tensor over it is freed.
    """

    device: torch.device
    asynchronous: bool  # whether computation may go on after the call that launches it

    def slot(self, index: int) -> Tensor:
        """The bytes of a slot."""
        ...

    def before_write(self, index: int) -> None:
        """Make the publisher's copies wait for earlier writes to this slot."""
        ...

    def after_write(self, index: int) -> None:
        """Mark the end of the publisher's copies, which readers wait for."""
        ...

    def before_read(self, index: int) -> None:
        """Make the reader's computation wait for the publisher's copies."""
        ...

    def after_read(self, index: int) -> Callable[[], bool] | None:
        """Tell whether the reader's computation so far has ended; ``None`` if it has already."""
        ...

    def manifest(self) -> dict[str, Any]:
        """What another process needs to open this memory, in types that JSON has."""
        ...

    def close(self, in_use_by: Sequence[int] = ()) -> None:
        """Free the memory that no tensor and none of the processes with these pids still uses."""
        ...


class HostMemory:
    """Slots in the channel's own file in host memory, where copies are synchronous.

    Args:
        end: this process's end of the channel; the slots of a reader are read-only.
        slots: number of slots.
        nbytes: size of a slot in bytes.
    """

    MANIFEST: ClassVar = {"kind": "host"}
    asynchronous = False

    def __init__(self, end: _host.Publisher | _host.Reader, slots: int, nbytes: int) -> None:
        self.device = torch.device("cpu")
        self._tensor: Callable[[int], Tensor] = lambda i: torch.from_dlpack(
            end.slot_tensor(i, nbytes)
        )
        self._slots = [self._tensor(i) for i in range(slots)]
        self._addresses = [slot.data_ptr() for slot in self._slots]

    def slot(self, index: int) -> Tensor:
        """See :class:`Memory`."""
        if self._slots[index].data_ptr() != self._addresses[index]:
            # Somebody has pickled a view for another process, which moves its storage elsewhere.
            self._slots[index] = self._tensor(index)
        return self._slots[index]

    def before_write(self, index: int) -> None:
        """Do nothing: copies on the CPU are in order."""

    def after_write(self, index: int) -> None:
        """Do nothing: copies on the CPU are done when they return."""

    def before_read(self, index: int) -> None:
        """Do nothing: a published version is complete."""

    def after_read(self, index: int) -> None:
        """Return ``None``: reads on the CPU are done when they return."""

    def manifest(self) -> dict[str, Any]:
        """See :class:`Memory`."""
        return self.MANIFEST

    def close(self, in_use_by: Sequence[int] = ()) -> None:
        """Do nothing: the tensors own the mapping."""


def open_memory(manifest: dict[str, Any], end: _host.Reader, nbytes: int) -> Memory:
    """The slots that a channel's manifest describes, in a reader's process.

    Raises:
        RuntimeError: the memory is of an unknown kind, or its size does not fit the layout.
    """
    try:
        if manifest["kind"] == "cuda":
            from fusedrl.channel.cuda import CudaMemory

            if manifest["nbytes"] != nbytes or len(manifest["slots"]) != end.slot_count():
                raise ValueError(f"expected {end.slot_count()} slots of {nbytes} bytes")
            return CudaMemory.open(manifest)
        if manifest["kind"] != "host" or end.slot_bytes() != nbytes:
            raise ValueError(
                f"expected memory of {nbytes} bytes a slot, of a GPU or not, got "
                f"{manifest['kind']!r} of {end.slot_bytes()}"
            )
        return HostMemory(end, end.slot_count(), nbytes)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise damaged(error) from error


def checksum(slot: Tensor) -> int:
    """The sum of a slot's 64-bit words, modulo 2^64."""
    return int(slot.view(torch.int64).sum()) & (2**64 - 1)
