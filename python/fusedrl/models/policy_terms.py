"""The terms of a policy's loss over token sequences under a causal language model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedrl.models.log_probs import causal_log_probs
from fusedrl.models.plan import at_kept_states, planned
from fusedrl.models.ranks import together
from fusedrl.models.split import Parts
from fusedrl.ops import _dispatch, _head
from fusedrl.ops.linear_policy_loss.autograd import Rows, Task, Terms, run
from fusedrl.ops.linear_policy_loss.losses import PolicyBatch, Surrogate, TermWeights
from fusedrl.ops.linear_policy_loss.reference import policy_terms

_OP = "linear_policy_loss"


def causal_policy_terms(
    model: Any,
    tokens: Tensor,
    lengths: Sequence[int],
    mask: Tensor | None,
    batch: PolicyBatch,
    weights: TermWeights,
    surrogate: Surrogate,
    *,
    max_tokens_per_forward: int | None = None,
    share_prefixes: bool = True,
    entropy: bool = False,
    model_kwargs: Mapping[str, Any] | None = None,
) -> Terms:
    """Objective, two KLs and entropy of packed sequences under a transformers causal LM.

    The decoder's hidden states go to :func:`fusedrl.linear_policy_loss`, which computes gradients
    in the forward pass. If the model has to compute its own logits (see :func:`causal_log_probs`),
    or there is no kernel for its dtype, the terms are computed from log-probs.

    Args:
        model: as in :func:`causal_log_probs`, and so are ``tokens``, ``lengths``, ``mask``,
            ``max_tokens_per_forward``, ``share_prefixes`` and ``model_kwargs``.
        batch: advantages and log-probs of other policies, ``[N]``, one for each token.
        weights: how much each token counts in each term, ``[N]``; 0 for a token that is not scored.
        surrogate: the term of the advantages.
        entropy: also compute the entropy of each kept token's distribution.

    Returns:
        :class:`Terms`: four differentiable values, each of which may get another upstream gradient,
        and log-probs and entropies ``[N]`` without gradient.

    Raises:
        TypeError, ValueError: as :func:`causal_log_probs`.
    """
    sequences: Any = (tokens, lengths, mask, max_tokens_per_forward, share_prefixes, model_kwargs)
    with together("policy terms", model):
        with planned(model, *sequences) as plan:
            parts = plan.capabilities.parts
            if parts is not None and _has_kernel(parts, plan.capabilities.autocast):
                places = plan.places

                def terms(hidden: Tensor) -> tuple[Tensor, ...]:
                    ids = plan.tokens[places].to(hidden.device)
                    task = _task(hidden, ids, places, parts, batch, weights, surrogate, entropy)
                    return run(task, separate=True)

                values, *columns = at_kept_states(plan, parts, terms)
                return Terms(values, *map(plan.placed, columns))
        scored = causal_log_probs(
            model,
            tokens,
            lengths,
            mask,
            max_tokens_per_forward=max_tokens_per_forward,
            share_prefixes=share_prefixes,
            entropy=entropy,
            model_kwargs=model_kwargs,
        )
        log_probs, entropies = scored
        here = log_probs.device
        values = policy_terms(
            log_probs,
            entropies,
            PolicyBatch(*_moved(batch, here)),
            TermWeights(*_moved(weights, here)),
            surrogate,
        )
        entropies = torch.zeros_like(log_probs) if entropies is None else entropies
        return Terms(values, log_probs.detach(), entropies.detach())


def _has_kernel(parts: Parts, autocast: torch.dtype | None) -> bool:
    if parts.sharded:  # no terms are known before the ranks have put their parts together
        return False
    weight = parts.weight
    dtype = weight.dtype if autocast is None or weight.dtype == torch.float64 else autocast
    return _dispatch.choose("auto", _OP, weight.device, dtype) not in ("reference", "meta")


def _task(
    hidden: Tensor,
    tokens: Tensor,
    places: Tensor,
    parts: Parts,
    batch: PolicyBatch,
    weights: TermWeights,
    surrogate: Surrogate,
    entropy: bool,
) -> Task:
    """The task of the op, whose rows are the kept tokens."""
    head = _head.prepare(
        "", hidden, parts.weight, parts.options["bias"], parts.scale, parts.softcap
    )
    device = hidden.device
    dtype = _dispatch.result_dtype(hidden)
    one = _dispatch.temperature_tensor(1.0, device, device.type)
    return Task(
        head,
        Rows(tokens, None, None, False, one),
        PolicyBatch(*_moved(batch, device, places, dtype)),
        TermWeights(*_moved(weights, device, places, dtype)),
        surrogate,
        entropy,
    )


def _moved(
    columns: Sequence[Tensor | None],
    device: torch.device,
    places: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[Any]:
    """Columns of tokens on ``device``, of those at ``places`` if given."""
    for column in columns:
        if column is not None and places is not None:
            column = column[places.to(column.device)]
        yield None if column is None else column.to(device, dtype)
