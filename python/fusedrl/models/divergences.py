"""Divergences of token sequences between two causal language models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedrl.models.plan import at_kept_states, check_context, check_vocabulary, planned
from fusedrl.models.ranks import together
from fusedrl.models.split import Parts, device_of, vocabulary_of
from fusedrl.ops import (
    exact_kl,
    linear_exact_kl,
    linear_token_log_probs,
    linear_top_k_kl,
    token_log_probs,
)
from fusedrl.ops.token_log_probs import TokenLogProbs


class Classes(NamedTuple):
    """A teacher given by a few classes of each token and their log-probs, both ``[N, k]``."""

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
    classes: int | None = None,
    max_tokens_per_forward: int | None = None,
    share_prefixes: bool = True,
) -> Tensor:
    """The divergence between student and teacher for every kept token of packed sequences.

    Logits exist one tile at a time, only for kept tokens (see :func:`fusedrl.linear_exact_kl` and
    :func:`fusedrl.linear_top_k_kl`). The teacher gets no gradient.

    Args:
        model: the student; this, ``tokens``, ``lengths``, ``mask``, ``max_tokens_per_forward`` and
            ``share_prefixes`` are as in :func:`causal_log_probs`.
        teacher: a model with the student's vocabulary, or :class:`Classes`.
        direction, classes: as in :func:`fusedrl.exact_kl`; ``classes`` only for two models.

    Returns:
        float32 ``[N]`` (float64 for float64 models), and 0 for the first token of every sequence.

    Raises:
        TypeError, ValueError: as :func:`causal_log_probs`; or a model cannot be split into decoder
            and head, or its head is sharded over ranks.
    """
    batch = tokens, lengths, mask, max_tokens_per_forward, share_prefixes, None

    def from_classes(hidden: Tensor, parts: Parts, places: Tensor) -> tuple[Tensor]:
        ids, log_probs = (x[places.to(x.device)].to(hidden.device) for x in teacher)
        kind = {"direction": direction, **parts.options}
        return (linear_top_k_kl(hidden, parts.weight, ids, log_probs, **kind),)

    with together("divergences", model, teacher):
        if isinstance(teacher, Classes):
            return _required("model", model, _states_of(model, batch, from_classes))[0][0]
        with torch.no_grad():
            found = _states_of(teacher, batch, lambda hidden, *_: (hidden,))
        (states,), ref = _required("teacher", teacher, found)

        def from_heads(hidden: Tensor, parts: Parts, places: Tensor) -> tuple[Tensor]:
            heads = _pair(hidden, parts, states[places.to(states.device)], ref)
            return (linear_exact_kl(**heads, direction=direction, classes=classes).kl,)

        return _required("model", model, _states_of(model, batch, from_heads))[0][0]


class Scores(NamedTuple):
    """Scores of each token under two models, ``[N]`` in nats; 0 for tokens that are not scored.

    ``kl`` has the divergences in the requested directions.
    """

    policy: TokenLogProbs
    reference: TokenLogProbs
    kl: tuple[Tensor, ...]


@torch.no_grad()
def causal_scores(
    policy: Any,
    reference: Any,
    tokens: Tensor,
    lengths: Sequence[int],
    mask: Tensor | None = None,
    *,
    directions: Sequence[str] = ("reverse",),
    temperature: float = 1.0,
    classes: int | None = None,
    max_tokens_per_forward: int | None = None,
) -> Scores:
    """Log-probs, entropies and exact divergences of every kept token under two models.

    Each model computes its hidden states once, and logits exist one tile at a time. If a model
    cannot be split into decoder and head, both compute full logits, one sequence at a time. Neither
    gets a gradient.

    Args:
        policy, reference: models with one vocabulary; these, ``tokens``, ``lengths``, ``mask`` and
            ``max_tokens_per_forward`` are as in :func:`causal_log_probs`.
        directions, classes: as in :func:`fusedrl.exact_kl`, with any number of directions.
        temperature: positive divisor of both models' logits.

    Raises:
        TypeError, ValueError: as :func:`causal_log_probs`.
    """
    batch = tokens, lengths, mask, max_tokens_per_forward, True, None
    options = directions, temperature, classes
    with together("scores", policy, reference):
        columns = _from_states(policy, reference, batch, *options)
        if columns is None:
            columns = _from_logits(policy, reference, batch, *options)
    return Scores(TokenLogProbs(*columns[:2]), TokenLogProbs(*columns[2:4]), tuple(columns[4:]))


def _from_states(
    policy: Any,
    reference: Any,
    batch: tuple[Any, ...],
    directions: Sequence[str],
    temperature: float,
    classes: int | None,
) -> list[Tensor] | None:
    """The columns of :class:`Scores`; ``None`` if a model cannot be split."""
    found = _states_of(reference, batch, lambda hidden, *_: (hidden,))
    if found is None or found[1].gathered:
        return None
    (states,), ref = found

    def score(hidden: Tensor, parts: Parts, places: Tensor) -> tuple[Tensor, ...]:
        heads = _pair(hidden, parts, states[places.to(states.device)], ref, classes)
        ref_head = {name[4:]: x for name, x in heads.items() if name.startswith("ref_")}
        rows = {"tokens": batch[0].cpu()[places].to(hidden.device), "temperature": temperature}
        columns: list[Any] = []
        for side in {name: heads[name] for name in ref_head}, ref_head:
            columns += linear_token_log_probs(**side, **rows, entropy=True)
        kl = [linear_exact_kl(**heads, direction=d, temperature=temperature).kl for d in directions]
        return (*columns, *kl)

    found = _states_of(policy, batch, score)
    return None if found is None else found[0]


def _from_logits(
    policy: Any,
    reference: Any,
    batch: tuple[Any, ...],
    directions: Sequence[str],
    temperature: float,
    classes: int | None,
) -> list[Tensor]:
    """The columns of :class:`Scores`, from the full logits of one sequence at a time."""
    tokens, lengths, mask = batch[:3]
    for model in (policy, reference):
        check_context(model, lengths)
        check_vocabulary(tokens, vocabulary_of(model))
    kept = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    device = device_of(policy)
    columns = torch.zeros(4 + len(directions), len(tokens), device=device)
    start = 0
    for length in lengths:
        at, start = slice(start, start + length), start + length
        if not kept[at][1:].any():
            continue
        ids, rows = tokens[at].to(device), {"mask": kept[at].to(device), "shift": True}
        rows |= {"offsets": torch.tensor([0, length], device=device), "temperature": temperature}
        # The last rows, as learned prompts have logits in front.
        outputs = (m(input_ids=tokens[at][None].to(device_of(m))) for m in (policy, reference))
        sides = [output.logits[0, -length:, :classes].to(device) for output in outputs]
        found: list[Any] = []
        for side in sides:
            found += token_log_probs(side, ids, entropy=True, **rows)
        found += [exact_kl(*sides, direction=d, **rows).kl for d in directions]
        columns[:, at] = torch.stack(found)
    return list(columns)


def _pair(
    hidden: Tensor, parts: Parts, ref_hidden: Tensor, ref: Parts, classes: int | None = None
) -> dict[str, Any]:
    """The arguments of :func:`fusedrl.linear_exact_kl`, converted to one dtype and device."""
    heads: dict[str, Any] = {"hidden": hidden, "weight": parts.weight, **parts.options}
    ref_head = {"hidden": ref_hidden, "weight": ref.weight, **ref.options}
    heads |= {f"ref_{name}": x for name, x in ref_head.items()}
    dtype = torch.promote_types(hidden.dtype, ref_hidden.dtype)
    for name, x in heads.items():
        if isinstance(x, Tensor):
            x = x.detach() if name.startswith("ref_") else x
            x = x if name.endswith("hidden") else x[:classes]
            heads[name] = x.to(hidden.device, dtype)
    return heads


def _states_of(
    model: Any,
    batch: tuple[Any, ...],
    function: Callable[[Tensor, Parts, Tensor], tuple[Tensor, ...]],
) -> tuple[list[Tensor], Parts] | None:
    """``function`` applied to the states of kept tokens, as ``[N, ...]``, and the parts.

    ``None`` if the model cannot be split into decoder and head, or its head is sharded.
    """
    with planned(model, *batch) as plan:
        parts = plan.capabilities.parts
        if parts is None or parts.sharded:
            return None
        places = plan.places
        values = at_kept_states(plan, parts, lambda hidden: function(hidden, parts, places))
        return [plan.placed(x) for x in values], parts


def _required(
    name: str, model: Any, found: tuple[list[Tensor], Parts] | None
) -> tuple[list[Tensor], Parts]:
    if found is None or (name == "teacher" and found[1].gathered):
        raise ValueError(
            f"{name}: expected a model that can be split into decoder and head, got "
            f"{type(model).__name__}; use the k3 estimate with it"
        )
    return found
