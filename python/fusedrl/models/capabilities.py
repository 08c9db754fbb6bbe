"""What a model allows: a list of types, and one comparison with the model's own logits.

The decoder and the head that a model names may not be the whole model. It may mix the sequences
that share a row, and padding or a longer call may change its numbers. Each of these would give
log-probs that look plausible and are wrong. So only types that are tested are taken apart, and only
if they agree with their own logits where they are used. Others are slow and right.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fusedrl.compat.torch import is_compiled_function
from fusedrl.compat.transformers import attention_of
from fusedrl.models.comparison import Verdict, Way, compare_batch, compare_parts
from fusedrl.models.forwards import SHARING
from fusedrl.models.lengths import shared_below
from fusedrl.models.ranks import Step
from fusedrl.models.signature import modules_of, signature
from fusedrl.models.split import (
    CannotSplit,
    Parts,
    autocast_of,
    chain_of,
    compiler_of,
    device_of,
    split,
    vocabulary_of,
)

logger = logging.getLogger("fusedrl")

# Rounding may send a token to other experts, which looks as if sequences in a row mixed. They are
# said to do so if they do with the tokens from each of these ids.
FIRST_IDS = 0, 13
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

    What is known holds while the :func:`fusedrl.models.signature.signature` is the same.

    Args:
        model: the model, or a module around it.
        kwargs: further arguments of the model's forward pass, used when its logits are needed.
    """
    parts, below, now = _look_at(model, kwargs or {})
    found = next((verdict for key, verdict in _verdicts.get(model, ()) if key == now), None)
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
    parts, below, key = _look_at(model, kwargs or {})
    verdict = Verdict(Way.PADDED)
    if parts is not None:
        verdict = _compared_parts(parts, below, step or Step(None))
    if verdict.why:
        _warn(model, verdict.why)
    if verdict.way == Way.PADDED:
        verdict = _compared_batch(model, known_ids, kwargs or {})
    if verdict.telling:  # zeros, such as those of a new head, tell nothing
        _verdicts[model] = [(key, verdict), *_verdicts.get(model, ())][:KEPT]
    return _allowed(parts, below, verdict)


def _allowed(parts: Parts | None, below: int | None, verdict: Verdict) -> Capabilities:
    parts = parts if verdict.way == Way.PACKED else None
    together = verdict.way != Way.ALONE
    return Capabilities(parts, together, below, verdict.autocast, verdict.shares)


def _look_at(model: Any, kwargs: Mapping[str, Any]) -> tuple[Parts | None, int | None, Any]:
    """A model's parts, the length that matters to it, and what must be the same for a verdict."""
    modules = modules_of(model)
    below = shared_below(modules)
    try:
        parts = split(model)
    except CannotSplit as why:
        _warn(model, str(why))
        key = signature(modules, (), below, sorted(kwargs), autocast_of(device_of(model)))
        return None, below, key
    # DDP counts its steps in attributes.
    ends = [m for m in chain_of(model) if not isinstance(m, DistributedDataParallel)]
    autocast = autocast_of(parts.weight.device)
    ends += [parts.decoder, parts.head]
    return parts, below, signature(modules, ends, below, "parts", autocast)


def _compared_parts(parts: Parts, below: int | None, step: Step) -> Verdict:
    """A verdict that all ranks share."""
    verdict = Verdict(Way.ALONE)
    for first in FIRST_IDS:
        try:
            verdict = compare_parts(parts, below, first)
        except Exception as error:  # its forward takes other arguments than those of transformers
            verdict = Verdict(Way.PADDED, f"trying it raised {error!r}")
        way = Way(step.agree(passes=verdict.way)[1])
        if way != verdict.way:
            verdict = Verdict(way, verdict.why or "it is so on another rank")
        if way != Way.ALONE:
            break
    return verdict


def _compared_batch(model: Any, known_ids: int, kwargs: Mapping[str, Any]) -> Verdict:
    try:
        vocabulary = vocabulary_of(model) or known_ids
        verdict = compare_batch(model, device_of(model), vocabulary, kwargs)
    except Exception:  # the caller sees the error again when the model really runs
        return Verdict(Way.ALONE, telling=False)
    if verdict.ahead and getattr(getattr(model, "config", None), "is_decoder", None) is False:
        raise TypeError(
            f"model: expected a causal language model, got {type(model).__name__}, whose logits "
            "see later tokens; load a causal one, or this one with is_decoder=True"
        )
    if verdict.why:
        _warn(model, verdict.why)
    return verdict


def _warn(model: Any, why: str) -> None:
    if (type(model), why) not in _warned:
        _warned.add((type(model), why))
        kind = type(model).__name__
        logger.warning("%s: %s; its log-probs are computed from all its logits", kind, why)


def sharing_parts(model: Any) -> Parts | None:
    """Decoder and head of a model whose type and attention can share beginnings; it logs nothing.

    ``None`` for others, and for a model that has to be gathered for each forward pass.
    """
    try:
        parts = split(model)
    except CannotSplit:
        return None
    return parts if attention_of(parts.config) in SHARING and not parts.gathered else None


def may_share(model: nn.Module, parts: Parts) -> bool:
    """Whether a model that can share beginnings may do so now, which no verdict knows.

    Dropout would be drawn once for all sequences, and a compiled decoder be compiled once more for
    each tree.
    """
    modules = modules_of(model)
    if parts.decode is not parts.decoder or any(map(_is_compiled, modules)):
        return False
    return not any(module.training and _drops(module) for module in modules)


def _is_compiled(module: nn.Module) -> bool:
    """Whether a module is compiled as itself, or its forward is."""
    return is_compiled_function(module.forward) or compiler_of(module) is not None


def _drops(module: nn.Module) -> bool:
    """Whether a module in training sets values to 0 at random, as far as its names tell."""
    kinds = " ".join(kind.__name__ for kind in type(module).__mro__)
    config = getattr(getattr(module, "config", None), "__dict__", {})
    named = [(kinds + name, x) for name, x in vars(module).items()]
    rates = [x for name, x in (*named, *config.items()) if "drop" in name.lower()]
    return any(type(x) in (int, float) and x > 0 for x in rates)
