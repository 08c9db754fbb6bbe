"""Finds the named tensors in everything that a channel takes as weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import takewhile
from operator import is_
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from fusedrl.channel import adapter_merging as peft
from fusedrl.channel.tensors import check_supported, identity, is_dtensor, part_of_rank, whole
from fusedrl.compat.torch import (
    CHECKPOINTED_CHILD,
    COMPILED_CHILD,
    buffers_of,
    children_of,
    parameters_of,
    storage_of,
    unsaved_buffers_of,
)


@dataclass(slots=True)
class Place:
    """A tensor of a model, and its place in the model.

    ``home`` is the dict of a module that has the tensor under ``key``; ``None`` if it is in no
    module. If ``merge`` is given, it computes the value, which is then not that of ``tensor``.
    """

    name: str
    tensor: Tensor
    kind: str = "buffer"
    home: dict[str, Any] | None = None
    key: str = ""
    persistent: bool = True
    layer: nn.Module | None = None
    merge: Callable[[], Tensor] | None = None

    def identity(self) -> tuple[Any, ...] | None:
        """Equal for two places if they always have the same values, as they are one tensor."""
        memory = identity(self.tensor)
        # Merging an adapter into a base weight changes it, but not the weight that it is tied to.
        return memory and (*memory, None if self.layer is None else id(self.layer))

    @property
    def computed(self) -> bool:
        """Whether :meth:`value` allocates a tensor."""
        return self.merge is not None or self.sharded

    @property
    def sharded(self) -> bool:
        """Whether several ranks have parts of the tensor."""
        return is_dtensor(self.tensor)

    def value(self, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor to read; for sharded weights this is a collective call.

        Args:
            dtype: that of the copy which is made of it.
        """
        return whole(self.tensor if self.merge is None else self.merge(), dtype)


class ModuleSnapshot:
    """What was found in a module, which is valid until something in the module is replaced.

    Finding it again takes longer than copying the weights of a small model.

    Args:
        module: the module.
        places: the places that were found in it.
    """

    def __init__(self, module: nn.Module, places: Iterable[Place]) -> None:
        self._homes = [
            home(part)
            for part in module.modules()
            for home in (children_of, parameters_of, buffers_of)
        ]
        self._known = [(home, list(home), list(home.values())) for home in self._homes if home]
        self._facts = [(s.tensor, type(s.tensor), s.tensor.shape, s.tensor.dtype) for s in places]

    def is_current(self) -> bool:
        """Whether the same would be found now."""
        return (
            sum(map(len, self._homes)) == sum(len(names) for _, names, _ in self._known)
            and all(
                list(home) == names and all(map(is_, home.values(), values))
                for home, names, values in self._known
            )
            # `.data` and `swap_tensors` replace a tensor in place.
            and all(
                type(t) is kind and t.shape == shape and t.dtype is dtype
                for t, kind, shape, dtype in self._facts
            )
        )


def places_of(weights: Any, merge_adapters: bool = False) -> dict[str, Place]:
    """The places of ``weights`` by name; nothing is computed or gathered yet.

    For a module they include buffers that are not persistent, because a tensordict of a module has
    these too and does not tell them from the others.

    Args:
        weights: a module, a tensordict (nested names are joined by dots) or a dict of tensors.
            A module's names are those of the module inside DistributedDataParallel,
            ``torch.compile`` and checkpoint wrappers: without ``module.`` and ``_orig_mod.``.
            Entries that are not tensors have places too.
        merge_adapters: whether a peft model has the places of its base model, whose values have
            the active adapters merged in; the model itself does not change. Otherwise it has those
            of its state dict.

    Raises:
        TypeError: weights of another type, or a module whose state dict has more than parameters
            and buffers.
        ValueError: two entries have one name, or there are no adapters to merge.
    """
    # TensorDictParams are a module too.
    if isinstance(weights, nn.Module) and not isinstance(weights, TensorDictBase):
        places = module_places(weights, merge_adapters)
        refuse_other_state(weights)
        if merge_adapters and not peft.has_adapters(weights):
            raise ValueError(
                f"merge_adapters: expected a model with peft's adapters, got a "
                f"{type(weights).__name__} without; leave merge_adapters out"
            )
    elif isinstance(weights, (TensorDictBase, Mapping)):
        if merge_adapters:
            raise ValueError(
                f"merge_adapters: expected a peft model, got {type(weights).__name__}; pass the "
                "model, or leave merge_adapters out"
            )
        places = _mapping_places(weights, "")
    else:
        raise TypeError(
            "weights: expected a module, a tensordict or a dict of tensors, got "
            f"{type(weights).__name__}; pass the model or its state_dict()"
        )
    by_name: dict[str, Place] = {}
    for place in places:
        if place.name in by_name:
            raise ValueError(
                f"weights: {place.name}: expected one entry of this name, got two; rename one"
            )
        by_name[place.name] = place
    return by_name


