"""Samples for ``token_kl``, read where they lie: a concatenation of lists would copy them first.

On CUDA an op takes the tensors. On the CPU a handle of torch for each of hundreds of tensors would
take longer than their tokens, and so the kernel is told their addresses.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import maybe_current_level
from torch.autograd import forward_ad

from fusedrl import native
from fusedrl.ops import _dispatch
from fusedrl.ops._samples import PackedColumns

# What the op over lists says of lists that do not fit, before it launches anything.
_DO_NOT_FIT = re.compile(r"\b(log_probs|ref_log_probs|mask|reward): (sample \d+: )?expected ")
_EXCHANGE = "__dlpack_c_exchange_api__"  # torch's C functions of DLPack

Column = Sequence[Tensor]


def implementation_of(device: torch.device) -> Callable[..., PackedColumns | None] | None:
    """What reads lists of a device in place, if anything does.

    It takes log-probs, reference log-probs, masks and rewards or ``None``, the coefficient, the
    estimator's number, and whether NaN is missing. ``None`` comes back for lists that have to be
    packed: they do not fit, differ in dtype, are not contiguous, or a gradient is recorded.
    """
    return _IMPLEMENTATIONS.get(device.type) if has_memory() else None


def has_memory() -> bool:
    """Whether tensors are what they seem.

    What is transformed has no memory of its own; a trace would keep the results as constants.
    """
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return False
    return not maybe_current_level() and forward_ad._current_level < 0


def by_address(
    log_probs: Column,
    ref_log_probs: Column,
    mask: Column | None,
    reward: Column | None,
    coeff: float | Tensor,
    estimator: int,
    missing: bool,
) -> PackedColumns | None:
    """On the CPU: tensors of no subclass, outside of dispatch modes, which see no addresses."""
    weight = _dispatch.scalar_on_host("coeff", coeff)
    reader, kernel = _reader(torch.is_grad_enabled()), _kernel()
    if reader is None or torch._C._len_torch_dispatch_stack():
        return None
    columns = [None if x is None else tuple(x) for x in (log_probs, ref_log_probs, mask, reward)]
    found = reader.memory(*columns)
    if found is None:
        return None
    samples, dtype, lengths = found
    kl = torch.empty(sum(lengths), dtype=log_probs[0].dtype, device="cpu")
    penalised = None if reward is None else torch.empty_like(kl)
    addresses = kl.data_ptr(), None if penalised is None else penalised.data_ptr()
    if not kernel(samples, len(lengths), dtype, weight, estimator, missing, *addresses):
        return None
    return PackedColumns([kl] if penalised is None else [kl, penalised], lengths)


def by_handle(
    log_probs: Column,
    ref_log_probs: Column,
    mask: Column | None,
    reward: Column | None,
    coeff: float | Tensor,
    estimator: int,
    missing: bool,
) -> PackedColumns | None:
    """On CUDA: in one launch, which the host does not wait for."""
    if not _may_read(log_probs, ref_log_probs, mask, reward):
        return None
    lists = (log_probs, ref_log_probs, mask or (), reward or ())
    weight = _dispatch.scalar_tensor("coeff", coeff, log_probs[0].device)
    try:
        kl, penalised = torch.ops.fusedrl.token_kl_list(*lists, weight, estimator, missing)
    except RuntimeError as error:
        if _DO_NOT_FIT.search(str(error)) is None:
            raise
        return None
    lengths = list(map(Tensor.numel, log_probs))
    return PackedColumns([kl] if reward is None else [kl, penalised], lengths)


_IMPLEMENTATIONS: dict[str, Callable[..., PackedColumns | None]] = {
    "cpu": by_address,
    "cuda": by_handle,
}


def _may_read(
    log_probs: Column, ref_log_probs: Column, mask: Column | None, reward: Column | None
) -> bool:
    """Whether to try ``token_kl_list``.

    The first samples tell about dtypes and memory, since to ask all of them here would take as long
    as to concatenate them: the op itself refuses lists that do not fit behind these.
    """
    values = [log_probs, ref_log_probs, *([] if reward is None else [reward])]
    columns = [*values, *([] if mask is None else [mask])]
    if any(set(map(type, column)) != {Tensor} for column in columns):
        return False
    if not all(column[0].is_contiguous() for column in columns):
        return False
    if len({column[0].dtype for column in values}) > 1:
        return False
    if reward is not None and len(set(map(Tensor.dim, reward))) > 1:
        return False  # one of them lacks its dimension
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in chain(*values)))


def exchange_functions() -> Any:
    """What finds the memory of torch's tensors from C; ``None`` where torch has no such thing."""
    return getattr(Tensor, _EXCHANGE, None)


@cache
def _reader(records: bool) -> Any:
    """What finds the addresses of tensors, but where a gradient is recorded; ``None`` for none."""
    functions = exchange_functions()
    if functions is None:
        return None
    from fusedrl import _host

    return _host.SampleReader(Tensor, functions, not records)


@cache
def library() -> ctypes.CDLL:
    """The library of the CPU's ops, which has kernels over addresses beside them."""
    return ctypes.CDLL(str(native.find("_C")))


@cache
def _kernel() -> Any:
    kernel = library().fusedrl_token_kl_samples
    count, pointer = ctypes.c_int64, ctypes.c_void_p
    kernel.argtypes = [
        *(ctypes.c_char_p, count, count, ctypes.c_double, count, ctypes.c_bool),
        *(pointer, pointer),
    ]
    kernel.restype = ctypes.c_bool
    return kernel
