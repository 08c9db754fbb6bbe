"""What a model allows: a list of types, and one comparison with the model's own logits.

The decoder and the head that a model names may not be the whole model. It may mix the sequences
that share a row, and padding or a longer call may change its numbers. Each of these would give
log-probs that look plausible and are wrong. So only types that are tested are taken apart
(``split.py``), and only if they agree with their own logits where they are first used. Others are
slow and right.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from fusedrl.compat.torch import hooks_of, is_compiled_function
from fusedrl.models.comparison import Verdict, compare_batch, compare_parts
from fusedrl.models.lengths import shared_below
from fusedrl.models.ranks import FROM_STATES, UNKNOWN, Step
from fusedrl.models.split import (
    Parts,
    autocast_of,
    compiler_of,
    device_of,
    fits,
    foreign_in,
    modules_of,
    parts_of,
    vocabulary_of,
)

logger = logging.getLogger("fusedrl")

# Rounding may send a token to other experts, which looks as if sequences in a row mixed. They are
# said to do so if they do with the tokens from each of these ids.
FIRST_IDS = 0, 13
RATES = "drop", "jitter", "noise"  # in names of how much is random
KEPT = 8  # verdicts on a model that alternates between states, such as training and evaluation


class Capabilities(NamedTuple):
    """How the log-probs of a model can be computed.

    Args:
        parts: decoder and head, of which sequences share a row; ``None`` if the model is asked for
            its own logits.
        together: whether several sequences share a forward pass.
        below: sequences share a forward pass only if they are shorter than this; longer ones would
            change the results of others in it. ``None`` for no such limit.
        autocast: the dtype of autocast in which the parts compute what the model does.
        shares: whether sequences in a row may have a common beginning once.
    """

    parts: Parts | None
    together: bool
    below: int | None
    autocast: torch.dtype | None
    shares: bool


_verdicts: WeakKeyDictionary[nn.Module, list[tuple[Any, Verdict]]] = WeakKeyDictionary()
_warned: set[tuple[type, str]] = set()


def known_capabilities(model: Any, kwargs: Mapping[str, Any] | None = None) -> Capabilities | None:
    """What is known of a model, without a forward pass of it; ``None`` if it has to be compared.

    Args:
        model: the model, or a module around it.
        kwargs: further arguments of the model's forward pass, used when its logits are needed.
    """
    parts, below, now = _look_at(model, fits(model), kwargs)
    found = next((verdict for then, verdict in _verdicts.get(model, ()) if then == now), None)
    return None if found is None else _allowed(parts, below, found)


def capabilities_of(
    model: Any,
    known_ids: int = 1,
    kwargs: Mapping[str, Any] | None = None,
    step: Step | None = None,
) -> Capabilities:
    """What is known of a model, or what a comparison with its own logits shows; log why it is slow.

    Args:
        model: the model, or a module around it.
        known_ids: ids in ``[0, known_ids)`` are used if the model does not say its vocabulary.
        kwargs: further arguments of the model's forward pass, used when its logits are needed.
        step: in which all ranks of the model compare, whatever each knows, and agree on a way.

    Raises:
        TypeError: the model is an encoder, whose tokens see later ones.
    """
    known = known_capabilities(model, kwargs) if step is None else None
    if known is not None:
        return known
    why = fits(model)
    _warn(model, why)
    parts, below, now = _look_at(model, why, kwargs)
    step = step or Step(None)
    whole, _ = step.agree(ways=UNKNOWN if parts is None else FROM_STATES)
    if whole or parts is None:
        ids = vocabulary_of(model) or known_ids
        verdict = compare_batch(model, device_of(model), ids, kwargs or {})
    else:
        verdict = _compared_parts(parts, below, step)
    _warn(model, verdict.why)
    if verdict.telling:
        _verdicts[model] = [(now, verdict), *_verdicts.get(model, ())][:KEPT]
    return _allowed(parts, below, verdict)


def _allowed(parts: Parts | None, below: int | None, verdict: Verdict) -> Capabilities:
    same = verdict.why is None
    parts = parts if same and verdict.splits else None
    return Capabilities(parts, same, below, verdict.autocast, same and verdict.shares)


def _look_at(
    model: Any, why: str | None, kwargs: Mapping[str, Any] | None
) -> tuple[Parts | None, int | None, Any]:
    """A model's parts, the length that matters to it, and what must be the same for a verdict."""
    parts = parts_of(model) if why is None else None
    config = getattr(parts.base if parts else model, "config", None)
    autocast = autocast_of(parts.weight.device if parts else device_of(model))
    scale = parts and parts.scale
    return (
        parts,
        shared_below(config),
        (*(_state(model), _copied(config), parts is None, scale, autocast, sorted(kwargs or {})),),
    )


def _state(model: nn.Module) -> list[Any]:
    """The modules of a model, their types, forwards, modes and hooks, none of them kept alive.

    A verdict holds while they, the configuration and autocast are as they were. What has to hold of
    the model around its decoder is looked at in each call (``split``), and the values of weights
    do not matter.
    """
    modules = modules_of(model)
    kinds = dict.fromkeys(map(type, modules))
    found: list[Any] = [ref(call) for kind in kinds for call in (kind.forward, kind.__call__)]
    found += map(ref, modules)
    for module in modules:
        known, (before, behind) = vars(module), hooks_of(module)
        own = known.get("forward")
        kind = ref(type(module)), own and ref(own), known.get("is_causal")
        found.append((*kind, module.training, *before, *behind))
    return found


def _copied(value: Any) -> Any:
    """A copy of settings to compare with."""
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(_copied, value))
    return _copied(vars(value)) if hasattr(value, "model_type") else value


def _compared_parts(parts: Parts, below: int | None, step: Step) -> Verdict:
    """A verdict that all ranks share."""
    stranger = foreign_in(parts.decoder)
    strange, _ = step.agree(ways=FROM_STATES if stranger is None else UNKNOWN)
    if strange:  # weights that are 0 at first would hide what it does
        return Verdict(f"{stranger or 'a forward or a hook on another rank'} is not its library's")
    verdict = Verdict("its numbers differ on another rank")
    for first in FIRST_IDS:
        try:
            found = compare_parts(parts, below, first)
        except Exception as error:  # which may not happen again
            found = Verdict(f"trying it raised {error!r}", telling=False)
        differs, _ = step.agree(ways=FROM_STATES if found.why is None else UNKNOWN)
        if not differs:
            return found
        verdict = found if found.why else verdict
    return verdict


def _warn(model: Any, why: str | None) -> None:
    if why is not None and (type(model), why) not in _warned:
        _warned.add((type(model), why))
        kind = type(model).__name__
        logger.warning("%s: %s; its log-probs are computed from all its logits", kind, why)


def may_share(parts: Parts) -> bool:
    """Whether a model that can share beginnings may do so now, which no verdict knows.

    Dropout would be drawn once for all sequences, and a compiled decoder be compiled once more for
    each tree.
    """
    for module in modules_of(parts.model):
        if is_compiled_function(module.forward) or compiler_of(module) is not None:
            return False
        if module.training and _drops(module):
            return False
    return parts.decode is parts.decoder


def _drops(module: nn.Module) -> bool:
    """Whether a module in training changes values at random, as far as its names tell."""
    kinds = " ".join(kind.__name__ for kind in type(module).__mro__)
    rates = [(kinds + name, x) for name, x in vars(module).items()]
    rates += getattr(getattr(module, "config", None), "__dict__", {}).items()
    return any(
        type(x) in (int, float) and x > 0 and any(word in name.lower() for word in RATES)
        for name, x in rates
    )
