"""Where the weights of a model lie in one flat piece of memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from fusedrl.channel.forking import ComputedOnce
from fusedrl.channel.layout_entries import (
    PAGE,
    Entry,
    described,
    entry_spec,
    lay_out,
    name_clash,
    refuse_differences,
    round_up,
)
from fusedrl.channel.name_prefixes import PrefixChange, match_prefixes
from fusedrl.channel.sources import ADAPTERS, Place, checked_places
from fusedrl.channel.tensors import (
    castable,
    check_supported,
    converts,
    dtype_name,
    overwrite,
    same_values,
)

_FORMAT = 1


@dataclass(frozen=True)
class Layout:
    """Names, shapes, dtypes and offsets of weights in flat memory.

    Two names of one tensor are stored once and stay tied.

    Args:
        entries: in the order of the model, tied names after the one that they are tied to.
        adapters: how a peft model's weights were taken, see :meth:`of`.
        transient: buffers of the model that no state dict has, and that are therefore not stored;
            published weights may include them.

    Example:
        >>> import torch
        >>> from fusedrl.channel.layout import Layout
        >>> layout = Layout.of(torch.nn.Linear(3, 2))
        >>> [(entry.name, entry.offset) for entry in layout.entries], layout.nbytes
        ([('weight', 0), ('bias', 64)], 4096)
        >>> layout == Layout.from_json(layout.to_json())
        True
    """

    entries: tuple[Entry, ...]
    adapters: str | None = None
    transient: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, weights: Any, dtype: torch.dtype | None = None, adapters: str | None = None
    ) -> Layout:
        """The layout of weights; their values are not read.

        Args:
            weights: what :func:`~fusedrl.channel.sources.named_tensors` takes.
            dtype: that of every floating point entry, such as ``torch.bfloat16``; ``None`` keeps
                the dtypes of the weights.
            adapters: ``None``, ``"only"`` or ``"merged"``, for peft models.

        Raises:
            TypeError: weights of another type, or an entry that is no plain tensor.
            ValueError: no entries; names that cannot be nested; ``dtype`` that is no float of at
                least 16 bits, or weights with smaller floats, which cannot be cast.
        """
        if dtype is not None and not castable(dtype):
            raise ValueError(
                f"dtype: expected a float of 16 bits or more, got {dtype}; smaller ones need "
                "scales: publish the quantised tensors as they are"
            )
        places = checked_places(weights, adapters)
        specs, known = [], {}
        for place in places.values():
            if place.persistent:
                same = place.identity()
                tied_to = None if same is None else known.setdefault(same, place.name)
                kept = place.tensor.dtype if dtype is None else _cast(place, dtype)
                tied_to = None if tied_to == place.name else tied_to
                specs.append((place.name, tuple(place.tensor.shape), kept, place.kind, tied_to))
        names = [name for name, *_ in specs]
        problem = "expected tensors, got none" if not names else name_clash(names)
        if problem:
            raise ValueError(f"weights: {problem}; pass a model's weights under its own names")
        transient = () if adapters == "only" else (s.name for s in places.values())
        transient = tuple(name for name in transient if not places[name].persistent)
        return cls(lay_out(specs), adapters, transient)

    @property
    def partial(self) -> bool:
        """Whether the layout has adapters only, so that readers' modules have other names too."""
        return self.adapters == "only"

    @ComputedOnce
    def nbytes(self) -> int:
        """Bytes of one version of the weights, a multiple of 4096."""
        end = max(entry.offset + entry.nbytes for entry in self.entries)
        return max(round_up(end, PAGE), PAGE)

    @ComputedOnce
    def hash(self) -> str:
        """SHA-256 of the JSON, in hex: equal for equal layouts."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @ComputedOnce
    def stored(self) -> tuple[Entry, ...]:
        """The entries that are not tied to another: one for each view."""
        return tuple(entry for entry in self.entries if entry.tied_to is None)

    @ComputedOnce
    def view_of(self) -> dict[str, int]:
        """The index of the view of each name, tied ones included."""
        index = {entry.name: i for i, entry in enumerate(self.stored)}
        return {entry.name: index[entry.tied_to or entry.name] for entry in self.entries}

    @ComputedOnce
    def _strides(self) -> list[tuple[int, ...]]:
        return [tuple(prod(e.shape[i + 1 :]) for i in range(len(e.shape))) for e in self.stored]

    def to_json(self) -> str:
        """The layout as text for another process."""
        entries = [{**asdict(e), "dtype": dtype_name(e.dtype)} for e in self.entries]
        fields = {"format": _FORMAT, "nbytes": self.nbytes, "adapters": self.adapters}
        fields |= {"transient": self.transient, "entries": entries}
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """The layout that another process wrote; every part of it is checked.

        Raises:
            ValueError: the text does not come from :meth:`to_json`.
        """
        try:
            fields = json.loads(text)
            specs = [entry_spec(entry) for entry in fields["entries"]]
            layout = cls(lay_out(specs), fields["adapters"], tuple(fields["transient"]))
            names = [name for name, *_ in specs]
            if not names:
                raise ValueError("expected entries, got none")
            if problem := name_clash(names):
                raise ValueError(problem)
            if not all(isinstance(name, str) for name in layout.transient):
                raise ValueError("expected names in 'transient'")
            # Entries determine all offsets and sizes, so these are compared as a whole.
            written = json.dumps(json.loads(layout.to_json()), sort_keys=True)
            if json.dumps(fields, sort_keys=True) != written:
                raise ValueError("expected offsets and sizes that follow from the entries")
            if layout.adapters not in ADAPTERS or layout.nbytes >= 2**63:
                raise ValueError("expected known adapters and less than 2**63 bytes")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"text: expected the JSON of a layout, got {type(error).__name__}: {error}; open "
                "the handle with the version of fusedrl that made it"
            ) from error
        return layout

    def views(self, flat: Tensor) -> list[Tensor]:
        """Views of ``flat``, uint8 of at least ``nbytes`` bytes, one for each stored entry."""
        if flat.dtype != torch.uint8 or flat.dim() != 1 or len(flat) < self.nbytes:
            raise ValueError(
                f"flat: expected a uint8 vector of {self.nbytes} bytes, got "
                f"{described(flat.dtype, flat.shape)}; allocate layout.nbytes"
            )
        # Readers make views for every version, hence only one operation for each. Views that are
        # made in inference mode cannot be used outside of it.
        with torch.inference_mode(False):
            typed = {e.dtype: flat[: self.nbytes].view(e.dtype) for e in self.stored}
            starts = {dtype: base.storage_offset() for dtype, base in typed.items()}
            return [
                typed[e.dtype].as_strided(
                    e.shape, strides, starts[e.dtype] + e.offset // e.dtype.itemsize
                )
                for e, strides in zip(self.stored, self._strides, strict=True)
            ]

    def tensordict(self, views: Sequence[Tensor]) -> TensorDict:
        """A tensordict of :meth:`views`, nested by the dots of the names; tied names share one."""
        nested: dict[str, Any] = {}
        for name, index in self.view_of.items():
            *path, last = name.split(".")
            node = nested
            for part in path:
                node = node.setdefault(part, {})
            node[last] = views[index]
        return TensorDict(nested)

    def sources(self, weights: Any) -> list[Tensor]:
        """The tensors to copy into :meth:`views`, in their order, without autograd graphs.

        Args:
            weights: weights with this layout's names, shapes and kinds of dtype; device, strides
                and width of floats may differ. Sharded tensors are made whole, which is a
                collective that every rank has to call. All names may have, or lack, the prefix of
                a wrapper around the model. One of several tied names is enough; where there are
                more, they may be separate tensors of equal values.

        Raises:
            TypeError: an entry that is no plain tensor.
            ValueError: the weights differ from this layout, or the values of tied names differ; the
                message lists the differences.
        """
        return [place.value() for place in self.matched(weights)]

    def write(self, weights: Any, views: Sequence[Tensor] | None) -> None:
        """Copy weights into views; sharded and merged tensors are made one at a time.

        Args:
            weights: as :meth:`sources` takes them.
            views: as :meth:`views` makes them. ``None`` on ranks that only take part in making
                the weights whole.

        Raises:
            TypeError: an entry that is no plain tensor.
            ValueError: the weights differ from this layout; the message lists the differences, and
                nothing is written.
        """
        places = self.matched(weights)
        if views is not None:
            fill(views, places)
            return
        for place in places:
            if place.computed:
                place.value()

    def matched(self, weights: Any) -> list[Place]:
        """The places of the tensors that :meth:`sources` returns; nothing is computed yet.

        Values are read only where the layout ties names that are separate tensors in ``weights``.
        """
        known = {*self.view_of, *self.transient}
        places, reading = self._collected(weights, known)
        differences = [d for entry in self.entries for d in _differences(entry, places)]
        copies: dict[str, list[Place]] = {entry.name: [] for entry in self.stored}
        for entry in self.entries:
            if (place := places.get(entry.name)) is not None:
                if not place.persistent:
                    check_supported(place.name, place.tensor)
                copies[entry.tied_to or entry.name].append(place)
        # A tied name may be missing, because one of them gives the value of all.
        differences += [
            f"{entry.name}: expected {entry.described()}, got no such entry"
            for entry in self.stored
            if not copies[entry.name]
        ]
        if not self.partial:
            stored = {place.identity() for same in copies.values() for place in same}
            differences += [
                f"{name}: expected no such entry, got {described(s.tensor.dtype, s.tensor.shape)}"
                for name, s in places.items()
                # A further name of a tensor that is stored is no difference.
                if s.persistent and name not in known and (s.identity() or name) not in stored
            ]
        if not differences:
            differences = [d for entry in self.stored for d in _untied(entry, copies[entry.name])]
        remedy = "publish those of the model that it was created from"
        refuse_differences(
            "weights", differences, f"{remedy}; names are read {reading}" if reading else remedy
        )
        return [copies[entry.name][0] for entry in self.stored]

    def named(self, weights: Any) -> dict[str, Tensor]:
        """As :meth:`sources`, by the names of :attr:`stored`."""
        sources = self.sources(weights)
        return {entry.name: tensor for entry, tensor in zip(self.stored, sources, strict=True)}

    def _collected(self, weights: Any, known: set[str]) -> tuple[dict[str, Place], PrefixChange]:
        """The places of weights by this layout's names, and how the given names were changed."""
        try:
            places = checked_places(weights, self.adapters if self.adapters == "merged" else None)
        except ValueError:
            if self.adapters != "merged":
                raise
            places = checked_places(weights)  # the caller has merged them
        reading = match_prefixes(places, known)
        if not reading:
            return places, reading
        return {
            reading(name): replace(s, name=reading(name)) for name, s in places.items()
        }, reading


