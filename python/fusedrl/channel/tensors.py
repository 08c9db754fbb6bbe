"""The tensors of a model's weights: finding them, checking them, copying them."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from typing import Any

import torch
from tensordict import MemoryMappedTensor, TensorDictBase
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from fusedrl import _host
from fusedrl.channel import adapters
from fusedrl.compat.torch import (
    CHECKPOINTED_CHILD,
    COMPILED_CHILD,
    buffers_of,
    children_of,
    copy_all,
    parameters_of,
    storage_of,
    unsaved_buffers_of,
)

# Types whose bytes are all of their values; other subclasses also have scales or shards.
_PLAIN_TYPES = (Tensor, nn.Parameter, MemoryMappedTensor)

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
        "float4_e2m1fn_x2",
    )
}


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` as ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def described(tensor: Any) -> str:
    """Dtype and shape of a tensor or of a layout's entry, for messages."""
    return f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"


def castable(dtype: torch.dtype) -> bool:
    """Whether a dtype is a float of 16 bits or more; narrower floats need scales."""
    return dtype.is_floating_point and dtype.itemsize > 1


def converts(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a copy from one dtype to the other keeps the meaning of the values."""
    return source == target or (castable(source) and castable(target))


def is_dtensor(tensor: Any) -> bool:
    """Whether ``tensor`` is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def check_supported(name: str, tensor: Any, argument: str = "weights") -> None:
    """Raise ``TypeError`` unless a channel can carry ``tensor``."""
    local = tensor.to_local() if is_dtensor(tensor) else tensor
    expected, got, remedy = "a dense tensor", None, ""
    if not isinstance(local, Tensor):
        got, remedy = type(local).__name__, "leave it out of the weights"
    elif is_lazy(local):
        got, remedy = "a lazy parameter", "run the module once first"
    elif getattr(local, "ds_numel", local.numel()) != local.numel():
        got = "a shard of DeepSpeed's ZeRO-3"
        remedy = "use it within deepspeed.zero.GatheredParameters"
    elif type(local) not in _PLAIN_TYPES:
        got = type(local).__name__
        remedy = "publish the dequantised or whole tensors"
    elif local.device.type == "meta":
        got, remedy = "a meta tensor", "load the model's weights first"
    elif local.layout is not torch.strided or local.is_nested:
        got, remedy = f"a tensor with layout {local.layout}", "convert it with .to_dense()"
    elif dtype_name(local.dtype) not in DTYPES:
        expected, got = "a dtype of whole bytes", str(local.dtype)
        remedy = "publish the dequantised tensor"
    elif not has_memory(local):
        got, remedy = "a tensor whose memory is freed", "gather or load it first"
    if got is not None:
        raise TypeError(f"{argument}: {name}: expected {expected}, got {got}; {remedy}")


def has_memory(tensor: Tensor) -> bool:
    """Whether the storage covers the tensor: operators would read beyond it without a check."""
    if tensor.is_contiguous():
        end = tensor.nbytes
    else:
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        end = (last + 1) * tensor.element_size()
    if offset := tensor.storage_offset():
        end += offset * tensor.element_size()
    has = tensor.untyped_storage().nbytes() >= end and tensor.data_ptr() != 0
    return has or tensor.numel() == 0


def part_of_rank(tensor: Any) -> Tensor:
    """The tensor, or this rank's shard of a DTensor."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


@torch.no_grad()
def same_values(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Whether tensors of equal shape have equal values in ``dtype``; NaN equals NaN."""
    a, b = (t.to(a.device, dtype).resolve_conj().resolve_neg().contiguous() for t in (a, b))
    a, b = a.reshape(-1), b.reshape(-1)
    # Comparing int64 is much faster than comparing halves, and bytes of any dtype can be compared.
    word = torch.uint8 if (a.nbytes | a.data_ptr() | b.data_ptr()) % 8 else torch.int64
    if torch.equal(a.view(word), b.view(word)):
        return True
    return castable(dtype) and bool(((a == b) | (a.isnan() & b.isnan())).all())


def overwrite(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors into memory that autograd does not track.

    All CPU tensors that keep their dtype, or go from float32 to bfloat16, are copied in one
    operation. One operation for each would wait for its threads each time, slowly on busy cores.
    """
    pieces, rest = [], []
    for target, source in zip(targets, sources, strict=True):
        cast = source.dtype is torch.float32 and target.dtype is torch.bfloat16
        if (
            (cast or source.dtype is target.dtype)
            and source.device.type == target.device.type == "cpu"
            and source.is_contiguous()
            and not source.is_conj()
            and not source.is_neg()
        ):
            size = source.numel(), source.element_size()
            pieces.append((target.data_ptr(), source.data_ptr(), *size, cast))
        else:
            rest.append((target, source))
    copy_all([target for target, _ in rest], [source for _, source in rest])
    _host.copy_pieces(pieces, torch.get_num_threads())


@dataclass(slots=True, eq=False)
class Weight:
    """A tensor of a model, and where it is stored.

    ``saved``: whether state dicts have it. ``home``: the dict of its module that has it under
    ``key``. ``layer``: the adapted layer whose merged weights have its value, if any.
    """

    name: str
    tensor: Any
    kind: str = "buffer"
    saved: bool = True
    home: dict[str, Any] | None = None
    key: str = ""
    layer: _Merged | None = None

    def identity(self) -> tuple[Any, ...]:
        """A key that is equal for weights that share memory, and so always have the same values."""
        whole, part = self.tensor, part_of_rank(self.tensor)
        memory = storage_of(part), part.storage_offset(), whole.shape, whole.stride(), whole.dtype
        return *memory, id(self.layer)  # merging changes a weight, but not one that is tied to it

    @torch.no_grad()
    def value(self, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor to read, possibly cast to ``dtype``; for sharded weights a collective call."""
        tensor: Any = self.tensor if self.layer is None else self.layer.value(self.name)
        if not is_dtensor(tensor):
            return tensor.detach()
        # Cast before the shards are gathered, so that fewer bytes are sent.
        if dtype is not None and not any(placed.is_partial() for placed in tensor.placements):
            tensor = tensor.to(dtype)
        return tensor.detach().full_tensor()


class _Merged:
    """The merged weights of an adapted layer, computed at the first read; each is returned once.

    peft merges in place, and unmerging leaves rounding errors, so a copy of the layer is merged.
    """

    def __init__(self, layer: nn.Module, prefix: str) -> None:
        self._layer, self._prefix = layer, prefix
        self._values: dict[str, Tensor] = {}

    def value(self, name: str) -> Tensor:
        inner = name.removeprefix(self._prefix)
        if inner not in self._values:
            copies: dict[int, Any] = {}
            for weight in weights_in(self._layer):
                check_supported(self._prefix + weight.name, weight.tensor)
                clone = weight.value().clone(memory_format=torch.preserve_format)
                is_parameter = weight.kind == "parameter"
                copies[id(weight.tensor)] = nn.Parameter(clone, False) if is_parameter else clone
            layer = adapters.replica(self._layer, copies)
            base = weights_in(adapters.merge(layer), merge=True)
            self._values = {weight.name: weight.value() for weight in base}
        return self._values.pop(inner)


def weights_of(source: Any, merge: bool = False) -> dict[str, Weight]:
    """The weights of a module, tensordict or dict, by name; nothing is computed or gathered yet.

    Nested names are joined by dots, without the names of torch's wrappers. Unsaved buffers and
    values that are no tensors are included. With ``merge``, the weights are those of a peft model's
    base model with the active adapters merged in; the model does not change.
    """
    if isinstance(source, (TensorDictBase, Mapping)):  # TensorDictParams are a module too
        found = list(_entries_of(source, ""))
    elif isinstance(source, nn.Module):
        found = weights_in(source, merge)
        refuse_other_state(source)
    else:
        raise TypeError(
            "weights: expected a module, a tensordict or a dict of tensors, got "
            f"{type(source).__name__}; pass the model or its state_dict()"
        )
    by_name: dict[str, Weight] = {}
    for weight in found:
        if by_name.setdefault(weight.name, weight) is not weight:
            raise ValueError(
                f"weights: {weight.name}: expected one entry of this name, got two; rename one"
            )
    return by_name


# The names under which torch's wrappers keep the wrapped module.
_WRAPPERS = (COMPILED_CHILD, CHECKPOINTED_CHILD)


def _entries_of(source: Any, prefix: str) -> Iterator[Weight]:
    for key, value in source.items():
        if isinstance(value, (TensorDictBase, Mapping)):
            yield from _entries_of(value, f"{prefix}{key}.")
        else:
            name = ".".join(part for part in f"{prefix}{key}".split(".") if part not in _WRAPPERS)
            yield Weight(name, value, "parameter" if isinstance(value, nn.Parameter) else "buffer")


def weights_in(
    module: Any, merge: bool = False, prefix: str = "", layer: _Merged | None = None
) -> list[Weight]:
    """The weights in a module, unchecked; names and ``merge`` as in :func:`weights_of`."""
    found = []
    if merge:
        module, adapted = adapters.merged_part(prefix.removesuffix("."), module)
        if adapted is not None and layer is None:  # an outer layer merges those inside of it, too
            layer = _Merged(adapted, prefix)
    is_sharded, gathers, is_parallel = _traits(type(module))
    if is_sharded:
        raise TypeError(
            f"weights: {prefix.removesuffix('.') or 'the module'}: expected weights that can be "
            "gathered, got FullyShardedDataParallel; shard with fully_shard, or pass a full "
            "state_dict()"
        )
    if gathers:
        module.reshard()  # as state_dict() does: weights gathered for a forward may be stale
    if home := parameters_of(module):
        for key, tensor in home.items():
            if tensor is not None:
                found.append(Weight(prefix + key, tensor, "parameter", True, home, key, layer))
    if home := buffers_of(module):
        unsaved = unsaved_buffers_of(module)
        for key, tensor in home.items():
            if tensor is not None:
                saved = key not in unsaved
                found.append(Weight(prefix + key, tensor, "buffer", saved, home, key, layer))
    for key, child in children_of(module).items():
        if child is not None:
            inside = prefix if is_parallel or key in _WRAPPERS else f"{prefix}{key}."
            found += weights_in(child, merge, inside, layer)
    return found


@cache
def _traits(kind: type[nn.Module]) -> list[bool]:
    """Whether a class of modules is FSDP1, FSDP2, and a wrapper for data parallelism."""
    fsdp, parallel = "torch.distributed.fsdp", (nn.DataParallel, DistributedDataParallel)
    first = issubclass(kind, adapters.imported(fsdp, "FullyShardedDataParallel"))
    second = issubclass(kind, adapters.imported(fsdp, "FSDPModule"))
    return [first, second, issubclass(kind, parallel)]


def fingerprint(weights: Iterable[Weight]) -> list[tuple[Any, ...]]:
    """Equal for two walks that found the same tensors in the same state."""
    # The tensors keep their ids unique; `==` only compares tensors whose ids are equal.
    return [(w.name, id(t := w.tensor), t, type(t), t.shape, t.dtype) for w in weights]


def refuse_other_state(module: nn.Module) -> None:
    """Raise ``TypeError`` if the state dict has entries other than parameters and buffers.

    Quantised layers, hooks and ``get_extra_state`` add such entries, which no reader would load.
    """
    try:
        state = module.state_dict()
    except TypeError:  # overridden, in the module or a child, with other arguments
        return
    weights = weights_in(module)
    names, known = {weight.name for weight in weights}, set()
    others = {name: value for name, value in state.items() if name not in names}
    for weight in weights if others else ():  # perhaps only split or renamed
        if weight.saved:
            check_supported(weight.name, weight.tensor)
        if weight.tensor.layout is torch.strided:
            known.add(storage_of(part_of_rank(weight.tensor)))
    for name, value in others.items():
        if isinstance(value, Tensor):
            check_supported(name, value)
        if not isinstance(value, Tensor) or storage_of(part_of_rank(value)) not in known:
            raise TypeError(
                f"weights: {name}: expected a parameter or a buffer, got another entry of "
                f"state_dict() ({type(value).__name__}); publish a module without quantised "
                "layers, extra state and hooks that add to its state dict, or a dict of tensors"
            )


def read_as(names: Collection[str], known: Collection[str]) -> tuple[str, str]:
    """The prefixes to remove from, and then to add to, all ``names`` to make them match ``known``.

    One side may have the path of a module that wraps the other, such as a policy around its model.
    Both are empty if none is needed, if nothing matches, or if several prefixes do.
    """
    wanted = set(known)

    def fits(off: str, on: str) -> bool:
        read = {on + name.removeprefix(off) for name in names}
        return read <= wanted or read >= wanted

    if fits("", ""):
        return "", ""
    matches = [
        (off, on)
        for off, module in _paths(names)
        for on, other in _paths(known)
        # Replacing one path by a different one could load another model's weights.
        if (not module or not other or module == other) and fits(off, on)
    ]
    return matches[0] if len(matches) == 1 else ("", "")


def _paths(names: Collection[str]) -> list[tuple[str, list[str]]]:
    """The prefixes that all names share, each with its parts except DistributedDataParallel's."""
    levels = zip(*(name.split(".")[:-1] for name in names), strict=False)
    shared = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, levels)]
    paths = [shared[:depth] for depth in range(len(shared) + 1)]
    return [("".join(f"{p}." for p in path), [p for p in path if p != "module"]) for path in paths]