# The names under which torch's wrappers keep the module that they wrap.
_WRAPPERS = (COMPILED_CHILD, CHECKPOINTED_CHILD)


def _mapping_places(weights: Any, prefix: str) -> Iterator[Place]:
    for key, value in weights.items():
        if not isinstance(key, str):
            raise TypeError(
                f"weights: {prefix}{key!r}: expected names that are strings, got "
                f"{type(key).__name__}; rename the entry"
            )
        if isinstance(value, (TensorDictBase, Mapping)):
            # A tensordict of a compiled or checkpointed module has its wrappers' names.
            inner = key in _WRAPPERS
            yield from _mapping_places(value, prefix if inner else f"{prefix}{key}.")
            continue
        name = prefix + key
        for wrapper in _WRAPPERS:
            name = name.replace(f"{wrapper}.", "")
        yield Place(name, value, "parameter" if isinstance(value, nn.Parameter) else "buffer")


def ranks_of_shards(places: Iterable[Place]) -> tuple[int, ...]:
    """The ranks that share any of the tensors, and have to gather them; none for whole tensors."""
    sharded: list[Any] = [place.tensor for place in places if place.sharded]
    meshes = {id(tensor.device_mesh): tensor.device_mesh.mesh for tensor in sharded}
    return tuple(sorted({rank for mesh in meshes.values() for rank in mesh.flatten().tolist()}))


def module_places(module: nn.Module, merged: bool = False) -> Iterator[Place]:
    """The places in a module, unchecked, by names without those of wrappers.

    Args:
        module: any module.
        merged: whether to leave out peft's modules, and merge adapters into the base's weights.
    """
    yield from _walk("", module, merged)


def refuse_other_state(module: nn.Module) -> None:
    """Raise ``TypeError`` if the state dict of a module has what is no parameter or buffer.

    Quantised layers, hooks and ``get_extra_state`` put it there. Without it, whoever loads the
    parameters and buffers would go on with its own, or with none.
    """
    places = {place.name: place for place in module_places(module)}
    try:
        state = module.state_dict()
    except TypeError:  # one of the module's own, or of a child's, that takes other arguments
        return
    others = {k: v for k, v in state.items() if k not in places}
    known = set()  # storages
    if others:  # a wrapper, or a state_dict() of the module's own, may change names and split
        for place in places.values():
            if place.persistent:
                check_supported(place.name, place.tensor)
            if place.tensor.layout is torch.strided:
                known.add(storage_of(part_of_rank(place.tensor)))
    for name, value in others.items():
        if isinstance(value, Tensor):
            check_supported(name, value)
        if not isinstance(value, Tensor) or storage_of(part_of_rank(value)) not in known:
            raise TypeError(
                f"weights: {name}: expected a parameter or a buffer, got what else state_dict() "
                f"has ({type(value).__name__}); publish a module without quantised layers, extra "
                "state and hooks that add to its state dict, or a dict of the tensors to be sent"
            )


class _Merged:
    """The merged weights of one adapted layer, which are computed when the first is asked for.

    Each value is handed out once and not kept.
    """

    def __init__(self, layer: nn.Module, prefix: str) -> None:
        self.layer = layer
        self.prefix = prefix
        self.values: dict[str, Tensor] = {}

    def value(self, name: str) -> Tensor:
        inner = name.removeprefix(self.prefix)
        if inner not in self.values:
            places = module_places(peft.merge(self.layer), merged=True)
            self.values.update({place.name: place.value() for place in places})
        return self.values.pop(inner)


