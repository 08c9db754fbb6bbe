"""The tensors of weights: how they are found, which a channel can carry, how they are copied."""

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

# Types whose bytes are all of their values; other subclasses keep scales or shards beside them.
_PLAIN = (Tensor, nn.Parameter, MemoryMappedTensor)

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
    """The dtype and shape of a tensor, or of an entry of a layout, for messages."""
    return f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"


def castable(dtype: torch.dtype) -> bool:
    """Whether a dtype is a float that has a meaning without scales: one of 16 bits or more."""
    return dtype.is_floating_point and dtype.itemsize > 1


def converts(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether copying from one dtype into the other keeps the meaning of the values."""
    return source == target or (castable(source) and castable(target))


def is_dtensor(tensor: Any) -> bool:
    """Whether ``tensor`` is a DTensor, which several ranks share."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def check_supported(name: str, tensor: Any, argument: str = "weights") -> None:
    """Raise ``TypeError`` unless a channel can carry the values of ``tensor``."""
    local = tensor.to_local() if is_dtensor(tensor) else tensor
    expected, got, remedy = "a dense tensor with values of its own", None, ""
    if not isinstance(local, Tensor):
        got, remedy = type(local).__name__, "leave it out of the weights"
    elif is_lazy(local):
        got, remedy = "a lazy parameter", "run the module once first"
    elif getattr(local, "ds_numel", local.numel()) != local.numel():
        got = "a shard of DeepSpeed's ZeRO-3"
        remedy = "use it within deepspeed.zero.GatheredParameters"
    elif type(local) not in _PLAIN:
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
        got, remedy = "one whose memory is freed", "gather or load it first"
    if got is not None:
        raise TypeError(f"{argument}: {name}: expected {expected}, got {got}; {remedy}")


def has_memory(tensor: Tensor) -> bool:
    """Whether a storage has room for its tensor: operators read beyond its end without a check."""
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
    """The tensor itself, or this rank's part of a sharded one."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


@torch.no_grad()
def same_values(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Whether tensors of one shape have the same values in ``dtype``; any NaN equals any other."""
    a, b = (t.to(a.device, dtype).resolve_conj().resolve_neg().contiguous() for t in (a, b))
    a, b = a.reshape(-1), b.reshape(-1)
    # Words compare much faster than halves, and bytes of every dtype do.
    word = torch.uint8 if (a.nbytes | a.data_ptr() | b.data_ptr()) % 8 else torch.int64
    if torch.equal(a.view(word), b.view(word)):
        return True
    return castable(dtype) and bool(((a == b) | (a.isnan() & b.isnan())).all())


def overwrite(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy any number of tensors into memory that autograd does not track.

    All CPU tensors that keep their dtype, or go from float32 to bfloat16, are copied in one
    operation. One for each would wait for all its threads each time, while others use the cores.
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
    """A tensor of a model, and where it is.

    ``saved`` says whether state dicts have it. ``home`` is the dict of the module that has it under
    ``key``. ``layer`` is the adapted layer whose merged weights have its value, if any does.
    """

    name: str
    tensor: Any
    kind: str = "buffer"
    saved: bool = True
    home: dict[str, Any] | None = None
    key: str = ""
    layer: _Merged | None = None

    def identity(self) -> tuple[Any, ...]:
        """Equal for two weights that always have the same values, as they are one tensor."""
        whole, part = self.tensor, part_of_rank(self.tensor)
        memory = storage_of(part), part.storage_offset(), whole.shape, whole.stride(), whole.dtype
        return *memory, id(self.layer)  # merging changes a weight, but not one that is tied to it

    @torch.no_grad()
    def value(self, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor to read, which ``dtype`` may cast; for sharded weights a collective call."""
        tensor: Any = self.tensor if self.layer is None else self.layer.value(self.name)
        if not is_dtensor(tensor):
            return tensor.detach()
        # Shards are cast before they travel.
        if dtype is not None and not any(placed.is_partial() for placed in tensor.placements):
            tensor = tensor.to(dtype)
        return tensor.detach().full_tensor()


class _Merged:
    """The merged weights of an adapted layer, made when the first is read; each is handed out once.

    peft merges in place, and unmerging leaves rounding errors: a copy of the layer is merged.
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

    Nested names are joined by dots, and those of torch's wrappers are left out. Buffers that are
    not saved are there too, and what is no tensor. With ``merge``, a peft model has the weights of
    its base model, with the active adapters merged in, and does not change itself.
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


# The names under which torch's wrappers keep the module that they wrap.
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
    """The weights in a module, unchecked, as :func:`weights_of` names and merges them."""
    found = []
    if merge:
        module, adapted = adapters.merged_part(prefix.removesuffix("."), module)
        if adapted is not None and layer is None:  # an outer layer merges those inside of it, too
            layer = _Merged(adapted, prefix)
    is_sharded, gathers, is_parallel = _traits(type(module))
    if is_sharded:
        raise TypeError(
            f"weights: {prefix.removesuffix('.') or 'the module'}: expected weights that can be "
            "made whole, got FullyShardedDataParallel; shard with fully_shard, or pass a full "
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
    """Whether modules are of FSDP's first version, of its second, and around a parallel module."""
    fsdp, parallel = "torch.distributed.fsdp", (nn.DataParallel, DistributedDataParallel)
    first = issubclass(kind, adapters.imported(fsdp, "FullyShardedDataParallel"))
    second = issubclass(kind, adapters.imported(fsdp, "FSDPModule"))
    return [first, second, issubclass(kind, parallel)]


def facts(weights: Iterable[Weight]) -> list[tuple[Any, ...]]:
    """Equal for two walks that found the same tensors, as ``.data`` and the like left them."""
    # Tensors are kept, so that their ids stay theirs; `==` gets to those of one id alone.
    return [(w.name, id(t := w.tensor), t, type(t), t.shape, t.dtype) for w in weights]


def refuse_other_state(module: nn.Module) -> None:
    """Raise ``TypeError`` if the state dict of a module has what is no parameter or buffer.

    Quantised layers, hooks and ``get_extra_state`` put it there, and nobody would load it.
    """
    try:
        state = module.state_dict()
    except TypeError:  # one of the module's own, or of a child's, that takes other arguments
        return
    weights = weights_in(module)
    names, known = {weight.name for weight in weights}, set()
    others = {name: value for name, value in state.items() if name not in names}
    for weight in weights if others else ():  # whose tensors may be split, or have other names
        if weight.saved:
            check_supported(weight.name, weight.tensor)
        if weight.tensor.layout is torch.strided:
            known.add(storage_of(part_of_rank(weight.tensor)))
    for name, value in others.items():
        if isinstance(value, Tensor):
            check_supported(name, value)
        if not isinstance(value, Tensor) or storage_of(part_of_rank(value)) not in known:
            raise TypeError(
                f"weights: {name}: expected a parameter or a buffer, got what else state_dict() "
                f"has ({type(value).__name__}); publish a module without quantised layers, extra "
                "state and hooks that add to its state dict, or a dict of the tensors to be sent"
            )


def read_as(names: Collection[str], known: Collection[str]) -> tuple[str, str]:
    """What is taken off all ``names``, and put before them instead, to read them as ``known``.

    It is the path of a module that has all of the weights, on one of the two sides: a policy's
    around its model's, say. Both are empty if there is no need, no way, or more than one.
    """
    wanted = set(known)

    def fits(off: str, on: str) -> bool:
        read = {on + name.removeprefix(off) for name in names}
        return read <= wanted or read >= wanted

    if fits("", ""):
        return "", ""
    ways = [
        (off, on)
        for off, module in _paths(names)
        for on, other in _paths(known)
        # One path for another would take the weights of another model.
        if (not module or not other or module == other) and fits(off, on)
    ]
    return ways[0] if len(ways) == 1 else ("", "")


def _paths(names: Collection[str]) -> list[tuple[str, list[str]]]:
    """What stands before all names of a module, and that without DistributedDataParallel's name."""
    levels = zip(*(name.split(".")[:-1] for name in names), strict=False)
    shared = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, levels)]
    paths = [shared[:depth] for depth in range(len(shared) + 1)]
    return [("".join(f"{p}." for p in path), [p for p in path if p != "module"]) for path in paths]
