"""What a model allows, found out once for each model by running it on a few tokens.

The decoder and the head that a model names may not be the whole model. It may mix the sequences
that share a row, and padding or a longer call may change its numbers. Each of these would give
log-probs that look plausible and are wrong. So each is probed, and if a model does not allow one,
its log-probs are computed in a slower way that is right.
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
from fusedrl.models.forwards import SHARING
from fusedrl.models.lengths import shared_below
from fusedrl.models.probes import ProbeResult, probe_parts, probe_whole
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

# Types of decoders in which attention alone mixes tokens, each tested in tests/models with
# sequences longer than its windows. A probe is too short to show what a window does.
PACKABLE = frozenset(
    (
        "cohere",
        "gemma",
        "gemma2",
        "gemma3_text",
        "granite",
        "llama",
        "mistral",
        "mixtral",
        "olmo2",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "smollm3",
        "starcoder2",
    )
)
ATTENTIONS = frozenset({"eager", "sdpa", "flash_attention_2", "flash_attention_3"})

KEPT = 8  # findings of a model that alternates between states, such as training and evaluation


class Capabilities(NamedTuple):
    """How the log-probs of a model can be computed.

    Args:
        parts: decoder and head; ``None`` if the model is asked for its own logits.
        packs: whether several sequences share a row.
        pads: whether several sequences share a padded batch.
        below: sequences share a forward pass only if they are shorter than this; longer ones would
            change the results of others in it. ``None`` for no such limit.
        autocast: the dtype of autocast in which the parts compute what the model does.
        shares: whether sequences in a row may have a common beginning once.
    """

    parts: Parts | None
    packs: bool
    pads: bool
    below: int | None
    autocast: torch.dtype | None = None
    shares: bool = False


_findings: WeakKeyDictionary[nn.Module, list[tuple[Any, ProbeResult]]] = WeakKeyDictionary()
_warned: set[tuple[type, str]] = set()


def capabilities_of(
    model: Any,
    known_ids: int = 1,
    kwargs: Mapping[str, Any] | None = None,
    afresh: bool = False,
) -> Capabilities:
    """Find what a model allows without a change of its log-probs; log what it does not, once.

    A finding holds while the :func:`fusedrl.models.signature.signature` of the model is the same.

    Args:
        model: the model, or a module around it.
        known_ids: ids in ``[0, known_ids)`` are tried if the model does not say its vocabulary.
        kwargs: further arguments of the model's forward pass, used when its logits are needed.
        afresh: try it even if it is known, as all ranks of a model do if one has to.

    Raises:
        TypeError: the model is an encoder, whose tokens see later ones.
    """
    if not afresh:
        found = known_capabilities(model, kwargs)
        if found is not None:
            return found
    modules = modules_of(model)
    below = shared_below(modules)
    parts = _split(model)
    finding = ProbeResult(False) if parts is None else _try_parts(modules, parts, below)
    if not finding.splits:
        parts, finding = None, _try_whole(modules, known_ids, kwargs or {})
    return _told(model, parts, finding, below)


def known_capabilities(model: Any, kwargs: Mapping[str, Any] | None = None) -> Capabilities | None:
    """What is known of a model, without a forward pass of it; ``None`` if it has to be tried."""
    modules = modules_of(model)
    below = shared_below(modules)
    parts = _split(model)
    finding = None if parts is None else _kept(model, _parts_key(modules, parts, below))
    if parts is not None and finding is None:
        return None
    if finding is None or not finding.splits:
        if finding is not None:
            _warn_of_logits(model, finding)
        parts, finding = None, _kept(model, _whole_key(modules, kwargs or {}))
    return None if finding is None else _told(model, parts, finding, below)


def _told(model: Any, parts: Parts | None, finding: ProbeResult, below: int | None) -> Capabilities:
    """What a finding allows, with what it does not in the log."""
    if finding.ahead:
        _check_decoder(model)
    if not finding.steady:
        _warn(model, "its numbers change with what is behind a token; sequences are computed alone")
    elif not finding.pads and not finding.packs:
        _warn(model, "it does not keep padded sequences apart; they are computed alone")
    elif parts is not None and not finding.packs:
        _warn(model, "it is not known to keep packed sequences apart; they are padded")
    return Capabilities(parts, finding.packs, finding.pads, below, finding.autocast, finding.shares)


def sharing_parts(model: Any) -> Parts | None:
    """Decoder and head of a model whose type and attention can share beginnings; it logs nothing.

    ``None`` for others, and for a model that has to be gathered for each forward pass.
    """
    try:
        parts = split(model)
    except CannotSplit:
        return None
    can = _packable(parts) and attention_of(parts.config) in SHARING and not parts.gathered
    return parts if can else None


def may_share(model: nn.Module, parts: Parts) -> bool:
    """Whether a model that can share beginnings may do so now, which no finding knows.

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
    if any("drop" in kind.__name__.lower() for kind in type(module).__mro__):
        found = vars(module).items()
        return any(type(x) in (int, float) and x > 0 for name, x in found if name[0] != "_")
    config = getattr(module, "config", None)
    named = (*vars(module).items(), *getattr(config, "__dict__", {}).items())
    return any(type(x) in (int, float) and x > 0 for name, x in named if "drop" in name.lower())


