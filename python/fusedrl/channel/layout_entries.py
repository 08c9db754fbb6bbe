"""The entries of a layout: where each lies, how they are checked, and how messages name them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from fusedrl.channel.tensors import DTYPES, dtype_name

ALIGNMENT = 64  # of an entry: a cache line, and more than any vector load asks for
PAGE = 4096
_SHOWN = 10


@dataclass(frozen=True)
class Entry:
    """One name of the weights.

    Args:
        name: as in a state dict.
        shape: its sizes; ``()`` for a scalar.
        dtype: as it is stored.
        offset: of its first byte, a multiple of 64.
        kind: ``"parameter"`` or ``"buffer"``.
        tied_to: the earlier entry whose memory this one is, or ``None``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    kind: str
    tied_to: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes without padding."""
        return prod(self.shape) * self.dtype.itemsize

    def described(self) -> str:
        """Dtype and shape for messages."""
        return described(self.dtype, self.shape)


def described(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """Dtype and shape for messages."""
    return f"{dtype_name(dtype)} {tuple(shape)}"


def refuse_differences(argument: str, differences: Sequence[str], remedy: str) -> None:
    """Raise one ``ValueError`` that counts the ``differences`` and lists the first ten of them."""
    if differences:
        raise ValueError(
            f"{argument}: {len(differences)} differences from the channel's layout; {remedy}"
            + listed(differences)
        )


def listed(differences: Sequence[str]) -> str:
    """The first ten differences, a line each, and how many more there are."""
    more = [f"and {len(differences) - _SHOWN} more"] * (len(differences) > _SHOWN)
    return "".join(f"\n  {line}" for line in [*differences[:_SHOWN], *more])


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``size``."""
    return -(-size // multiple) * multiple


def lay_out(specs: list[tuple[Any, ...]]) -> tuple[Entry, ...]:
    """Entries one after the other in memory, from name, shape, dtype, kind and tie of each."""
    entries: dict[str, Entry] = {}
    end = 0
    for name, shape, dtype, kind, tied_to in specs:
        if tied_to is not None:
            if tied_to not in entries or entries[tied_to].tied_to is not None:
                raise ValueError(f"{name}: expected to be tied to an earlier entry, got {tied_to}")
            offset = entries[tied_to].offset
            if (entries[tied_to].shape, entries[tied_to].dtype) != (shape, dtype):
                raise ValueError(f"{name}: expected shape and dtype of {tied_to}")
        else:
            offset = end
        entries[name] = entry = Entry(name, shape, dtype, offset, kind, tied_to)
        end = max(end, round_up(offset + entry.nbytes, ALIGNMENT))
    return tuple(entries.values())


def name_clash(names: list[str]) -> str | None:
    """What prevents names from being nested by their dots; ``None`` if nothing does."""
    if len(set(names)) < len(names):
        return "expected each name once, got duplicates"
    nodes = {name[:i] for name in names for i, c in enumerate(name) if c == "."}
    for name in names:
        if not all(name.split(".")):
            return f"{name!r}: expected a name between its dots, got an empty one"
        if name in nodes:
            return f"{name}: expected a tensor or entries below it, got both"
    return None


def entry_spec(entry: dict[str, Any]) -> tuple[Any, ...]:
    """Check an entry of a JSON that may be anything; returns what :func:`lay_out` takes."""
    name, shape, kind, tied_to = (entry[k] for k in ("name", "shape", "kind", "tied_to"))
    if not (isinstance(name, str) and (tied_to is None or isinstance(tied_to, str))):
        raise ValueError(f"{name!r}: expected names")
    if not (isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)):
        raise ValueError(f"{name}: expected a shape, got {shape!r}")
    if kind not in ("parameter", "buffer") or entry["dtype"] not in DTYPES:
        raise ValueError(f"{name}: expected a known kind and dtype, got {kind!r}, {entry['dtype']}")
    return name, tuple(shape), DTYPES[entry["dtype"]], kind, tied_to
