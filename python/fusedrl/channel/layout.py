"""Where the weights of a model lie in one flat piece of memory, and how they are written there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from fusedrl.channel.sources import Place, Reading, match_prefixes, places_of
from fusedrl.channel.tensors import (
    DTYPES,
    castable,
    check_supported,
    converts,
    described,
    dtype_name,
    overwrite,
    same_values,
)

_ALIGNMENT = 64  # of an entry: a cache line, and more than any vector load asks for
_PAGE = 4096
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


@dataclass(frozen=True)
class Layout:
    """Names, shapes, dtypes and offsets of weights in flat memory.

    Two names of one tensor are stored once and stay tied.

    Args:
        entries: in the order of the model, tied names after the one that they are tied to.
        merged: whether a peft model's adapters are merged into the weights.
        transient: buffers of the model that no state dict has, and that are therefore not stored;
            published weights may include them.

    Attributes:
        nbytes: bytes of one version of the weights, a multiple of 4096.
        stored: the entries that are not tied to another: one for each view.
        view_of: the index of the view of each name, tied ones included.

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
    merged: bool = False
    transient: tuple[str, ...] = ()
    nbytes: int = field(init=False, compare=False)
    stored: tuple[Entry, ...] = field(init=False, compare=False)
    view_of: dict[str, int] = field(init=False, compare=False)
    _places: list[tuple[Any, ...]] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Compute what follows from the entries."""
        end = max(entry.offset + entry.nbytes for entry in self.entries)
        stored = tuple(entry for entry in self.entries if entry.tied_to is None)
        index = {entry.name: i for i, entry in enumerate(stored)}
        views = {entry.name: index[entry.tied_to or entry.name] for entry in self.entries}
        places = [
            (
                e.dtype,
                e.shape,
                tuple(prod(e.shape[i + 1 :]) for i in range(len(e.shape))),
                e.offset // e.dtype.itemsize,
            )
            for e in stored
        ]
        vars(self).update(nbytes=max(_round_up(end, _PAGE), _PAGE), stored=stored)
        vars(self).update(view_of=views, _places=places)

    @classmethod
    def of(
        cls, weights: Any, dtype: torch.dtype | None = None, merge_adapters: bool = False
    ) -> Layout:
        """The layout of weights; their values are not read.

        Args:
            weights: what :func:`~fusedrl.channel.sources.places_of` takes.
            dtype: that of every floating point entry, such as ``torch.bfloat16``; ``None`` keeps
                the dtypes of the weights.
            merge_adapters: as for :func:`~fusedrl.channel.sources.places_of`.

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
        places = places_of(weights, merge_adapters).values()
        entries: dict[str, Entry] = {}
        first_of: dict[tuple[Any, ...], str] = {}
        end = 0
        for place in (place for place in places if place.persistent):
            check_supported(place.name, place.tensor)
            kept = place.tensor.dtype if dtype is None else _cast(place, dtype)
            same = place.identity()
            tied_to = None if same is None else entries.get(first_of.setdefault(same, place.name))
            start, of = (end, None) if tied_to is None else (tied_to.offset, tied_to.name)
            entry = Entry(place.name, tuple(place.tensor.shape), kept, start, place.kind, of)
            entries[place.name] = entry
            end = max(end, _round_up(start + entry.nbytes, _ALIGNMENT))
        if problem := _problem(list(entries)):
            raise ValueError(f"weights: {problem}; pass a model's weights under its own names")
        rest = (place.name for place in places if not place.persistent)
        return cls(tuple(entries.values()), merge_adapters, tuple(rest))

    @property
    def hash(self) -> str:
        """SHA-256 of the JSON, in hex: equal for equal layouts."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """The layout as text for another process."""
        entries = [{**asdict(e), "dtype": dtype_name(e.dtype)} for e in self.entries]
        fields = {"merged": self.merged, "transient": self.transient, "entries": entries}
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """The layout that another process wrote with :meth:`to_json`."""
        fields = json.loads(text)
        entries = [
            Entry(**{**e, "shape": tuple(e["shape"]), "dtype": DTYPES[e["dtype"]]})
            for e in fields["entries"]
        ]
        return cls(tuple(entries), fields["merged"], tuple(fields["transient"]))

    def views(self, flat: Tensor) -> list[Tensor]:
        """Views of ``flat``, uint8 of at least ``nbytes`` bytes, one for each stored entry."""
        # Views that are made in inference mode cannot be used outside of it.
        with torch.inference_mode(False):
            return list(map(self.viewed(flat), range(len(self.stored))))

    def viewed(self, flat: Tensor) -> Callable[[int], Tensor]:
        """What makes a single view of ``flat``, of the stored entry of that index.

        Readers make views for every version, hence only one operation for each.
        """
        places = self._places
        bases = {dtype: flat[: self.nbytes].view(dtype) for dtype in {p[0] for p in places}}
        typed = {dtype: (base, base.storage_offset()) for dtype, base in bases.items()}

        def view(index: int) -> Tensor:
            dtype, shape, strides, offset = places[index]
            base, start = typed[dtype]
            return base.as_strided(shape, strides, start + offset)

        return view

    def tensordict(self, views: Sequence[Tensor]) -> TensorDict:
        """A tensordict of :meth:`views`, nested by the dots of the names; tied names share one."""
        weights = TensorDict({name: views[index] for name, index in self.view_of.items()})
        return weights.unflatten_keys(".")

    @torch.no_grad()
    def write(self, places: Sequence[Place], views: Sequence[Tensor] | None) -> None:
        """Copy what :meth:`matched` found; tensors that are computed are made one at a time.

        Args:
            places: of the weights. Where they are sharded, every rank has to call this.
            views: as :meth:`views` makes them. ``None`` on ranks that only take part in making
                the weights whole.

        Raises:
            TypeError, ValueError: a tensor was freed or resized in the meantime.
        """
        if views is not None:
            plain = [(v, p) for v, p in zip(views, places, strict=True) if not p.computed]
            tensors, names = [p.tensor for _, p in plain], [p.name for _, p in plain]
            overwrite([v for v, _ in plain], tensors, names)
        for index, (entry, place) in enumerate(zip(self.stored, places, strict=True)):
            if place.computed and (views is not None or place.sharded):
                check_supported(place.name, place.tensor)
                value = place.value(entry.dtype)
                if views is not None:
                    views[index].copy_(value)
                del value  # before the next one is made

    def matched(self, weights: Any) -> list[Place]:
        """The places of what :meth:`write` copies into the views, in their order.

        Nothing is computed yet, and values are read only where the layout ties names that are
        separate tensors in ``weights``.

        Args:
            weights: weights with this layout's names, shapes and kinds of dtype; device, strides
                and width of floats may differ. All names may have, or lack, the prefix of a wrapper
                around the model. One of several tied names is enough; where there are more, they
                may be separate tensors of equal values.

        Raises:
            TypeError: an entry that is no plain tensor.
            ValueError: the weights differ from this layout, or the values of tied names differ; the
                message lists the differences.
        """
        remedy = "publish those of the model that it was created from"
        return list(self._brought(weights, False, "channel", remedy).values())

    def matched_part(self, weights: Any) -> dict[str, Place]:
        """As :meth:`matched` of weights that may lack entries, by the names of those they have.

        Weights whose names have, or lack, the prefix of a wrapper may lack buffers only, as a part
        of them might mean another part of the model.
        """
        return self._brought(weights, True, "policy", "give them the policy's names and shapes")

    def _brought(self, weights: Any, partial: bool, whose: str, remedy: str) -> dict[str, Place]:
        places, (off, on) = self._collected(weights)
        required = self.stored
        if partial:  # if no entry is known to be a parameter, each of them may be one
            parameters = [entry for entry in required if entry.kind == "parameter"]
            required = (parameters or required) if off or on else ()
        copies, differences = self.compared(places, "weights", required)
        if not differences:
            differences = [
                d for e in self.stored if copies[e.name][1:] for d in _untied(e, copies[e.name])
            ]
        if off or on:
            remedy = f"{remedy}; names are read with {on!r} before them in place of {off!r}"
        refuse_differences("weights", differences, remedy, whose)
        return {name: same[0] for name, same in copies.items() if same}

    def _collected(self, weights: Any) -> tuple[Mapping[str, Place], Reading]:
        """The places of weights by this layout's names, and how their own names were changed."""
        try:
            places = places_of(weights, self.merged)
        except ValueError:
            if not self.merged:
                raise
            places = places_of(weights)  # the caller has merged them
        reading = match_prefixes(places, {*self.view_of, *self.transient})
        if not any(reading):
            return places, reading
        off, on = reading
        renamed = [replace(p, name=on + name.removeprefix(off)) for name, p in places.items()]
        return {place.name: place for place in renamed}, reading

    def compared(
        self, places: Mapping[str, Place], argument: str, required: Iterable[Entry]
    ) -> tuple[dict[str, list[Place]], list[str]]:
        """The places of each stored entry, and what differs in names, shapes or kinds of dtype.

        Args:
            places: by name.
            argument: what messages call them.
            required: the stored entries that may not be missing.

        Raises:
            TypeError: a tensor that is no plain one.
        """
        copies: dict[str, list[Place]] = {entry.name: [] for entry in self.stored}
        differences = []
        for entry in self.entries:
            if (place := places.get(entry.name)) is not None:
                check_supported(place.name, place.tensor, argument)
                copies[entry.tied_to or entry.name].append(place)
                got = place.tensor
                if tuple(got.shape) != entry.shape or not converts(got.dtype, entry.dtype):
                    differences.append(
                        f"{entry.name}: expected {described(entry)}, got {described(got)}"
                    )
        # A tied name may be missing, because one of them gives the value of all.
        differences += [
            f"{entry.name}: expected {described(entry)}, got no such entry"
            for entry in required
            if not copies[entry.name]
        ]
        known = {*self.view_of, *self.transient}
        more = [p for n, p in places.items() if p.persistent and n not in known]
        if more:  # a further name of a tensor that is stored is no difference
            stored = {place.identity() for same in copies.values() for place in same}
            for place in more:
                check_supported(place.name, place.tensor, argument)
                if (place.identity() or place.name) not in stored:
                    got = described(place.tensor)
                    differences.append(f"{place.name}: expected no such entry, got {got}")
        return copies, differences