def _split(model: Any) -> Parts | None:
    try:
        return split(model)
    except CannotSplit as why:
        _warn(model, f"{why}; its log-probs are computed from all its logits")
        return None


def _check_decoder(model: Any) -> None:
    """Refuse an encoder, whose tokens see later ones."""
    if getattr(getattr(model, "config", None), "is_decoder", None) is False:
        raise TypeError(
            f"model: expected a causal language model, got {type(model).__name__}, whose logits "
            "see later tokens; load a causal one, or this one with is_decoder=True"
        )


def _packable(parts: Parts) -> bool:
    return parts.config.model_type in PACKABLE and attention_of(parts.config) in ATTENTIONS


def _parts_key(modules: list[Any], parts: Parts, below: int | None) -> Any:
    # DDP counts its steps in attributes.
    outer = [m for m in chain_of(modules[0]) if not isinstance(m, DistributedDataParallel)]
    ends = (*outer, parts.decoder, parts.head)
    autocast = autocast_of(parts.weight.device)
    return signature(modules, ends, "parts", _packable(parts), below, autocast)


def _whole_key(modules: list[Any], kwargs: Mapping[str, Any]) -> Any:
    return signature(modules, (), "whole", sorted(kwargs), autocast_of(device_of(modules[0])))


def _try_parts(modules: list[Any], parts: Parts, below: int | None) -> ProbeResult:
    model, key = modules[0], _parts_key(modules, parts, below)
    try:
        finding = _keep(model, key, probe_parts(parts, _packable(parts), below))
    except Exception as error:  # its forward takes other arguments than those of transformers
        _warn(model, f"trying it raised {error!r}; its log-probs are computed from all its logits")
        return ProbeResult(False)
    if not finding.splits:
        _warn_of_logits(model, finding)
    return finding


def _try_whole(modules: list[Any], known_ids: int, kwargs: Mapping[str, Any]) -> ProbeResult:
    model, device, key = modules[0], device_of(modules[0]), _whole_key(modules, kwargs)
    try:
        vocabulary = vocabulary_of(model) or known_ids
        return _keep(model, key, probe_whole(model, device, vocabulary, kwargs))
    except Exception:  # the caller sees the error again when the model really runs
        return ProbeResult(False)


def _warn_of_logits(model: Any, finding: ProbeResult) -> None:
    _warn(model, f"{finding.why}; its logits are computed for every token")


def _kept(model: nn.Module, key: Any) -> ProbeResult | None:
    return next((finding for known, finding in _findings.get(model, ()) if known == key), None)


def _keep(model: nn.Module, key: Any, finding: ProbeResult) -> ProbeResult:
    """Remember a finding, unless the probe saw only zeros, such as those of a new head."""
    if finding.telling:
        _findings[model] = [(key, finding), *_findings.get(model, ())][:KEPT]
    return finding


def _warn(model: Any, why: str) -> None:
    if (type(model), why) not in _warned:
        _warned.add((type(model), why))
        logger.warning("%s: %s", type(model).__name__, why)
