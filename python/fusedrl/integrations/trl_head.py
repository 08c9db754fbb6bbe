"""Replacement for the LM head of TRL's trainers, from hidden states to log-probs."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from trl.kernels import chunked_logprob  # pyright: ignore[reportMissingImports]

from fusedrl.compat.trl import COMPACTS
from fusedrl.logs import warn_once
from fusedrl.ops import _dispatch
from fusedrl.ops.linear_token_log_probs import linear_token_log_probs
from fusedrl.ops.token_log_probs import TokenLogProbs

_SUPPORTED = ("entropy", "mean_logits", "is_top1")  # supported in addition to the log-probs
_ROUNDING = 1e-3  # nats; well above the errors of log-probs and entropies
_CHUNK = 2**22  # logits for each chunk when classes are compared
_TRL_FUNCTION = (chunked_logprob.ChunkedLogProbFunction,)


class ChunkedLogProbFunction:
    """Replaces TRL's autograd function of this name, of which only ``apply`` is used."""

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = chunked_logprob.OPTIONAL_OUTPUTS,
    ) -> tuple[Any, ...]:
        """Per-token results of ``hidden @ weight.T``: a tuple in TRL's order.

        Args:
            hidden: ``[N, H]``.
            weight: ``[V, H]``, converted to the dtype of ``hidden``, or to autocast's.
            bias: ``[V]``.
            targets: integer classes, ``[N]``.
            temperature: positive divisor of the logits.
            chunk_size: ignored.
            final_logit_softcapping: softcap of the logits.
            logit_scale: factor of the logits.
            outputs: which of the optional results to compute.

        Returns:
            Log-probs, entropy, ``log(sum p^2)``, mean logit, and whether the target is the most
            likely class, each ``[N]``, or ``None`` if not in ``outputs``. The first two are
            differentiable. For anything that this op does not support, TRL's function runs.
        """
        reason = _fallback_reason(hidden, weight, final_logit_softcapping, logit_scale, outputs)
        if reason is not None:
            warn_once(f"trl: {reason}; falling back to TRL's ChunkedLogProbFunction")
            return _TRL_FUNCTION[0].apply(
                *(hidden, weight, bias, targets, temperature, chunk_size),
                *(final_logit_softcapping, logit_scale, outputs),
            )
        kind = hidden.device.type
        autocast = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if autocast else hidden.dtype
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
        with torch.autocast(kind, enabled=False):
            results = linear_token_log_probs(
                hidden,
                weight,
                targets,
                bias=bias,
                softcap=final_logit_softcapping,
                scale=logit_scale,
                temperature=temperature,
                entropy="entropy" in outputs or "is_top1" in outputs,
            )
            mean, top = None, None
            if "mean_logits" in outputs:
                mean = _mean_logits(hidden, weight, bias) * (logit_scale / temperature)
            if "is_top1" in outputs:
                top = _is_top1(hidden, weight, bias, targets, results)
        entropy = results.entropy if "entropy" in outputs else None
        return results.log_probs, entropy, None, mean, top


def gets_scored_rows(device: torch.device) -> bool:
    """Whether TRL passes only the scored positions; its own head may need fixed shapes."""
    return device.type in _dispatch.LIBRARY or getattr(chunked_logprob, COMPACTS)(device)


def _fallback_reason(
    hidden: Tensor,
    weight: Tensor,
    softcap: float | None,
    scale: float,
    outputs: tuple[str, ...],
) -> str | None:
    """The reason to fall back to TRL's function, or ``None``."""
    unsupported = [name for name in outputs if name not in (*_SUPPORTED, "log_probs")]
    if unsupported:
        return f"no fused {', '.join(unsupported)}"
    if softcap is not None and "mean_logits" in outputs:
        return "no fused mean_logits for a model with a softcap"
    if scale <= 0:
        return f"no fused head for logit_scale={scale}"
    if hasattr(weight, "ds_id"):
        return "the head is sharded by DeepSpeed ZeRO-3, and TRL's function gathers it"
    if hidden.device.type not in _dispatch.LIBRARY:
        return f"no compiled kernel for {hidden.device.type}"
    if hidden.dtype not in _dispatch.KERNEL_DTYPES:
        return f"no compiled kernel for {hidden.dtype}"
    return None


@torch.no_grad()
def _mean_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The mean logit over the vocabulary: the product with the mean row of the weight."""
    mean = hidden.float() @ weight.mean(0, dtype=torch.float32)
    return mean if bias is None else mean + bias.mean(dtype=torch.float32)


@torch.no_grad()
def _is_top1(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, results: TokenLogProbs
) -> Tensor:
    """Whether the target is the argmax of the logits (the first one, if several are equal).

    A target with probability above 1/2 is. The entropy is the mean of ``-log p``, so the argmax has
    a log-prob of at least ``-entropy``, and a target below it is not. Logits are computed again
    only for rows in between.
    """
    log_probs, entropy = results
    assert entropy is not None
    certain = log_probs > math.log(0.5) + _ROUNDING
    rows = (~certain & (log_probs >= -entropy - _ROUNDING)).nonzero().squeeze(-1)
    return certain.index_put((rows,), _argmax(hidden[rows], weight, bias) == targets[rows])


def _argmax(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The argmax of the logits, which scale and softcap do not change."""
    hidden = hidden.float()
    best = hidden.new_full((len(hidden),), -torch.inf)
    classes = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
    chunk = min(8192, max(256, _CHUNK // max(1, len(hidden))))
    for first in range(0, len(weight), chunk):
        logits = hidden @ weight[first : first + chunk].float().T
        if bias is not None:
            logits += bias[first : first + chunk]
        value, index = logits.max(-1)
        classes = torch.where(value > best, first + index, classes)
        best = torch.maximum(value, best)
    return classes
