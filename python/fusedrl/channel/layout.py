"""The layout of a model's weights in one flat buffer, and how they are written to it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from fusedrl.channel.tensors import (
    DTYPES,
    Weight,
    castable,
    check_supported,
    converts,
    described,
    dtype_name,
    is_dtensor,
    overwrite,
    read_as,
    same_values,
    weights_of,
)

_ALIGNMENT = 64  # bytes, of each entry: a cache line
_PAGE = 4096
_MAX_LISTED = 10


@dataclass(frozen=True)
class Entry:
    """One named tensor of the weights, at byte ``offset``; a scalar has shape ``()``."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    kind: str
    tied_to: str | None = None  # the earlier entry that this one shares memory with

    @property
    def nbytes(self) -> int:
        """Bytes without padding."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """Names, shapes, dtypes and offsets of weights in flat memory; tied names share one offset."""

    entries: tuple[Entry, ...]  # tied ones after the one that they are tied to
    merged: bool = False  # whether a peft model's adapters are merged into the weights
    transient: tuple[str, ...] = ()  # unsaved buffers, which published weights may include

    @classmethod
    def of(
        cls, weights: Any, dtype: torch.dtype | None = None, merge_adapters: bool = False
    ) -> Layout:
        """The layout of weights, with floats cast to ``dtype``; values are not read."""
        found = weights_of(weights, merge_adapters)
        entries: dict[str, Entry] = {}
        first_of: dict[tuple[Any, ...], str] = {}
        end = 0
        for name, weight in filter(lambda item: item[1].saved, found.items()):
            check_supported(name, weight.tensor)
            kept = weight.tensor.dtype
            if dtype is not None and kept.is_floating_point:
                if not castable(kept):
                    raise ValueError(
                        f"dtype: expected floats of 16 bits or more to cast, got {kept} of {name}, "
                        "which needs its scales; pass dtype=None"
                    )
                kept = dtype
            first = entries.get(first_of.setdefault(weight.identity(), name))
            start, tied_to = (end, None) if first is None else (first.offset, first.name)
            entry = Entry(name, tuple(weight.tensor.shape), kept, start, weight.kind, tied_to)
            entries[name] = entry
            end = max(end, start + entry.nbytes + -entry.nbytes % _ALIGNMENT)
        prefixes = {name[:i] for name in entries for i, c in enumerate(name) if c == "."}
        wrong = [name for name in entries if name in prefixes or not all(name.split("."))]
        if wrong or not entries:
            raise ValueError(
                "weights: expected tensors whose names can be nested by their dots, got "
                f"{wrong[:1] or 'none'}; pass a model's weights under the model's names"
            )
        transient = (name for name, weight in found.items() if not weight.saved)
        return cls(tuple(entries.values()), merge_adapters, tuple(transient))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one version of the weights, a multiple of 4096."""
        end = max(1, *(entry.offset + entry.nbytes for entry in self.entries))
        return end + -end % _PAGE

    @cached_property
    def stored(self) -> tuple[Entry, ...]:
        """The entries that are not tied to another; each has one view."""
        return tuple(entry for entry in self.entries if entry.tied_to is None)

    @cached_property
    def view_of(self) -> dict[str, int]:
        """The index of each name's view, tied names included."""
        index = {entry.name: i for i, entry in enumerate(self.stored)}
        return {entry.name: index[entry.tied_to or entry.name] for entry in self.entries}

    @property
    def hash(self) -> str:
        """SHA-256 of the JSON, in hex: equal for equal layouts."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """The layout as JSON, for another process."""
        return json.dumps(asdict(self), separators=(",", ":"), default=dtype_name)

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """The layout that :meth:`to_json` has written."""
        fields = json.loads(text)
        entries = [
            Entry(**{**e, "shape": tuple(e["shape"]), "dtype": DTYPES[e["dtype"]]})
            for e in fields["entries"]
        ]
        return cls(tuple(entries), fields["merged"], tuple(fields["transient"]))

    def views(self, flat: Tensor) -> list[Tensor]:
        """Views of ``flat``, uint8 of at least ``nbytes`` bytes, one for each stored entry."""
        # Views that are created in inference mode cannot be used outside of it.
        with torch.inference_mode(False):
            return [
                flat.narrow(0, e.offset, e.nbytes).view(e.dtype).view(e.shape) for e in self.stored
            ]

    def tensordict(self, views: Sequence[Tensor]) -> TensorDict:
        """A tensordict of :meth:`views`, nested by the dots of the names; tied names share one."""
        weights = TensorDict({name: views[index] for name, index in self.view_of.items()})
        return weights.unflatten_keys(".")

    def match(self, weights: Any, partial: bool = False) -> dict[str, Weight]:
        """Match weights to the stored entries, by name; returns what :meth:`write` copies.

        All names may have, or lack, the path of a module around the model. One of several tied
        names is enough; tied names that are separate tensors have to be equal. ``partial`` weights
        may lack entries, but only buffers if their path differs: their names could match another
        part of the model.
        """
        found = weights_of(weights, self.merged)
        off, on = read_as(found, {*self.view_of, *self.transient})
        named = {on + name.removeprefix(off): weight for name, weight in found.items()}
        required = self.stored if off or on or not partial else ()
        if partial:  # if no entry is known to be a parameter, each of them may be one
            required = [e for e in required if e.kind == "parameter"] or required
        # One of several tied names gives the value of all.
        there = {entry.tied_to or entry.name for entry in self.entries if entry.name in named}
        missing = [entry for entry in required if entry.name not in there]
        copies, differences = self.compared(named, "weights", missing)
        differences = differences or [
            f"{other.name}: expected the values of {first.name}, since the layout ties them, got "
            "other values"
            for entry in self.stored
            for first, other in pairwise(copies[entry.name])
            if first.identity() != other.identity()
            and not same_values(first.value(), other.value(), entry.dtype)
        ]
        refuse_differences("weights", differences, "pass weights of the same model")
        return {name: same[0] for name, same in copies.items() if same}

    def compared(
        self, named: Mapping[str, Weight], argument: str, missing: Sequence[Entry]
    ) -> tuple[dict[str, list[Weight]], list[str]]:
        """The weights of each stored entry, and all differences, with the ``missing`` entries."""
        copies: dict[str, list[Weight]] = {entry.name: [] for entry in self.stored}
        wrong = []  # (name, expected, got)
        for entry in self.entries:
            if (weight := named.get(entry.name)) is not None:
                got = weight.tensor
                check_supported(weight.name, got, argument)
                copies[entry.tied_to or entry.name].append(weight)
                if tuple(got.shape) != entry.shape or not converts(got.dtype, entry.dtype):
                    wrong.append((entry.name, described(entry), described(got)))
        wrong += [(entry.name, described(entry), "no such entry") for entry in missing]
        known = {*self.view_of, *self.transient}
        more = [w for name, w in named.items() if w.saved and name not in known]
        stored = {w.identity() for same in copies.values() for w in same} if more else set()
        for weight in more:
            check_supported(weight.name, weight.tensor, argument)
            if weight.identity() not in stored:  # else it is another name of a stored one
                wrong.append((weight.name, "no such entry", described(weight.tensor)))
        return copies, [f"{name}: expected {wanted}, got {got}" for name, wanted, got in wrong]

    @torch.no_grad()
    def write(self, found: Mapping[str, Weight], views: Sequence[Tensor] | None) -> None:
        """Copy what :meth:`match` found; weights that are gathered or merged, one at a time.

        ``views`` is ``None`` on ranks without slots, which only help to gather sharded weights.
        """
        plain, computed = [], []
        slot = [None] * len(self.stored) if views is None else views
        for entry, weight, view in zip(self.stored, found.values(), slot, strict=True):
            if is_dtensor(weight.tensor) or weight.layer is not None:
                computed.append((entry, weight, view))
            elif view is not None:
                plain.append((view, weight.tensor))
        overwrite([view for view, _ in plain], [tensor for _, tensor in plain])
        for entry, weight, view in computed:
            if view is not None:
                view.copy_(weight.value(entry.dtype))
            elif is_dtensor(weight.tensor):
                weight.value(entry.dtype)


def refuse_differences(argument: str, differences: Sequence[str], remedy: str) -> None:
    """Raise one ``ValueError`` that counts the differences and lists the first ten of them."""
    if differences:
        raise ValueError(
            f"{argument}: {len(differences)} differences from the expected layout; {remedy}"
            + listed(differences)
        )


def listed(differences: Sequence[str]) -> str:
    """The first ten differences, one per line, and how many more there are."""
    more = [f"and {len(differences) - _MAX_LISTED} more"] * (len(differences) > _MAX_LISTED)
    return "".join(f"\n  {line}" for line in [*differences[:_MAX_LISTED], *more])
