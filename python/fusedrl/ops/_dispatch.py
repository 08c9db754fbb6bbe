"""Shared by all ops: the choice of an implementation, scalars as tensors, and argument checks."""

from __future__ import annotations

import importlib.util
import numbers
import os
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from fusedrl import native
from fusedrl.compat.torch import (
    is_batched_for_gradients,
    is_transformed,
    keep_out_of_cuda_graphs,
)
from fusedrl.logs import warn_once

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DENSE, NESTED = "a dense tensor", "a nested tensor"
IMPLS = ("auto", "cpu", "cuda", "triton", "reference")
NANS = ("propagate", "missing")
LARGEST = 1e30  # bound of scalar arguments: products with it or its reciprocal stay in float32
LIBRARY = {"cpu": "_C", "cuda": "_C_cuda"}
# Remedies that several errors share.
ONE_A_TOKEN = "give one value for each token"
RUNNING_SUM = "pass 0 and the running sum of the sequence lengths"
for _library in LIBRARY.values():
    native.load_error(_library)  # at import, as tracing cannot load a library


def register_fakes(fakes: dict[str, Callable]) -> None:
    """Register shape functions of ops, and exclude the ops from Inductor's CUDA graphs.

    A CUDA graph would replay the first value of a CPU scalar, and cannot wait for the number of
    rows that a mask keeps. Does nothing if ``_C`` is not loaded.
    """
    if native.load_error("_C") is not None:
        return
    for name, fake in fakes.items():
        torch.library.register_fake(f"fusedrl::{name}", fake)
        keep_out_of_cuda_graphs(getattr(torch.ops.fusedrl, name).default)


def choose(
    impl: str,
    op: str,
    device: torch.device,
    dtype: torch.dtype,
    dtypes: tuple = KERNEL_DTYPES,
    triton: bool = False,
) -> str:
    """The implementation that runs: ``cpu``, ``cuda``, ``triton``, ``reference`` or ``meta``.

    ``auto`` selects the compiled kernel of the tensor's device, or falls back to the reference
    (logged once). On the ``meta`` device, ``auto`` and ``reference`` both use the shape functions
    of the compiled ops. An explicit ``impl`` that cannot run raises ``ValueError`` or
    :class:`fusedrl.native.NativeLibraryError`.
    """
    check_choice("impl", impl, IMPLS)
    if device.type == "meta" and impl in ("auto", "reference"):
        native.require("_C")
        return "meta"
    if impl == "reference":
        return impl
    if impl == "triton":
        if not triton:
            raise ValueError(
                f"impl: expected 'auto', 'cpu', 'cuda' or 'reference' for {op}, got 'triton'; "
                "leave it out for 'auto'"
            )
        _require_triton(device)
    elif impl != "auto" and impl != device.type:
        raise ValueError(
            f"impl: expected tensors on {impl} with {impl!r}, got {device}; use 'auto', or move "
            f"them with .to({impl!r})"
        )
    if impl != "auto":
        if dtype not in dtypes:
            raise ValueError(
                f"impl: expected {_names(dtypes)} with {impl!r}, got {dtype}; use 'auto'"
            )
        native.require(LIBRARY[device.type], device.index if device.type == "cuda" else None)
        return impl
    if device.type not in LIBRARY:
        return _fall_back(f"{op}: no compiled kernel for {device.type}")
    if dtype not in dtypes:
        return _fall_back(f"{op}: no compiled kernel for {dtype}")
    if device.type == "cpu":
        native.require("_C")
    elif (error := native.device_error(device.index or 0)) is not None:
        return _fall_back(f"{op}: {error}")
    return device.type


def _require_triton(device: torch.device) -> None:
    if importlib.util.find_spec("triton") is None:
        raise ValueError("impl: expected the triton package with 'triton', got none; install it")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not (interpreted and device.type == "cpu"):
        raise ValueError(
            f"impl: expected tensors on cuda with 'triton', got {device}; use 'auto' (or, to "
            "debug, TRITON_INTERPRET=1 on the CPU)"
        )


def _names(dtypes: tuple) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _fall_back(why: str) -> str:
    warn_once(f"{why}; using the reference implementation")
    return "reference"


def check_choice(
    name: str, value: object, choices: Collection[str], remedy: str | None = None
) -> str:
    """Return ``value`` if it is one of ``choices``, of which the first is the default."""
    if isinstance(value, str) and value in choices:
        return value
    remedy = remedy or f"leave it out for {next(iter(choices))!r}"
    raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}; {remedy}")


