"""TRL's log-prob functions over the fused ops, and the patch that replaces TRL's by them."""

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
    """Log-probs of chosen classes, as ``trl.trainer.utils.selective_log_softmax`` takes them.

    It computes in float32 whatever the dtype of the logits, and stores no ``log_softmax``. If you
    need the entropy too, :func:`selective_log_softmax_and_entropy` reads the logits only once.

    Args:
        logits: ``[..., V]``; float32, bfloat16 or float16 (float64 runs through the reference).
        index: integer classes, ``[...]`` for one class in each row or ``[..., K]`` for K classes.
        temperature: positive divisor of the logits.
        row_mask: the shape of ``index``; where it is 0 the log-prob is exactly 0. With one class in
            each row, neither the logits nor the class are read there.
        dtype: of the result. ``None`` is TRL's: that of the logits on the CPU, float32 on a GPU.
            A bfloat16 result is the float32 one rounded once, to 3 digits; ``torch.float32`` keeps
            the 7 that were computed.

    Returns:
        Log-probs in nats, shaped like ``index``. Gradients reach ``logits`` in its own dtype.

    Raises:
        TypeError: the logits are not floating point, or the index is not integer.
        ValueError: the shapes do not fit, or the temperature is out of range.
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
        log_probs, _ = _rowwise(logits, index, temperature, row_mask, entropy=False)
        return log_probs.to(dtype, copy=True)  # trainers write zeros into it; the op needs its own
    if index.shape[:-1] != logits.shape[:-1]:
        raise ValueError(
            f"index: expected shape {tuple(logits.shape[:-1])}, with or without a last dimension "
            f"of classes a row, got {tuple(index.shape)}; give one class for each row of logits"
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
    """Entropy of each row's softmax, as ``trl.trainer.utils.entropy_from_logits`` takes it.

    Args:
        logits: ``[..., V]``, as in :func:`selective_log_softmax`. A class at -inf adds 0.
        chunk_size: without effect: rows are read one by one, and no probabilities are stored.
        dtype: of the result, as in :func:`selective_log_softmax`.

    Returns:
        Entropies in nats, ``[...]``, with gradient.

    Raises:
        TypeError: the logits are not floating point.
        ValueError: the logits have no class.

    Example:
        >>> import torch
        >>> from fusedrl.integrations.trl import entropy_from_logits
        >>> entropy_from_logits(torch.zeros(2, 10)).exp()
        tensor([10., 10.])
    """
    index = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    results = _rowwise(logits, index, 1.0, None, entropy=True)
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
    """Log-prob of one class and the entropy of each row, from one pass over the logits.

    It takes the arguments of TRL's function of that name.

    Args:
        logits: ``[..., V]``, as in :func:`selective_log_softmax`.
        index: integer class of each row, ``[...]``.
        entropy_requires_grad: whether a gradient flows through the entropy.
        temperature: positive divisor of the logits; the entropy is that of the divided ones.
        row_mask: the shape of ``index``; where it is 0 both are exactly 0, and nothing is read.
        dtype: of both, as in :func:`selective_log_softmax`.

    Raises:
        TypeError: the logits are not floating point, or the index is not integer.
        ValueError: the shapes do not fit, or the temperature is out of range.
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
    log_probs, entropy = _rowwise(logits, index, temperature, row_mask, entropy=True)
    assert entropy is not None
    entropy = entropy if entropy_requires_grad else entropy.detach()
    return log_probs.to(dtype, copy=True), entropy.to(dtype, copy=True)


def _result_dtype(logits: Tensor) -> torch.dtype:
    # TRL computes half logits in their dtype on the CPU, and in float32 where Triton runs.
    return logits.dtype if logits.is_cpu or logits.dtype == torch.float64 else torch.float32


