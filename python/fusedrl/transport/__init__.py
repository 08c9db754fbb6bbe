"""Tensordicts on the way to another process: one pickle, and one piece of memory.

The rows of a ragged column are views of one storage, and an ordinary pickle would carry that
storage once for each row. Each tensor in a pickle also costs as much as a small message.

What other libraries offer is slower where there are many turns. ``consolidate()`` of tensordict
0.14.3 raises a ``TypeError`` for stacks of dialogs. The table compares this package with a pickle
of protocol 5 whose tensors are out-of-band buffers, copied into one piece of memory. The data are
dialogs of 8 turns that an LLMCollector makes with a tiny model. Time is that of packing and
unpacking together; time and bytes of the pickle are relative to this package:

======  =====  =====  =======
turns   time   bytes  here
======  =====  =====  =======
8       0.77   1.5    8 ms
64      1.73   2.4    40 ms
512     2.36   2.9    0.5 s
4096    2.44   3.0    5.4 s
======  =====  =====  =======

Plain pickle takes 2.6 and 5.8 times as long for 8 and 64 turns, and torch's ForkingPickler 5.5 and
11 times. A dense tensordict has few columns: for it, out-of-band buffers need 0.4 to 0.6 of the
time, which is half a millisecond less, and ``consolidate()`` with pickle 1.4 to 4.1 times.
(These are medians of CPU time, over 3 repetitions of 4096 turns to 678 of 8, taken in alternation
on two cores of an AMD EPYC that other processes used too; Python 3.11, torch 2.13. Since then
groups have tensors of all shapes: up to a tenth more time, up to a fifth more bytes of pickle.)
"""

from __future__ import annotations

import io
from typing import Any, NamedTuple

import numpy as np
import torch

from fusedrl.transport.groups import Group, TensorGroups
from fusedrl.transport.pickling import ColumnPickler, ColumnUnpickler

__all__ = ["Contents", "Serialized", "deserialize", "put_together", "serialize", "take_apart"]


class Contents(NamedTuple):
    """What restores a value from ``nbytes`` of memory: a pickle, and where each tensor lies."""

    structure: bytes
    groups: list[Group]
    nbytes: int


class Serialized(NamedTuple):
    """Contents and their memory, to be sent; ``device`` is that of the first tensor, if any."""

    contents: Contents
    memory: np.ndarray[Any, Any]
    device: torch.device | None


def take_apart(value: Any, share: bool = False) -> tuple[Contents, TensorGroups]:
    """Separate a value into its contents and its dense tensors, which are still to be copied.

    Args:
        value: anything that can be pickled.
        share: whether CUDA tensors stay where they are, for a process on this machine.
    """
    file, tensors = io.BytesIO(), TensorGroups(share)
    ColumnPickler(file, tensors).write(value)
    return Contents(file.getvalue(), *tensors.layout()), tensors


def put_together(contents: Contents, memory: np.ndarray[Any, Any]) -> Any:
    """Restore the value; its tensors lie in ``memory``, a flat array of bytes, without a copy.

    Each has a storage of its own there, and keeps the array. So a pickle or a copy of one tensor
    has nothing of the others.
    """
    tensors = [group.tensors(memory) for group in contents.groups]
    return ColumnUnpickler(io.BytesIO(contents.structure), tensors).read()


def serialize(value: Any) -> Serialized:
    """``value`` with its dense tensors copied to the CPU, without their gradient graphs."""
    contents, tensors = take_apart(value)
    memory = torch.empty(contents.nbytes, dtype=torch.uint8)
    tensors.copy(contents.groups, memory)
    return Serialized(contents, memory.numpy(), tensors.device)


def deserialize(serialized: Serialized) -> Any:
    """The value that was serialized; its tensors lie in one piece of memory."""
    # The memory of a message is read-only, so it is copied.
    return put_together(serialized.contents, serialized.memory.copy())
