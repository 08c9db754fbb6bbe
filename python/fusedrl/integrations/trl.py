"""Fused versions of TRL's log-prob functions, and the patch that installs them in TRL."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from fusedrl.compat.requirements import requirement
from fusedrl.compat.trl import COMPACTS, LOG_PROBS, LOSS
from fusedrl.ops._autograd import first_derivative_only
from fusedrl.ops.token_log_probs import TokenLogProbs, normalizers, token_log_probs
from fusedrl.patching import Replacement, Report, chosen_of, replace

__all__ = [
    "entropy_from_logits",
    "patch_trl",
    "selective_log_softmax",
    "selective_log_softmax_and_entropy",
]


def selective_log_softmax(
    logits: Tensor,
    index: Tensor,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Log-probs of selected classes; replaces ``trl.trainer.utils.selective_log_softmax``.

    Computes in float32 for every dtype of the logits, without storing a ``log_softmax``. If you
    also need the entropy, :func:`selective_log_softmax_and_entropy` reads the logits only once.

    Args:
        logits: ``[..., V]``; float32, bfloat16 or float16 (float64 runs the plain-torch reference).
        index: integer classes, ``[...]`` for one class in each row or ``[..., K]`` for K classes.
        temperature: positive divisor of the logits.
        row_mask: same shape as ``index``; where it is 0 the log-prob is exactly 0. With one class
            for each row, neither the logits nor the class are read there.
        dtype: dtype of the result. ``None`` follows TRL: the dtype of the logits on the CPU,
            float32 on a GPU. A bfloat16 result has 3 digits; ``torch.float32`` keeps all 7.

    Returns:
        Log-probs in nats, shaped like ``index``. The gradient has the dtype of ``logits``.

    Raises:
        TypeError: the logits are not floating point, or the index is not integer.
        ValueError: shapes do not match, or the temperature is out of range.
        RuntimeError: a class is outside ``[0, V)``.

    Example:
        >>> import torch
        >>> from fusedrl.integrations.trl import selective_log_softmax
        >>> logits = torch.tensor([[0.0, 0.0], [0.0, 1.0986123]])
        >>> selective_log_softmax(logits, torch.tensor([0, 1])).exp()
        tensor([0.5000, 0.7500])
        >>> selective_log_softmax(logits, torch.tensor([[0, 1], [0, 1]])).exp()
        tensor([[0.5000, 0.5000],
                [0.2500, 0.7500]])
    """
    dtype = _result_dtype(logits) if dtype is None else dtype
    if index.dim() != logits.dim():
        log_probs, _ = _log_probs_of_rows(logits, index, temperature, row_mask, entropy=False)
        return log_probs.to(dtype, copy=True)  # trainers write zeros into the result
    if index.shape[:-1] != logits.shape[:-1]:
        raise ValueError(
            f"index: expected shape {tuple(logits.shape[:-1])}, optionally with a last dimension "
            f"of K classes, got {tuple(index.shape)}; pass one class for each row of logits"
        )
    if index.shape[-1] == 1:
        row_mask = None if row_mask is None else row_mask.squeeze(-1)
        log_probs = selective_log_softmax(
            logits, index.squeeze(-1), temperature, row_mask, dtype=dtype
        )
        return log_probs.unsqueeze(-1)
    if index.is_floating_point():
        raise TypeError(
            f"index: expected an integer dtype, got {index.dtype}; convert with .long()"
        )
    log_probs = _ManyClasses.apply(logits, index.long(), temperature).to(dtype)
    return log_probs if row_mask is None else log_probs.masked_fill(row_mask == 0, 0.0)


