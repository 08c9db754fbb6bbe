"""What every op shares: which implementation runs, and scalars that do not recompile."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import torch
from torch import Tensor

from fusedrl import native

logger = logging.getLogger("fusedrl")

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
IMPLS = ("auto", "cpu", "cuda", "triton", "reference")
LIBRARY = {"cpu": "_C", "cuda": "_C_cuda"}
for _library in LIBRARY.values():
    native.load_error(_library)  # before any tracing starts

_warned: set[str] = set()


def register_fakes(fakes: dict[str, Callable]) -> None:
    """Register shape functions of the compiled ops; without the library there are no ops."""
    if native.load_error("_C") is not None:
        return
    for name, fake in fakes.items():
        torch.library.register_fake(f"fusedrl::{name}", fake)


def choose(impl: str, op: str, device: torch.device, dtype: torch.dtype, dtypes: tuple) -> str:
    """The implementation that runs: ``cpu``, ``cuda`` or ``reference``.

    ``auto`` takes the compiled kernel of the tensor's device, and the reference (logged once) where
    there is none. An explicit ``impl`` that cannot run raises ``ValueError`` or
    :class:`fusedrl.native.NativeLibraryError`.
    """
    if impl not in IMPLS:
        raise ValueError(f"impl: expected one of {', '.join(IMPLS)}, got {impl!r}")
    if impl == "reference":
        return impl
    if impl == "triton":
        raise ValueError(f"impl: {op} has no Triton kernel; use 'auto', 'cpu' or 'cuda'")
    if impl != "auto":
        if impl != device.type:
            raise ValueError(f"impl: {impl!r} needs tensors on {impl}, got {device}")
        if dtype not in dtypes:
            raise ValueError(
                f"impl: {impl!r} expects dtype {_names(dtypes)}, got {dtype}; use 'auto'"
            )
        native.require(LIBRARY[impl])
        return impl
    if device.type not in LIBRARY:
        return _fall_back(f"{op}: no compiled kernel for {device.type}")
    if dtype not in dtypes:
        return _fall_back(f"{op}: no compiled kernel for {dtype}")
    if device.type == "cuda" and (error := native.load_error("_C_cuda")) is not None:
        return _fall_back(f"{op}: {error}")
    native.require(LIBRARY[device.type])
    return device.type


def _names(dtypes: tuple) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _fall_back(why: str) -> str:
    if not torch.compiler.is_compiling() and why not in _warned:
        _warned.add(why)
        logger.warning("%s; using the reference implementation", why)
    return "reference"


def scalar_tensor(name: str, value: float | Tensor) -> Tensor:
    """``value`` as a 0-dim float64 tensor, so that a compiled graph does not specialise on it."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or not value.dtype.is_floating_point:
            raise ValueError(
                f"{name}: expected a float or a floating-point tensor of one element, "
                f"got {value.dtype} {tuple(value.shape)}"
            )
        if value.requires_grad:
            raise ValueError(
                f"{name}: expected a constant, got a tensor that requires grad; "
                f"no gradient flows to {name}: pass {name}.detach()"
            )
        return value.reshape(()).to(torch.float64)
    return torch.full((), value, dtype=torch.float64, device="cpu")


def check_tensor(name: str, value: object, optional: bool = False) -> None:
    """Refuse what is no tensor; ``None`` passes where the argument is optional."""
    if not isinstance(value, Tensor) and not (optional and value is None):
        raise TypeError(
            f"{name}: expected a torch.Tensor, got {type(value).__name__}; "
            "convert it with torch.as_tensor"
        )


def check_temperature(temperature: float | Tensor) -> None:
    """Refuse a temperature that is no positive number; a tensor is checked where it is read."""
    if not isinstance(temperature, Tensor) and not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature: expected a finite number > 0, got {temperature}")


def check_same(name: str, tensor: Tensor, shape: torch.Size, device: torch.device) -> None:
    """Refuse a companion tensor of another shape or device."""
    if tensor.shape != shape:
        raise ValueError(f"{name}: expected shape {tuple(shape)}, got {tuple(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(
            f"{name}: expected device {device}, got {tensor.device}; "
            f"move it with .to({str(device)!r})"
        )


def check_mask(mask: Tensor | None, shape: torch.Size, device: torch.device) -> None:
    """Refuse a mask that is no bool tensor of ``shape``."""
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise TypeError(f"mask: expected torch.bool, got {mask.dtype}; convert it with .bool()")
    check_same("mask", mask, shape, device)


def check_offsets(offsets: Tensor | None, count: int, device: torch.device) -> None:
    """Refuse offsets that do not partition ``count`` packed tokens; values are read on CPU only."""
    if offsets is None:
        return
    if offsets.dtype not in (torch.int64, torch.int32) or offsets.dim() != 1 or len(offsets) < 1:
        raise ValueError(
            f"offsets: expected a 1-D int64 tensor of B + 1 elements, "
            f"got {offsets.dtype} {tuple(offsets.shape)}"
        )
    if offsets.device != device:
        raise ValueError(f"offsets: expected device {device}, got {offsets.device}")
    if device.type != "cpu" or torch.compiler.is_compiling():
        return
    bounds = offsets.tolist()
    if bounds[0] != 0 or bounds[-1] != count or bounds != sorted(bounds):
        raise ValueError(
            f"offsets: expected non-decreasing values from 0 to {count}, got {bounds[:8]}"
            f"{' ...' if len(bounds) > 8 else ''}"
        )