def _walk(
    prefix: str, module: nn.Module, merged: bool, within: _Merged | None = None
) -> Iterator[Place]:
    module = _unwrapped(module)
    if merged:
        module, layer = peft.merged_part(prefix.removesuffix("."), module)
        module = _unwrapped(module)
        if layer is not None and within is None:  # an outer layer merges those inside of it, too
            within = _Merged(layer, prefix)
    _check_module(prefix, module)
    unsaved = unsaved_buffers_of(module)
    for kind, home in (("parameter", parameters_of(module)), ("buffer", buffers_of(module))):
        for key, tensor in home.items():
            if tensor is not None:
                name = prefix + key
                persistent = kind == "parameter" or key not in unsaved
                place = Place(name, tensor, kind, home, key, persistent)
                if within is not None:
                    place.layer, place.merge = within.layer, partial(within.value, name)
                yield place
    for key, child in children_of(module).items():
        if child is not None:
            yield from _walk(f"{prefix}{key}.", child, merged, within)


def _unwrapped(module: nn.Module) -> nn.Module:
    while True:
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            module = module.module
            continue
        inner = next((w for w in _WRAPPERS if w in children_of(module)), None)
        if inner is None:
            return module
        module = children_of(module)[inner]  # pyright: ignore[reportAssignmentType]


def _check_module(prefix: str, module: Any) -> None:
    sharded, resharding = _features(type(module))
    if sharded:
        raise TypeError(
            f"weights: {prefix.removesuffix('.') or 'the module'}: expected weights that can be "
            "made whole, got FullyShardedDataParallel; shard with fully_shard, or pass a full "
            "state_dict()"
        )
    if resharding:
        module.reshard()  # as state_dict() does: weights gathered for a forward may be stale


@cache
def _features(kind: type[nn.Module]) -> tuple[bool, bool]:
    return (
        issubclass(kind, peft.loaded("torch.distributed.fsdp", "FullyShardedDataParallel")),
        issubclass(kind, peft.loaded("torch.distributed.fsdp", "FSDPModule")),
    )


# What DistributedDataParallel calls the module that it wraps.
_PARALLEL = "module"


# What is taken off the names that were given, and what is put before them instead.
Reading = tuple[str, str]


def match_prefixes(names: Collection[str], known: Collection[str]) -> Reading:
    """How ``names`` are read so that as many as possible are ``known``: as they are if that does.

    All of them are read in one way. What is taken off or put before is the path of a module that
    has all of the weights, on one of the two sides: a policy's around its model's, say.

    Raises:
        ValueError: several ways do equally well, and better than none.

    Example:
        >>> from fusedrl.channel.sources import match_prefixes
        >>> match_prefixes(["lm_head.weight"], ["model.lm_head.weight", "model.norm.weight"])
        ('', 'model.')
    """
    as_they_are, wanted = ("", ""), set(known)
    if wanted.issuperset(names) or wanted.issubset(names):
        return as_they_are
    scores = {
        (off, on): sum(on + name.removeprefix(off) in wanted for name in names)
        for off, on in _ways(names, known)
    }
    best = max(scores.values())
    ways = [way for way, score in scores.items() if score == best]
    if as_they_are in ways:
        return as_they_are
    if len(ways) > 1:
        raise ValueError(
            "weights: expected names that can be read in one way, got some that fit with "
            f"{' or '.join(repr(on) for _, on in ways)} before them; put the whole prefix there"
        )
    return ways[0]


def _ways(names: Collection[str], known: Collection[str]) -> Iterator[Reading]:
    for removed in _paths(names):
        for added in _paths(known):
            off, on = ([part for part in path if part != _PARALLEL] for path in (removed, added))
            # One path for another would take the weights of another model.
            if not off or not on or off == on:
                yield "".join(f"{p}." for p in removed), "".join(f"{p}." for p in added)


def _paths(names: Collection[str]) -> list[list[str]]:
    """Of each module that has all of ``names``, from the outermost, which has none, inwards."""
    levels = zip(*(name.split(".")[:-1] for name in names), strict=False)
    shared = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, levels)]
    return [shared[:depth] for depth in range(len(shared) + 1)]