def entropy_from_logits(
    logits: Tensor, chunk_size: int = 128, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Entropy of the softmax of each row; replaces ``trl.trainer.utils.entropy_from_logits``.

    Args:
        logits: ``[..., V]``, as in :func:`selective_log_softmax`. A logit of -inf contributes 0.
        chunk_size: ignored, since no probabilities are stored.
        dtype: dtype of the result, as in :func:`selective_log_softmax`.

    Returns:
        Entropies in nats, ``[...]``, differentiable.

    Raises:
        TypeError: the logits are not floating point.
        ValueError: the logits have no classes.

    Example:
        >>> import torch
        >>> from fusedrl.integrations.trl import entropy_from_logits
        >>> entropy_from_logits(torch.zeros(2, 10)).exp()
        tensor([10., 10.])
    """
    index = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    results = _log_probs_of_rows(logits, index, 1.0, None, entropy=True)
    assert results.entropy is not None
    return results.entropy.to(_result_dtype(logits) if dtype is None else dtype, copy=True)


def selective_log_softmax_and_entropy(
    logits: Tensor,
    index: Tensor,
    entropy_requires_grad: bool = True,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of one class and entropy of each row, in one pass over the logits.

    Replaces TRL's function of the same name.

    Args:
        logits: ``[..., V]``, as in :func:`selective_log_softmax`.
        index: integer class of each row, ``[...]``.
        entropy_requires_grad: whether a gradient flows through the entropy.
        temperature: positive divisor of the logits, also for the entropy.
        row_mask: same shape as ``index``; where it is 0 both are exactly 0 and nothing is read.
        dtype: dtype of both, as in :func:`selective_log_softmax`.

    Raises:
        TypeError: the logits are not floating point, or the index is not integer.
        ValueError: shapes do not match, or the temperature is out of range.
        RuntimeError: a class is outside ``[0, V)``.

    Example:
        >>> import torch
        >>> from fusedrl.integrations.trl import selective_log_softmax_and_entropy
        >>> log_probs, entropy = selective_log_softmax_and_entropy(
        ...     torch.zeros(2, 10), torch.tensor([0, 9])
        ... )
        >>> log_probs + entropy
        tensor([0., 0.])
    """
    dtype = _result_dtype(logits) if dtype is None else dtype
    log_probs, entropy = _log_probs_of_rows(logits, index, temperature, row_mask, entropy=True)
    assert entropy is not None
    entropy = entropy if entropy_requires_grad else entropy.detach()
    return log_probs.to(dtype, copy=True), entropy.to(dtype, copy=True)


def _result_dtype(logits: Tensor) -> torch.dtype:
    # TRL computes half-precision logits in their dtype on the CPU, in float32 with Triton.
    return logits.dtype if logits.is_cpu or logits.dtype == torch.float64 else torch.float32


def _log_probs_of_rows(
    logits: Tensor, index: Tensor, temperature: float, row_mask: Tensor | None, entropy: bool
) -> TokenLogProbs:
    """``token_log_probs`` for any number of leading dimensions."""
    mask = None if row_mask is None else row_mask != 0
    for name, rows in (("index", index), ("row_mask", mask)):
        if rows is not None and rows.shape != logits.shape[:-1]:
            raise ValueError(
                f"{name}: expected shape {tuple(logits.shape[:-1])} for logits of shape "
                f"{tuple(logits.shape)}, got {tuple(rows.shape)}; pass one value for each row"
            )
    if logits.dim() in (2, 3):  # keeps strides: no copy of a slice
        return token_log_probs(logits, index, mask, temperature=temperature, entropy=entropy)
    results = token_log_probs(
        logits.reshape(-1, logits.shape[-1]),
        index.reshape(-1),
        None if mask is None else mask.reshape(-1),
        temperature=temperature,
        entropy=entropy,
    )
    log_probs, of_rows = results
    of_rows = None if of_rows is None else of_rows.view(index.shape)
    return TokenLogProbs(log_probs.view(index.shape), of_rows)


class _ManyClasses(torch.autograd.Function):
    """Log-probs of several classes for each row, from the normalizers of the rows."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, index: Tensor, temperature: float) -> Tensor:
        largest, log_sum = normalizers(logits, temperature)
        ctx.save_for_backward(logits, index, largest, log_sum)
        ctx.temperature = temperature
        return (logits.gather(-1, index) - largest) / temperature - log_sum

    @staticmethod
    @first_derivative_only(
        "selective_log_softmax", "exclude it from the names of patch_trl: TRL's function has one"
    )
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, index, largest, log_sum = ctx.saved_tensors
        upstream = grads[0] / ctx.temperature
        gradient = (logits - largest).div_(ctx.temperature).sub_(log_sum).exp_()
        gradient.mul_(-upstream.sum(-1, keepdim=True)).scatter_add_(-1, index, upstream)
        return gradient.to(logits.dtype), None, None


_UTILS = "trl.trainer.utils"
_HEAD = "ChunkedLogProbFunction"

# TRL's methods to wrap in a context in which models share prefixes -> their modules.
_SHARING = {
    f"GRPOTrainer.{LOG_PROBS}": "trl.trainer.grpo_trainer",
    f"RLOOTrainer.{LOG_PROBS}": "trl.trainer.rloo_trainer",
    f"DPOTrainer.{LOSS}": "trl.trainer.dpo_trainer",
    "DPOTrainer.compute_ref_log_probs": "trl.trainer.dpo_trainer",
}

# name in TRL -> the module that defines it
_HOMES = {
    "selective_log_softmax": _UTILS,
    "entropy_from_logits": _UTILS,
    "selective_log_softmax_and_entropy": _UTILS,
    _HEAD: "trl.kernels.chunked_logprob",
    **_SHARING,
}

logger = logging.getLogger("fusedrl")


def patch_trl(names: Iterable[str] | None = None, *, share_prefixes: bool = True) -> Report:
    """Replace TRL's log-prob functions with the fused ones in all modules of TRL.

    ``ChunkedLogProbFunction`` is the LM head of the GRPO, RLOO, DPO, KTO and SFT trainers: the
    fused one computes log-probs and entropies of the scored tokens only, and the trainers compute
    their losses from them. Experimental trainers, and all trainers of a TRL without this head, call
    the functions on logits. Distillation and GKD call neither and are not changed.

    Four methods that compute the log-probs of GRPO, RLOO and DPO are wrapped: prefixes shared by
    several rows of a batch, such as the prompt of a group, go through the decoder once, under the
    conditions of :func:`fusedrl.models.causal_log_probs`.

    Existing trainers use the fused functions too, as do modules of TRL that are imported later.
    Your modules that imported a function before keep TRL's; ``report.held`` lists them.

    Args:
        names: what to replace, of ``selective_log_softmax``, ``entropy_from_logits``,
            ``selective_log_softmax_and_entropy``, ``ChunkedLogProbFunction``,
            ``GRPOTrainer._get_per_token_logps_and_entropies``,
            ``RLOOTrainer._get_per_token_logps_and_entropies``, ``DPOTrainer._compute_loss`` and
            ``DPOTrainer.compute_ref_log_probs``. By default all that the installed TRL has;
            missing ones are logged.
        share_prefixes: whether to wrap the last four, which share prefixes.

    Returns:
        A report that lists the replacements. ``revert()`` undoes the patch, also at the end of a
        ``with`` block.

    Raises:
        ImportError: TRL is not installed.
        TypeError: ``names`` is a single string.
        ValueError: a name is unknown, missing in the installed TRL or has other arguments there, or
            contradicts ``share_prefixes=False``; nothing is changed.

    Example:
        >>> import fusedrl, trl.trainer.utils
        >>> from fusedrl.integrations.trl import entropy_from_logits
        >>> with fusedrl.patch_trl() as report:
        ...     trl.trainer.utils.entropy_from_logits is entropy_from_logits
        True
        >>> trl.trainer.utils.entropy_from_logits is entropy_from_logits
        False
    """
    replacements = []
    for name in chosen_of(names, tuple(_HOMES)):
        if name in _SHARING and not share_prefixes:
            if names is None:
                continue
            raise ValueError(f"names: expected no {name} with share_prefixes=False; leave one out")
        fused, problem = _replacement_of(name)
        if problem is None:
            replacements.append(Replacement(_HOMES[name], name, fused))
        elif names is not None:
            raise ValueError(f"names: {problem}; leave {name} out, or install {requirement('trl')}")
        else:
            logger.warning(
                "patch_trl: %s; not patched; tested with %s", problem, requirement("trl")
            )
    if any(r.name == _HEAD for r in replacements) and hasattr(import_module(_UTILS), COMPACTS):
        from fusedrl.integrations.trl_head import gets_scored_rows

        replacements.append(Replacement(_UTILS, COMPACTS, gets_scored_rows, alone=True))
    return replace("trl", replacements)


def _replacement_of(name: str) -> tuple[Any, str | None]:
    """The replacement for a name of TRL, and the reason if it cannot be replaced."""
    if find_spec("trl") is None:
        raise ImportError(f"trl: expected it to be installed; pip install '{requirement('trl')}'")
    try:
        theirs = attrgetter(name)(import_module(_HOMES[name]))
    except Exception as error:
        module = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
        if isinstance(error, AttributeError) or module.startswith("trl."):
            return None, f"the installed TRL has no {_HOMES[name]}.{name}"
        # An optional dependency of these trainers, such as vLLM, does not load.
        if name in _SHARING:
            return None, f"{_HOMES[name]} cannot be imported: {type(error).__name__}: {error}"
        raise  # a dependency of TRL
    if name in _SHARING:
        from fusedrl.integrations.trl_trainers import sharing

        fused, same = sharing(theirs), _arguments(theirs)[:2] == ["self", "model"]
    elif name == _HEAD:
        # Imported before the patch: the module keeps TRL's function as the fallback.
        from fusedrl.integrations.trl_head import ChunkedLogProbFunction as fused

        same = theirs is fused or _arguments(theirs.forward)[1:] == _arguments(fused.apply)
    else:
        fused = globals()[name]
        expected = _arguments(theirs)
        same = expected == _arguments(fused)[: len(expected)]
    return fused, None if same else f"{name} has other arguments in the installed TRL"


def _arguments(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)
