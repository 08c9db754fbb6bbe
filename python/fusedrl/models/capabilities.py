"""What a model allows, found out once for each model by running it on a few tokens.

The decoder and the head that a model names may not be the whole model. It may mix the sequences
that share a row, and padding or a longer call may change its numbers. Each of these would give
log-probs that look plausible and are wrong. So each is probed, and if a model does not allow one,
its log-probs are computed in a slower way that is right.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fusedrl.compat.torch import is_compiled_function
from fusedrl.compat.transformers import attention_of
from fusedrl.models.forwards import SHARING
from fusedrl.models.lengths import shared_below
from fusedrl.models.probes import ProbeResult, probe_parts, probe_sharing, probe_whole
from fusedrl.models.signature import modules_of, signature
from fusedrl.models.split import (
    CannotSplit,
    Parts,
    autocast_of,
    compiler_of,
    device_of,
    split,
    uncompiled,
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
        shares: whether sequences in a row have a common beginning once, if that was asked.
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
    may_share: Callable[[], bool] | None = None,
) -> Capabilities:
    """Find what a model allows without a change of its log-probs; log what it does not, once.

    A finding holds while the :func:`fusedrl.models.signature.signature` of the model is the same.

    Args:
        model: the model, or a module around it.
        known_ids: ids in ``[0, known_ids)`` are tried if the model does not say its vocabulary.
        kwargs: further arguments of the model's forward pass, used when its logits are needed.
        may_share: says whether there are common beginnings to share, asked of a model that packs.

    Raises:
        TypeError: the model is an encoder, whose tokens see later ones.
    """
    modules = modules_of(model)
    below = shared_below(modules)
    try:
        parts = split(model)
    except CannotSplit as why:
        _warn(model, f"{why}; its log-probs are computed from all its logits")
        parts = None
    finding = ProbeResult(False) if parts is None else _parts_finding(modules, parts, below)
    if not finding.splits:
        parts, finding = None, _whole_finding(modules, known_ids, kwargs or {})
    if finding.ahead:
        _check_decoder(model)
    if not finding.steady:
        _warn(model, "its numbers change with what is behind a token; sequences are computed alone")
    elif not finding.pads and not finding.packs:
        _warn(model, "it does not keep padded sequences apart; they are computed alone")
    elif parts is not None and not finding.packs:
        _warn(model, "it is not known to keep packed sequences apart; they are padded")
    found = Capabilities(parts, finding.packs, finding.pads, below, finding.autocast)
    if parts is None or not found.packs or may_share is None or not may_share():
        return found
    return found._replace(shares=_shares(modules, parts, finding.autocast))


def _shares(modules: list[Any], parts: Parts, autocast: torch.dtype | None) -> bool:
    """Whether sequences of a model that packs may have a common beginning once.

    Dropout would be drawn once for all of them, and a compiled decoder be compiled once more for
    each tree.
    """
    if attention_of(parts.config) not in SHARING:
        return False
    if parts.decode is not parts.decoder or any(map(_is_compiled, modules)):
        return False
    if any(module.training and _drops(module) for module in modules):
        return False
    key = signature(modules, (parts.base, parts.decoder), "shares", autocast)
    finding = _kept(modules[0], key)
    if finding is None:
        try:
            finding = _keep(modules[0], key, probe_sharing(parts, autocast))
        except Exception:  # its decoder takes no mask of this form
            finding = _keep(modules[0], key, ProbeResult(True))
    return finding.shares


def _is_compiled(module: nn.Module) -> bool:
    """Whether a module is compiled as itself, or its forward is."""
    return is_compiled_function(module.forward) or compiler_of(module) is not None


def _drops(module: nn.Module) -> bool:
    """Whether a module in training sets values to 0 at random."""
    if isinstance(module, nn.Dropout):
        return module.p > 0
    found = vars(module).items()
    return any(isinstance(x, float) and x > 0 and "dropout" in name for name, x in found)


def _check_decoder(model: Any) -> None:
    """Refuse an encoder, whose tokens see later ones."""
    if getattr(getattr(model, "config", None), "is_decoder", None) is False:
        raise TypeError(
            f"model: expected a causal language model, got {type(model).__name__}, whose logits "
            "see later tokens; load a causal one, or this one with is_decoder=True"
        )


def _parts_finding(modules: list[Any], parts: Parts, below: int | None) -> ProbeResult:
    model = modules[0]
    attention = attention_of(parts.config)
    packable = parts.config.model_type in PACKABLE and attention in ATTENTIONS
    ends = (model, parts.base, parts.decoder, parts.head)
    autocast = autocast_of(parts.weight.device)
    key = signature(modules, ends, "parts", packable, below, autocast)
    finding = _kept(model, key)
    if finding is None:
        try:
            finding = _keep(model, key, probe_parts(uncompiled(model), parts, packable, below))
        except Exception as error:  # its forward takes other arguments than those of transformers
            _warn(
                model, f"trying it raised {error!r}; its log-probs are computed from all its logits"
            )
            return ProbeResult(False)
    if not finding.splits:
        _warn(model, f"{finding.why}; its logits are computed for every token")
    return finding


def _whole_finding(modules: list[Any], known_ids: int, kwargs: Mapping[str, Any]) -> ProbeResult:
    model = modules[0]
    device = device_of(model)
    key = signature(modules, (), "whole", sorted(kwargs), autocast_of(device))
    finding = _kept(model, key)
    if finding is not None:
        return finding
    try:
        vocabulary = vocabulary_of(model) or known_ids
        return _keep(model, key, probe_whole(model, device, vocabulary, kwargs))
    except Exception:  # the caller sees the error again when the model really runs
        return ProbeResult(False)


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
