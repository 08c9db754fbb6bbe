"""Checks of what ``causal_log_probs`` is given."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor, nn

from fusedrl.channel.tensors import is_dtensor
from fusedrl.models.forwards import check_limit
from fusedrl.models.lengths import context_of, positions_held


def check_model(model: Any) -> None:
    """Refuse what cannot be a causal language model."""
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model: expected a causal language model, a torch.nn.Module, got {name}; load it with "
            "AutoModelForCausalLM.from_pretrained"
        )
    if hasattr(model, "in_keys") and hasattr(model, "out_keys"):
        raise TypeError(
            f"model: expected a causal language model, got {name}, which takes tensordicts; pass "
            "the model that it wraps"
        )
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise TypeError(
            f"model: expected a causal language model, got {name}, an encoder-decoder, whose "
            "log-probs need the encoder's input; use a decoder-only model"
        )


def logits_of(model: nn.Module, output: Any, ids: Tensor) -> Tensor:
    """The logits ``[B, T, V]`` of ``ids``, ``[B, T]``, behind what prompt tuning puts before."""
    name = type(model).__name__
    try:
        logits = output["logits"]
    except (KeyError, TypeError, IndexError):
        raise TypeError(
            f"model: expected a causal language model, whose forward returns logits, got {name}, "
            "which returns none; load it with AutoModelForCausalLM"
        ) from None
    if is_dtensor(logits):
        raise TypeError(
            f"model: expected logits that this rank has in full, got a DTensor from {name}; gather "
            "them with .full_tensor(), or pass this rank's shard of the head to "
            "linear_token_log_probs with vocab_offset= and vocab_group="
        )
    rows, width = ids.shape
    if logits.dim() != 3 or len(logits) != rows or logits.shape[1] < width:
        raise TypeError(
            f"model: expected a causal language model with logits [{rows}, {width}, V], got "
            f"{name} with {list(logits.shape)}; load it with AutoModelForCausalLM"
        )
    return logits[:, logits.shape[1] - width :]


def check_all_classes(classes: int, embedded: int | None) -> None:
    """Refuse the logits of one shard of a vocabulary, as its rank has them.

    A head may have a few classes less than its model embeds ids. One of several shards has half of
    them or less, and log-probs over a shard alone are wrong.
    """
    if embedded is not None and classes <= (embedded + 1) // 2:
        raise ValueError(
            f"model: expected logits of the {embedded} ids that it embeds, got those of {classes}, "
            "as a head that is sharded over the vocabulary gives; gather its logits, or pass the "
            "shard to linear_token_log_probs with vocab_offset= and vocab_group="
        )


def check_sequences(
    tokens: Tensor, lengths: Any, mask: Tensor | None, max_tokens_per_forward: int | None
) -> list[int]:
    """The lengths as a list, if they fit the tokens and the mask."""
    for name, column in (("tokens", tokens), ("mask", tokens if mask is None else mask)):
        if not isinstance(column, Tensor) or column.is_nested:
            raise TypeError(
                f"{name}: expected a plain tensor [N], got {type(column).__name__}; concatenate "
                "the sequences with torch.cat"
            )
    try:
        lengths = [index(n) for n in (lengths.tolist() if isinstance(lengths, Tensor) else lengths)]
    except TypeError:
        raise TypeError(
            f"lengths: expected integers, one for each sequence, got {lengths!r}; pass a list"
        ) from None
    if any(n < 0 for n in lengths):
        raise ValueError(f"lengths: expected numbers of tokens, got {min(lengths)}; 0 is the least")
    other = tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool
    if tokens.dim() != 1 or other or sum(lengths) != len(tokens):
        raise ValueError(
            f"tokens: expected [{sum(lengths)}] integers, as many as the lengths sum to, got "
            f"{tuple(tokens.shape)} of {tokens.dtype}; concatenate the sequences"
        )
    if mask is not None and (mask.shape != tokens.shape or mask.dtype != torch.bool):
        raise ValueError(
            f"mask: expected bool of shape {tuple(tokens.shape)}, got {mask.dtype} of shape "
            f"{tuple(mask.shape)}; convert it with .bool(), and concatenate the sequences' masks"
        )
    check_limit(max_tokens_per_forward)
    return lengths


def check_vocabulary(tokens: Tensor, size: int | None, places: Tensor | None = None) -> None:
    """Refuse negative ids and those from ``size`` on, of all tokens or of those at ``places``."""
    chosen = tokens if places is None else tokens[places]
    outside = chosen < 0 if size is None else (chosen < 0) | (chosen >= size)
    if bool(outside.any()):
        found = outside.nonzero()[0]
        i = int(found if places is None else places[found])
        end = "V" if size is None else size
        raise ValueError(
            f"tokens: expected ids in [0, {end}), the model's vocabulary, got {int(tokens[i])} at "
            f"token {i}; use the model's tokenizer, or resize_token_embeddings"
        )


def check_context(model: Any, lengths: Sequence[int]) -> None:
    """Refuse a sequence with more tokens than the model has positions for, where it has a bound.

    Only a table of positions is a bound, beyond which a GPU's error would end the process.
    """
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    context, longest = context_of(config), max(lengths, default=0)
    if context is not None and longest > context and positions_held(model, context):
        raise ValueError(
            f"tokens: sequence {lengths.index(longest)}: expected at most {context} tokens, the "
            f"model's context, got {longest}; truncate or split it"
        )