def _rowwise(
    logits: Tensor, index: Tensor, temperature: float, row_mask: Tensor | None, entropy: bool
) -> TokenLogProbs:
    """``token_log_probs`` of rows in any number of dimensions."""
    mask = None if row_mask is None else row_mask != 0
    for name, rows in (("index", index), ("row_mask", mask)):
        if rows is not None and rows.shape != logits.shape[:-1]:
            raise ValueError(
                f"{name}: expected shape {tuple(logits.shape[:-1])} for logits of shape "
                f"{tuple(logits.shape)}, got {tuple(rows.shape)}; give one value for each row"
            )
    if logits.dim() in (2, 3):  # taken with their strides, so that a slice of a batch is not copied
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
    """Log-probs of several classes in each row, from the normalizers of the rows."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, index: Tensor, temperature: float) -> Tensor:
        largest, log_sum = normalizers(logits, temperature)
        ctx.save_for_backward(logits, index, largest, log_sum)
        ctx.temperature = temperature
        return (logits.gather(-1, index) - largest) / temperature - log_sum

    @staticmethod
    @first_derivative_only(
        "selective_log_softmax", "leave it out of the names for patch_trl, as TRL's own has one"
    )
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, index, largest, log_sum = ctx.saved_tensors
        upstream = grads[0] / ctx.temperature
        gradient = (logits - largest).div_(ctx.temperature).sub_(log_sum).exp_()
        gradient.mul_(-upstream.sum(-1, keepdim=True)).scatter_add_(-1, index, upstream)
        return gradient.to(logits.dtype), None, None


_UTILS = "trl.trainer.utils"
_HEAD = "ChunkedLogProbFunction"

# Methods that stay TRL's, but run in a block in which models share prefixes; with their modules.
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
    """Put the fused functions in the place of TRL's own, wherever TRL's modules hold them.

    ``ChunkedLogProbFunction`` is the LM head of the GRPO, RLOO, DPO, KTO and SFT trainers, which
    then get log-probs and entropies of the scored tokens alone and compute their own losses of
    them. The experimental trainers call the functions over logits, and so does every trainer of a
    TRL that has no such head. Distillation and GKD call neither and run as before.

    Four methods compute the log-probs of GRPO, RLOO and DPO. They stay TRL's, but the decoder
    computes a beginning that several rows of their batch share, such as the prompt of a group, once
    for all of them, where :func:`fusedrl.models.causal_log_probs` would.

    Trainers that exist already use the fused functions too, and so do modules of TRL that are
    imported later. Modules of yours that imported a function before keep TRL's: ``report.held``
    lists them.

    Args:
        names: what to replace, of ``selective_log_softmax``, ``entropy_from_logits``,
            ``selective_log_softmax_and_entropy``, ``ChunkedLogProbFunction``,
            ``GRPOTrainer._get_per_token_logps_and_entropies``,
            ``RLOOTrainer._get_per_token_logps_and_entropies``, ``DPOTrainer._compute_loss`` and
            ``DPOTrainer.compute_ref_log_probs``. By default all of them that the installed TRL has;
            a name that it does not have is logged.
        share_prefixes: whether the last four, which share beginnings, are among them.

    Returns:
        A report of what was replaced, and where. It can be printed and iterated, and ``revert()``
        undoes the patch. As a context manager it reverts at the end of the block.

    Raises:
        ImportError: TRL is not installed.
        TypeError: ``names`` is a single string.
        ValueError: a name is unknown, or the installed TRL does not have it, or has it with other
            arguments; or it shares beginnings, which ``share_prefixes=False`` does not. Nothing is
            changed then.

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
            raise ValueError(f"names: expected no {name} with share_prefixes=False; leave out one")
        ours, problem = _ours(name)
        if problem is None:
            replacements.append(Replacement(_HOMES[name], name, ours))
        elif names is not None:
            raise ValueError(f"names: {problem}; leave {name} out")
        else:
            logger.warning("patch_trl: %s; left out", problem)
    if any(r.name == _HEAD for r in replacements) and hasattr(import_module(_UTILS), COMPACTS):
        from fusedrl.integrations.trl_head import gets_scored_rows

        replacements.append(Replacement(_UTILS, COMPACTS, gets_scored_rows, alone=True))
    return replace("trl", replacements)


def _ours(name: str) -> tuple[Any, str | None]:
    """The replacement of a name of TRL, or why there is none: it is missing or differs."""
    if find_spec("trl") is None:
        raise ImportError("trl: expected it to be installed; pip install trl")
    try:
        theirs = attrgetter(name)(import_module(_HOMES[name]))
    except Exception as error:
        module = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
        if isinstance(error, AttributeError) or module.startswith("trl."):
            return None, f"this TRL has no {_HOMES[name]}.{name}"
        # Only these trainers need it, such as a vLLM that does not load.
        if name in _SHARING:
            return None, f"{_HOMES[name]} cannot be imported: {type(error).__name__}: {error}"
        raise  # TRL itself needs it
    if name in _SHARING:
        from fusedrl.integrations.trl_trainers import sharing

        ours, same = sharing(theirs), _arguments(theirs)[:2] == ["self", "model"]
    elif name == _HEAD:
        # Its module keeps TRL's own function to fall back on, so it is loaded before the patch.
        from fusedrl.integrations.trl_head import ChunkedLogProbFunction as ours

        same = theirs is ours or _arguments(theirs.forward)[1:] == _arguments(ours.apply)
    else:
        ours = globals()[name]
        taken = _arguments(theirs)
        same = taken == _arguments(ours)[: len(taken)]
    return ours, None if same else f"{name} takes other arguments in this TRL"


def _arguments(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)
