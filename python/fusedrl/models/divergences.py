"""Divergences from a teacher of token sequences under a causal language model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedrl.models.plan import at_kept_states, planned
from fusedrl.models.ranks import together
from fusedrl.models.split import Parts
from fusedrl.ops import linear_exact_kl, linear_top_k_kl


class Classes(NamedTuple):
    """A teacher that is known by a few classes of each token, ``[N, k]`` both."""

    ids: Tensor
    log_probs: Tensor


def causal_divergences(
    model: Any,
    teacher: Any,
    tokens: Tensor,
    lengths: Sequence[int],
    mask: Tensor | None = None,
    *,
    direction: str = "reverse",
    max_tokens_per_forward: int | None = None,
    share_prefixes: bool = True,
) -> Tensor:
    """The divergence between two distributions of every kept token of packed sequences.

    Logits exist a tile at a time, for kept tokens alone (see :func:`fusedrl.linear_exact_kl` and
    :func:`fusedrl.linear_top_k_kl`). No gradient reaches the teacher.

    Args:
        model: the student, as in :func:`causal_log_probs`, and so are ``tokens``, ``lengths``,
            ``mask``, ``max_tokens_per_forward`` and ``share_prefixes``.
        teacher: a model with the student's vocabulary, or :class:`Classes`.
        direction: as in :func:`fusedrl.exact_kl`.

    Returns:
        float32 ``[N]`` (float64 for float64 models), and 0 for the first token of every sequence.

    Raises:
        TypeError, ValueError: as :func:`causal_log_probs`; or a model does not come apart into
            decoder and head, or has a head that is spread over ranks.
    """
    batch = tokens, lengths, mask, max_tokens_per_forward, share_prefixes, None

    def from_classes(hidden: Tensor, parts: Parts, places: Tensor) -> Tensor:
        ids, log_probs = (x[places.to(x.device)].to(hidden.device) for x in teacher)
        kind = {"direction": direction, **parts.options}
        return linear_top_k_kl(hidden, parts.weight, ids, log_probs, **kind)

    with together("divergences", model, teacher):
        if isinstance(teacher, Classes):
            return _scored("model", model, batch, from_classes)[0]
        with torch.no_grad():
            states, ref = _scored("teacher", teacher, batch, lambda hidden, *_: hidden)

        def from_heads(hidden: Tensor, parts: Parts, places: Tensor) -> Tensor:
            ours = {"hidden": hidden, "weight": parts.weight, **parts.options}
            rows = states[places.to(states.device)]
            theirs = {"hidden": rows, "weight": ref.weight, **ref.options}
            heads = {**ours, **{f"ref_{name}": x for name, x in theirs.items()}}
            dtype = torch.promote_types(hidden.dtype, states.dtype)
            for name, x in heads.items():
                if isinstance(x, Tensor):
                    x = x.detach() if name.startswith("ref_") else x
                    heads[name] = x.to(hidden.device, dtype)
            return linear_exact_kl(**heads, direction=direction).kl

        return _scored("model", model, batch, from_heads)[0]


def _scored(
    name: str,
    model: Any,
    batch: tuple[Any, ...],
    function: Callable[[Tensor, Parts, Tensor], Tensor],
) -> tuple[Tensor, Parts]:
    """What ``function`` makes of the states of kept tokens, ``[N, ...]``, and the model's parts."""
    with planned(model, *batch) as plan:
        parts = plan.capabilities.parts
        if parts is None or parts.sharded or (name == "teacher" and parts.gathered):
            raise ValueError(
                f"{name}: expected a model whose decoder and head can be called by themselves, "
                f"got {type(plan.model).__name__}; use the k3 estimate with it"
            )
        places = plan.places
        (values,) = at_kept_states(plan, parts, lambda hidden: (function(hidden, parts, places),))
        return plan.placed(values), parts
