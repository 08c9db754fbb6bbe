"""Which tensors a channel can carry, whether two are the same, and how they are copied."""

from __future__ import annotations

import sys
from typing import Any

import torch
from tensordict import MemoryMappedTensor
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fusedrl import _host
from fusedrl.compat.torch import copy_all, storage_of

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
    """Whether a dtype is a float of at least 16 bits, whose values can be cast to another one.

    Smaller floats are meaningless without their scales.
    """
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
    """Whether the storage of a dense tensor has room for all of its elements.

    Offloading frees or shrinks storages, and operators read beyond their end without a check.
    """
    if tensor.is_contiguous():
        end = tensor.nbytes
    else:
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        end = (last + 1) * tensor.element_size()
    if offset := tensor.storage_offset():
        end += offset * tensor.element_size()
    has = tensor.untyped_storage().nbytes() >= end and tensor.data_ptr() != 0
    return has or tensor.numel() == 0


@torch.no_grad()
def whole(tensor: Any, dtype: torch.dtype | None = None) -> Tensor:
    """``tensor`` without its autograd graph; a DTensor is gathered, which is a collective call.

    Args:
        tensor: to make whole.
        dtype: that of the copy which is made of it; shards are cast before they travel.
    """
    tensor = tensor.detach()
    if not is_dtensor(tensor):
        return tensor
    if dtype is not None and not any(placed.is_partial() for placed in tensor.placements):
        tensor = tensor.to(dtype)
    return tensor.full_tensor()


def part_of_rank(tensor: Any) -> Tensor:
    """The tensor itself, or this rank's part of a sharded one."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def identity(tensor: Tensor) -> tuple[Any, ...] | None:
    """Equal for two tensors that are the same view of the same memory; ``None`` if it is empty."""
    if tensor.numel() == 0:
        return None
    shard = part_of_rank(tensor)
    return (
        storage_of(shard),
        shard.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
    )


@torch.no_grad()
def same_values(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Whether two tensors of one shape have the same values in ``dtype``; any NaN equals any other.

    Reads both, and on a GPU waits for the current stream. The devices may differ.
    """
    a, b = a.to(dtype), b.to(a.device, dtype)
    if all(map(torch.equal, _words(a), _words(b))):
        return True
    return castable(dtype) and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _words(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The bits as 64-bit words, which compare much faster than halves, and the bytes left over."""
    packed = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if packed.storage_offset() % 8:
        packed = packed.clone()
    end = len(packed) // 8 * 8
    return packed[:end].view(torch.int64), packed[end:]


@torch.no_grad()
def copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy any number of tensors in one fused operation."""
    if targets:
        copy_all(targets, sources)


def overwrite(targets: list[Tensor], sources: list[Tensor], names: list[str]) -> None:
    """As :func:`copy`, into memory that autograd does not track.

    All CPU tensors that keep their dtype, or go from float32 to bfloat16, are copied in one
    operation. An operator for each tensor would wait for all its threads each time, which costs
    more than the copy itself where other processes use the cores.

    Raises:
        TypeError, ValueError: a source was freed or resized since it was found to fit; the message
            has its name, and nothing is copied.
    """
    pieces, rest = [], []
    for target, source, name in zip(targets, sources, names, strict=True):
        cast = source.dtype is torch.float32 and target.dtype is torch.bfloat16
        if (
            (cast or source.dtype is target.dtype)
            and source.device.type == target.device.type == "cpu"
            and source.layout is torch.strided
            and source.is_contiguous()
            and not source.is_conj()
            and not source.is_neg()
        ):
            size = numel, width = source.numel(), source.element_size()
            end = (source.storage_offset() + numel) * width
            storage, address = source.untyped_storage(), source.data_ptr()
            if numel != target.numel() or storage.nbytes() < end or address == 0:
                _check_source(name, target, source)
            pieces.append((target.data_ptr(), address, *size, cast))
        else:
            _check_source(name, target, source)
            rest.append((target, source))
    copy([target for target, _ in rest], [source for _, source in rest])
    _host.copy_pieces(pieces, torch.get_num_threads())


def _check_source(name: str, target: Tensor, source: Tensor) -> None:
    check_supported(name, source)
    if source.numel() != target.numel():
        raise ValueError(
            f"weights: {name}: expected shape {tuple(target.shape)}, got {tuple(source.shape)} by "
            "the time it was to be copied; publish while nothing else changes the weights"
        )