def check_flags(**flags: object) -> None:
    """Refuse flags that are not a bool of Python or numpy."""
    for name, value in flags.items():
        if not isinstance(value, bool) and type(value).__name__ not in ("bool", "bool_"):
            raise TypeError(f"{name}: expected True or False, got {value!r}; pass one of the two")


def scalar_tensor(
    name: str,
    value: float | Tensor,
    device: torch.device,
    low: float = -LARGEST,
    high: float = LARGEST,
    wait: bool = False,
    remedy: str = "pass a number in that range",
) -> Tensor:
    """``value`` as a 0-dim float64 tensor, so that a compiled graph does not specialise on it.

    Refuses values outside ``[low, high]`` and, during the capture of a CUDA graph, tensors on the
    CPU, whose value the graph would keep. The value of a tensor is checked if it is on the CPU, or
    with ``wait`` on any device, but never in a traced graph.
    """
    if not isinstance(value, Tensor):
        number = _number(name, value, low, high, remedy)
        return torch.full((), number, dtype=torch.float64, device="cpu")
    check_tensor(name, value)
    if value.numel() != 1 or not value.dtype.is_floating_point:
        repair = "convert it with .double()" if value.numel() == 1 else "pass one number"
        raise ValueError(
            f"{name}: expected a float or a floating-point tensor of one element, "
            f"got {value.dtype} {tuple(value.shape)}; {repair}"
        )
    if value.device.type != "cpu" and value.device != device:
        raise ValueError(
            f"{name}: expected a tensor on the CPU or, like the data, on {device}, "
            f"got {value.device}; move it with .to({str(device)!r})"
        )
    if value.requires_grad:
        raise ValueError(
            f"{name}: expected a constant, got a tensor that requires grad; "
            f"no gradient flows to {name}: pass {name}.detach()"
        )
    if value.is_cpu and is_capturing(device):
        raise RuntimeError(
            f"{name}: expected a number, or a tensor on {device}, in the capture of a CUDA graph, "
            "got a tensor on the CPU, whose value the graph would keep; move it with "
            f".to({str(device)!r}) before the capture"
        )
    scalar = value.reshape(()).to(torch.float64)
    if (wait or scalar.is_cpu) and has_values(scalar):
        _check_range(name, scalar.item(), low, high, remedy)
    return scalar


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream is captured as a CUDA graph; ``False`` in a traced graph."""
    if device.type != "cuda" or torch.compiler.is_compiling():
        return False
    return torch.cuda.is_current_stream_capturing()


def check_counted_on_host(mask: Tensor | None, shift: bool, device: torch.device) -> None:
    """Refuse to drop rows of a matrix product during a capture: the host cannot count them."""
    if (mask is not None or shift) and is_capturing(device):
        got = "shift=True" if mask is None else "a mask"
        raise RuntimeError(
            "mask, shift: expected None and False in the capture of a CUDA graph, where the host "
            f"cannot read the number of kept rows, got {got}; pass only the kept rows, or call the "
            "op outside the capture"
        )


def _number(name: str, value: object, low: float, high: float, remedy: str) -> float:
    number = real_number(value)
    if number is None:
        raise TypeError(
            f"{name}: expected a real number or a floating-point tensor of one element, "
            f"got {kind(value)}; pass a number"
        )
    _check_range(name, number, low, high, remedy)
    return float(number)


def real_number(value: object) -> Any:
    """``value`` as a number to compare with any bound; ``None`` if it is not a real number.

    A bool is not: it is a flag that was passed to the wrong option.
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float, numbers.Rational)):
        return value  # an integer may be too large for a float
    # Comparing numpy's float16 or float32 with a bound outside their range would overflow.
    return float(value) if isinstance(value, numbers.Real) else None


def temperature_tensor(value: float | Tensor, device: torch.device, chosen: str) -> Tensor:
    """``value`` as a temperature for kernels; for the reference, its range is always checked."""
    return scalar_tensor(
        *("temperature", value, device),
        low=1 / LARGEST,
        wait=chosen == "reference",
        remedy="1.0 leaves the logits as they are",
    )


def _check_range(name: str, number: float, low: float, high: float, remedy: str) -> None:
    if not low <= number <= high:
        raise ValueError(
            f"{name}: expected a number from {low:g} to {high:g}, got {number}; {remedy}"
        )


def check_without_kernel(name: str, value: object, default: object) -> None:
    """Refuse an option that the reference implementation does not support."""
    if value != default:
        raise ValueError(
            f"{name}: expected {default} with the reference implementation, got {value}; leave it "
            "out, or use impl='auto' with float32, bfloat16 or float16"
        )


