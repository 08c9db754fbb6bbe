"""What a model allows, found out once a model by trying it on a few tokens.

A decoder and a head that a model names need not be all of it, and several sequences in one row
need not stay apart in it. Either would give plausible, wrong numbers, so both are tried: the logits
of the parts must be those of the whole, and a packed row those of its sequences alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fusedrl.models.split import CannotSplit, Parts, split
from fusedrl.ops._head import scaled_and_capped

logger = logging.getLogger("fusedrl")

# Decoders whose attention is the only thing that mixes tokens, each tested in tests/models with
# sequences longer than its windows. The trial is too short to see what a window does.
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

SHORT, LONG = 5, 8  # tokens of the two sequences of the trial


class Way(NamedTuple):
    """How log-probs are computed: from the logits where there are no parts, else packed or not."""

    parts: Parts | None
    packs: bool


class _Verdict(NamedTuple):
    signature: tuple[Any, ...]
    splits: bool
    packs: bool


_verdicts: WeakKeyDictionary[Any, _Verdict] = WeakKeyDictionary()
_warned: set[tuple[type, str]] = set()


def way_of(model: Any) -> Way:
    """The fastest way that gives the model's own log-probs; slower ones are logged once."""
    try:
        parts = split(model)
    except CannotSplit as why:
        _warn(model, f"{why}; its log-probs are computed from all its logits")
        return Way(None, False)
    attention = getattr(parts.config, "_attn_implementation", None)
    packable = parts.config.model_type in PACKABLE and attention in ATTENTIONS
    signature = (attention, *parts.head_settings(), packable, model.training)
    verdict = _verdicts.get(model)
    if verdict is None or verdict.signature != signature:
        try:
            verdict = _verdicts[model] = _Verdict(signature, *_try(model, parts, packable))
        except Exception as error:  # a forward that is not called as those of transformers are
            _warn(
                model, f"trying it raised {error!r}; its log-probs are computed from all its logits"
            )
            return Way(None, False)
    if not verdict.splits:
        _warn(model, "its logits are not those of its head; they are computed for every token")
        return Way(None, False)
    if not verdict.packs:
        _warn(model, "it is not known to keep packed sequences apart; they are padded")
    return Way(parts, verdict.packs)


def _warn(model: Any, why: str) -> None:
    if (type(model), why) not in _warned:
        _warned.add((type(model), why))
        logger.warning("%s: %s", type(model).__name__, why)


def _try(model: Any, parts: Parts, packable: bool) -> tuple[bool, bool]:
    """Whether the parts give the model's logits, and whether packed sequences stay apart."""
    device = parts.embeddings.device
    ids = torch.arange(SHORT + LONG, device=device).remainder(len(parts.weight))[None]
    first, second = ids[:, :SHORT], ids[:, SHORT:]
    with _undisturbed(device):
        options = {"use_cache": False, "return_dict": True}
        whole = [model(input_ids=row, **options).logits for row in (first, second)]
        apart = [_logits(parts, parts.hidden(input_ids=row)) for row in (first, second)]
        tolerance = 5e-2 if parts.weight.dtype in (torch.bfloat16, torch.float16) else 2e-4
        if not all(_agree(*pair, tolerance) for pair in zip(apart, whole, strict=True)):
            return False, False
        if not packable:
            return True, False
        positions = torch.cat([torch.arange(n, device=device) for n in (SHORT, LONG)])[None]
        packed = _logits(parts, parts.hidden(input_ids=ids, position_ids=positions))
        pairs = zip(packed.split((SHORT, LONG), dim=1), whole, strict=True)
        return True, all(_agree(*pair, tolerance) for pair in pairs)


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """No gradients, dropout or lower precision; the user's random numbers are not drawn."""
    devices = [device] if device.type == "cuda" else []
    with (
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        torch.random.fork_rng(devices),
        _NoDropout(),
    ):
        yield


class _NoDropout(TorchFunctionMode):
    """Dropout is skipped in this thread, without a change to the modules that ask for it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.dropout:
            return args[0]
        if func is torch.nn.functional.scaled_dot_product_attention:
            kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)


def _logits(parts: Parts, hidden: Tensor) -> Tensor:
    # In the dtype of the head: a float32 copy of a large one would cost gigabytes.
    logits = torch.nn.functional.linear(hidden, parts.weight, parts.bias).float()
    return scaled_and_capped(logits, parts.scale or 1.0, parts.softcap or 0.0)


def _agree(logits: Tensor, whole: Tensor, tolerance: float) -> bool:
    """Equal to the rounding of the model's dtype, seen against the largest logit."""
    whole = whole.float()
    return bool((logits - whole).abs().max() <= tolerance * whole.abs().max())