def fill(views: Sequence[Tensor], places: Sequence[Place]) -> None:
    """Copy what :meth:`Layout.matched` found; tensors that are computed are made one at a time.

    Raises:
        TypeError, ValueError: a tensor was freed or resized in the meantime.
    """
    plain, computed = [], []
    for view, place in zip(views, places, strict=True):
        (computed if place.computed else plain).append((view, place))
    overwrite(
        [view for view, _ in plain],
        [place.tensor for _, place in plain],
        [place.name for _, place in plain],
    )
    for view, place in computed:
        check_supported(place.name, place.tensor)
        view.copy_(place.value())


def _differences(entry: Entry, places: dict[str, Place]) -> list[str]:
    place = places.get(entry.name)
    if place is None:
        return []
    tensor = place.tensor
    if tuple(tensor.shape) == entry.shape and converts(tensor.dtype, entry.dtype):
        return []
    got = described(tensor.dtype, tensor.shape)
    return [f"{entry.name}: expected {entry.described()}, got {got}"]


def _untied(entry: Entry, copies: list[Place]) -> Iterator[str]:
    """Differences between the tensors of one entry, in the dtype in which one of them is stored."""
    first, *others = copies
    checked = {first.identity()}
    for other in others:
        if other.identity() not in checked:
            checked.add(other.identity())
            if not same_values(first.value(), other.value(), entry.dtype):
                yield (
                    f"{other.name}: expected the values of {first.name}, since the channel's "
                    "layout ties them, got others"
                )


def _cast(place: Place, dtype: torch.dtype) -> torch.dtype:
    kept = place.tensor.dtype
    if kept.is_floating_point and not castable(kept):
        raise ValueError(
            f"dtype: expected floats of 16 bits or more to cast, got {kept} of {place.name}, which "
            "means something with its scales only; pass dtype=None"
        )
    return dtype if castable(kept) else kept