def result_dtype(values: Tensor) -> torch.dtype:
    """The dtype of the results of ops over rows: float64 for float64 input, else float32."""
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def has_values(tensor: Tensor) -> bool:
    """Whether Python can read the values of a tensor, unlike those of a traced or meta tensor."""
    return (
        not torch.compiler.is_compiling()
        and type(tensor) is Tensor
        and not tensor.is_meta
        and not is_transformed(tensor)
        and not is_batched_for_gradients(tensor)
    )


def kind(value: object) -> str:
    """The kind of an argument, for an error message."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    if value.is_nested:
        return NESTED
    return DENSE if value.layout == torch.strided else f"a tensor of layout {value.layout}"


def check_tensor(name: str, value: object, *kinds: str, like: str = "") -> None:
    """Refuse a value that is not a tensor of one of these kinds, by default a dense tensor."""
    got, kinds = kind(value), kinds or (DENSE,)
    if got in kinds:
        return
    expected = f"{' or '.join(kinds)}{like}"
    raise TypeError(f"{name}: expected {expected}, got {got}; pass a tensor of that kind")


def check_floating(name: str, tensor: Tensor) -> None:
    """Refuse a tensor of integers or bools."""
    if not tensor.dtype.is_floating_point:
        raise TypeError(
            f"{name}: expected a floating-point dtype, got {tensor.dtype}; convert it with .float()"
        )


def check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    """Refuse a tensor on another device."""
    if tensor.device != device:
        raise ValueError(
            f"{name}: expected device {device}, got {tensor.device}; "
            f"move it with .to({str(device)!r})"
        )


def check_dtype(name: str, tensor: Tensor, like: str, dtype: torch.dtype) -> None:
    """Refuse a tensor whose dtype is not that of the argument ``like``."""
    if tensor.dtype != dtype:
        raise ValueError(
            f"{name}: expected {dtype}, the dtype of {like}, got {tensor.dtype}; convert one of "
            "them with .to()"
        )


def check_same(
    name: str,
    tensor: Tensor,
    shape: torch.Size,
    device: torch.device,
    like: str = "",
    rows: Tensor | None = None,
    remedy: str = ONE_A_TOKEN,
) -> None:
    """Refuse a tensor of another shape or on another device.

    ``like`` is the reason for the shape in the error message; with ``rows``, their shape follows.
    """
    if tensor.shape != shape:
        like += "" if rows is None else f" of shape {tuple(rows.shape)}"
        raise ValueError(
            f"{name}: expected shape {tuple(shape)}{like}, got {tuple(tensor.shape)}; {remedy}"
        )
    check_device(name, tensor, device)


def check_mask(
    mask: Tensor | None,
    shape: torch.Size,
    device: torch.device,
    like: str = " like tokens",
    rows: Tensor | None = None,
) -> None:
    """Refuse a mask that is not a bool tensor of ``shape``; see :func:`check_same` for ``like``."""
    if mask is None:
        return
    check_tensor("mask", mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"mask: expected torch.bool, got {mask.dtype}; convert it with .bool()")
    check_same("mask", mask, shape, device, like, rows)


def check_offsets(offsets: Tensor | None, count: int, device: torch.device) -> None:
    """Refuse offsets that do not partition ``count`` packed tokens; only CPU values are read."""
    if offsets is None:
        return
    check_offsets_kind(offsets, device)
    if device.type != "cpu" or not has_values(offsets):
        return
    bounds = offsets.tolist()
    if bounds[0] != 0 or bounds[-1] != count or bounds != sorted(bounds):
        raise ValueError(
            f"offsets: expected non-decreasing values from 0 to {count}, got {_shown(bounds)}; "
            f"{RUNNING_SUM}"
        )


def _shown(bounds: list[int]) -> str:
    """Offsets in one line; long ones are abbreviated to the first and the last values."""
    if len(bounds) <= 8:
        return str(bounds)
    first, last = (", ".join(map(str, part)) for part in (bounds[:4], bounds[-2:]))
    return f"[{first}, ..., {last}]"


def check_offsets_kind(offsets: Tensor, device: torch.device) -> None:
    """Refuse offsets that are not a 1-D integer tensor on the device, without reading values."""
    check_tensor("offsets", offsets)
    if offsets.dtype not in (torch.int64, torch.int32) or offsets.dim() != 1 or len(offsets) < 1:
        raise ValueError(
            f"offsets: expected a 1-D int64 tensor of B + 1 elements, "
            f"got {offsets.dtype} {tuple(offsets.shape)}; {RUNNING_SUM}"
        )
    check_device("offsets", offsets, device)