def refuse_differences(
    argument: str, differences: Sequence[str], remedy: str, whose: str = "channel"
) -> None:
    """Raise one ``ValueError`` that counts the ``differences`` and lists the first ten of them."""
    if differences:
        raise ValueError(
            f"{argument}: {len(differences)} differences from the {whose}'s layout; {remedy}"
            + listed(differences)
        )


def listed(differences: Sequence[str]) -> str:
    """The first ten differences, a line each, and how many more there are."""
    more = [f"and {len(differences) - _SHOWN} more"] * (len(differences) > _SHOWN)
    return "".join(f"\n  {line}" for line in [*differences[:_SHOWN], *more])


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _problem(names: list[str]) -> str | None:
    """Why no weights can have these names; ``None`` if they can be nested by their dots."""
    if not names:
        return "expected tensors, got none"
    nodes = {name[:i] for name in names for i, c in enumerate(name) if c == "."}
    for name in names:
        if not all(name.split(".")):
            return f"{name!r}: expected a name between its dots, got an empty one"
        if name in nodes:
            return f"{name}: expected a tensor or entries below it, got both"
    return None


def _untied(entry: Entry, copies: list[Place]) -> Iterator[str]:
    """Differences between the tensors of one entry, in the dtype in which one of them is stored."""
    first, *others = copies
    checked = {first.identity()}
    for other in others:
        if other.identity() not in checked:
            checked.add(other.identity())
            if not same_values(first.value(), other.value(), entry.dtype):
                yield (
                    f"{other.name}: expected the values of {first.name}, since the layout ties "
                    "them, got others"
                )


def _cast(place: Place, dtype: torch.dtype) -> torch.dtype:
    kept = place.tensor.dtype
    if kept.is_floating_point and not castable(kept):
        raise ValueError(
            f"dtype: expected floats of 16 bits or more to cast, got {kept} of {place.name}, which "
            "means something with its scales only; pass dtype=None"
        )
    return dtype if castable(kept) else kept
