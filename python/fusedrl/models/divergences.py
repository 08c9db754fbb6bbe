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
    classes: int | None = None,
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
        direction, classes: as in :func:`fusedrl.exact_kl`, the latter for two models alone.

    Returns:
        float32 ``[N]`` (float64 for float64 models), and 0 for the first token of every sequence.

    Raises:
        TypeError, ValueError: as :func:`causal_log_probs`; or a model does not come apart into
            decoder and head, or has a head that is spread over ranks.
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
    """What two models give each token, ``[N]`` in nats, and 0 for those that are not scored.

    ``kl`` has the divergences in the directions that were asked for.
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

    Each model computes its hidden states once, and logits exist a tile at a time. Where one of the
    models does not come apart into decoder and head, both compute their logits, a sequence at a
    time. No gradient reaches a model.

    Args:
        policy, reference: models of one vocabulary, as in :func:`causal_log_probs`, and so are
            ``tokens``, ``lengths``, ``mask`` and ``max_tokens_per_forward``.
        directions, classes: as in :func:`fusedrl.exact_kl`, any number of directions.
        temperature: positive divisor of both models' logits.

    Raises:
        TypeError, ValueError: as :func:`causal_log_probs`.
    """
    batch = tokens, lengths, mask, max_tokens_per_forward, True, None
    asked = directions, temperature, classes
    with together("scores", policy, reference):
        columns = _from_states(policy, reference, batch, *asked)
        if columns is None:
            columns = _from_logits(policy, reference, batch, *asked)
    return Scores(TokenLogProbs(*columns[:2]), TokenLogProbs(*columns[2:4]), tuple(columns[4:]))


def _from_states(
    policy: Any,
    reference: Any,
    batch: tuple[Any, ...],
    directions: Sequence[str],
    temperature: float,
    classes: int | None,
) -> list[Tensor] | None:
    """The columns of :class:`Scores`; ``None`` where a model does not come apart."""
    found = _states_of(reference, batch, lambda hidden, *_: (hidden,))
    if found is None or found[1].gathered:
        return None
    (states,), ref = found

    def score(hidden: Tensor, parts: Parts, places: Tensor) -> tuple[Tensor, ...]:
        heads = _pair(hidden, parts, states[places.to(states.device)], ref, classes)
        theirs = {name[4:]: x for name, x in heads.items() if name.startswith("ref_")}
        rows = {"tokens": batch[0].cpu()[places].to(hidden.device), "temperature": temperature}
        columns: list[Any] = []
        for side in {name: heads[name] for name in theirs}, theirs:
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
    """The columns of :class:`Scores`, from all logits of a sequence at a time."""
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
        # Prompts that are learned have logits in front.
        answers = (m(input_ids=tokens[at][None].to(device_of(m))) for m in (policy, reference))
        sides = [answer.logits[0, -length:, :classes].to(device) for answer in answers]
        found: list[Any] = []
        for side in sides:
            found += token_log_probs(side, ids, entropy=True, **rows)
        found += [exact_kl(*sides, direction=d, **rows).kl for d in directions]
        columns[:, at] = torch.stack(found)
    return list(columns)


def _pair(
    hidden: Tensor, parts: Parts, ref_hidden: Tensor, ref: Parts, classes: int | None = None
) -> dict[str, Any]:
    """The arguments of :func:`fusedrl.linear_exact_kl`, of one dtype and device."""
    ours = {"hidden": hidden, "weight": parts.weight, **parts.options}
    theirs = {"hidden": ref_hidden, "weight": ref.weight, **ref.options}
    heads = {**ours, **{f"ref_{name}": x for name, x in theirs.items()}}
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
    """What ``function`` makes of the states of kept tokens, ``[N, ...]`` each, and the parts.

    ``None`` if the decoder and the head of the model cannot be called by themselves.
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
            f"{name}: expected a model whose decoder and head can be called by themselves, "
            f"got {type(model).__name__}; use the k3 estimate with it"
        )
    return found
