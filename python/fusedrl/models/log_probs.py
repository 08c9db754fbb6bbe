"""Log-probs of token sequences under a causal language model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fusedrl.models import batches
from fusedrl.models.split import Parts, unwrapped
from fusedrl.models.trial import way_of
from fusedrl.ops import linear_token_log_probs, token_log_probs
from fusedrl.ops.token_log_probs import TokenLogProbs


def causal_log_probs(
    model: Any,
    tokens: Tensor,
    lengths: Sequence[int],
    mask: Tensor | None = None,
    *,
    max_tokens_per_forward: int | None = None,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    model_kwargs: Mapping[str, Any] | None = None,
) -> Tensor | TokenLogProbs:
    """Log-prob of every kept token of packed sequences under a transformers causal LM.

    The head is multiplied with the hidden states that predict kept tokens, and with no others.
    Several sequences share a row where the model is known to keep them apart, padded batches of
    similar lengths otherwise; a model whose head cannot be told from its decoder computes all its
    logits. What a model allows is found out by a forward over 13 tokens, once a model. Nothing
    after the last kept token of a packed sequence is computed.

    Args:
        model: the model, a peft model around one, or :class:`fusedrl.models.WithoutAdapters`.
        tokens: integer token ids, packed ``[N]``, on any device.
        lengths: tokens of each sequence; they sum to ``N``.
        mask: bool ``[N]``; ``None`` keeps all. A dropped token has log-prob 0.
        max_tokens_per_forward: bounds the tokens of one forward pass, padding counted; a longer
            sequence goes alone. ``None``: 512 on a CPU, 16384 with flash attention, else 4096; all
            in one where several ranks ask a model for its logits, which may be sharded over them.
        temperature: positive divisor of the logits.
        entropy: also return the entropy of each kept token's distribution.
        model_kwargs: more arguments of the model's forward where its logits are needed.

    Returns:
        float32 ``[N]``, or float64 of a float64 model, on the device of the model's head; 0 for
        the first token of every sequence. :class:`TokenLogProbs` of two with ``entropy=True``.
        Differentiable with respect to the model.

    Raises:
        ValueError: lengths or a mask that do not fit, a sequence longer than the model's context,
            ids beyond its vocabulary.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from fusedrl.models import causal_log_probs
        >>> config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=32,
        ...     num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(config).eval()
        >>> causal_log_probs(model, torch.arange(7), [4, 3]).shape
        torch.Size([7])
    """
    _check(model, tokens, lengths, mask, max_tokens_per_forward)
    tokens = tokens.cpu()
    work = _sequences(tokens, lengths, mask)
    options = {"temperature": temperature, "entropy": entropy}
    target, context = unwrapped(model)
    with context:
        way = way_of(target)
        if way.parts is None:
            device = _device_of(target)
            limit = max_tokens_per_forward or batches.tokens_per_forward(device, None)
            if max_tokens_per_forward is None and _ranks() > 1:
                # A sharded model's ranks meet in every forward: each does one, whatever its data.
                limit = len(tokens) * len(lengths)
            else:
                work = [sequence for sequence in work if len(sequence.kept)]
            kwargs = dict(model_kwargs or {})
            places, scored = _from_logits(target, kwargs, work, device, limit, options)
        else:
            work = [sequence for sequence in work if len(sequence.kept)]
            _check_vocabulary(tokens, len(way.parts.embeddings))
            attention = way.parts.config._attn_implementation
            device = way.parts.embeddings.device
            limit = max_tokens_per_forward or batches.tokens_per_forward(device, attention)
            places, hidden = _hidden(way.parts, way.packs, work, device, limit)
            scored = linear_token_log_probs(
                hidden,
                way.parts.weight,
                tokens[places].to(hidden.device),
                bias=way.parts.bias,
                softcap=way.parts.softcap,
                scale=way.parts.scale,
                **options,
            )
    if isinstance(scored, TokenLogProbs):
        return TokenLogProbs(*(_placed(values, places, len(tokens)) for values in scored))
    assert isinstance(scored, Tensor)
    return _placed(scored, places, len(tokens))


class _Sequence(NamedTuple):
    """The tokens of a sequence, which of them are kept, and where it starts in the pack."""

    tokens: Tensor
    kept: Tensor
    start: int


def _sequences(tokens: Tensor, lengths: Sequence[int], mask: Tensor | None) -> list[_Sequence]:
    """The sequences and what to score in them: not the first token, which nothing is before."""
    masks = [None] * len(lengths) if mask is None else mask.cpu().split(list(lengths))
    work = []
    starts = accumulate(lengths, initial=0)
    for start, row, keep in zip(starts, tokens.split(list(lengths)), masks, strict=False):
        kept = torch.arange(len(row)) if keep is None else keep.nonzero().squeeze(-1)
        work.append(_Sequence(row, kept[kept > 0], start))
    return work


def _ranks() -> int:
    """Processes that may hold parts of a model."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if distributed else 1


def _hidden(
    parts: Parts, packs: bool, work: list[_Sequence], device: torch.device, limit: int
) -> tuple[Tensor, Tensor]:
    """Places of the kept tokens, and the hidden states that predict them, ``[K, H]``."""
    if packs:
        # A token is predicted by those before it: the last kept one and all behind it are not read.
        work = [sequence._replace(tokens=sequence.tokens[: sequence.kept[-1]]) for sequence in work]
    lengths = [len(sequence.tokens) for sequence in work]
    groups = batches.packed(lengths, limit) if packs else batches.padded(lengths, limit)
    places, hidden = [], []
    for group in groups:
        rows = [work[i] for i in group]
        inputs, firsts = _packed(rows, device) if packs else _padded(rows, device)
        states = parts.hidden(**inputs).flatten(0, 1)
        read = [row.kept - 1 + first for row, first in zip(rows, firsts, strict=True)]
        hidden.append(states[torch.cat(read).to(states.device)])
        places += [row.kept + row.start for row in rows]
    if not groups:
        return torch.empty(0, dtype=torch.int64), parts.weight.new_empty(0, parts.weight.shape[1])
    return torch.cat(places), torch.cat(hidden)


def _from_logits(
    model: Any,
    kwargs: dict[str, Any],
    work: list[_Sequence],
    device: torch.device,
    limit: int,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | TokenLogProbs]:
    """Places of the kept tokens, and their log-probs from the model's own logits."""
    places, scored = [torch.empty(0, dtype=torch.int64)], []
    for group in batches.padded([len(sequence.tokens) for sequence in work], limit):
        rows = [work[i] for i in group]
        inputs, firsts = _padded(rows, device)
        ids = inputs.pop("input_ids")
        mask = torch.zeros(ids.numel(), dtype=torch.bool)
        for row, first in zip(rows, firsts, strict=True):
            mask[row.kept + first] = True
        mask = mask.view(ids.shape).to(device)
        logits = model(ids, **inputs, **kwargs)["logits"]
        logits = logits[:, -ids.shape[1] :]  # behind what prompt tuning puts before the tokens
        result = token_log_probs(logits, ids, mask, shift=True, **options)
        columns = result if isinstance(result, TokenLogProbs) else (result,)
        scored.append([column[mask] for column in columns])
        places += [row.kept + row.start for row in rows]
    empty = [[torch.empty(0, device=device)] * (2 if options["entropy"] else 1)]
    columns = [torch.cat(column) for column in zip(*(scored or empty), strict=True)]
    return torch.cat(places), TokenLogProbs(*columns) if options["entropy"] else columns[0]


def _packed(rows: list[_Sequence], device: torch.device) -> tuple[dict[str, Tensor], list[int]]:
    """One row of sequences whose positions start again: that alone keeps them apart."""
    lengths = [len(row.tokens) for row in rows]
    ids = torch.cat([row.tokens for row in rows])
    positions = torch.cat([torch.arange(n) for n in lengths])
    inputs = {"input_ids": ids[None].to(device), "position_ids": positions[None].to(device)}
    return inputs, list(accumulate(lengths[:-1], initial=0))


def _padded(rows: list[_Sequence], device: torch.device) -> tuple[dict[str, Tensor], list[int]]:
    """A right-padded batch, and where each sequence starts in it, flattened.

    On the right, because learned positions count from the left edge.
    """
    ids = pad_sequence([row.tokens for row in rows], batch_first=True)
    width = ids.shape[1]
    lengths = torch.tensor([[len(row.tokens)] for row in rows])
    mask = (torch.arange(width) < lengths).long()
    firsts = [i * width for i in range(len(rows))]
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}, firsts


def _placed(values: Tensor, places: Tensor, length: int) -> Tensor:
    return values.new_zeros(length).index_copy(0, places.to(values.device), values)


def _device_of(model: Any) -> torch.device:
    """Where a model takes its tokens; weights that are offloaded are on no device."""
    devices = (parameter.device for parameter in model.parameters() if not parameter.is_meta)
    return next(devices, torch.device("cpu"))


def _check_vocabulary(tokens: Tensor, size: int) -> None:
    outside = ((tokens < 0) | (tokens >= size)).nonzero()
    if len(outside):
        i = int(outside[0])
        raise ValueError(
            f"tokens: expected ids in [0, {size}), the model's vocabulary, got {int(tokens[i])} at "
            f"token {i}; use the model's tokenizer, or resize_token_embeddings"
        )


def _check(
    model: Any,
    tokens: Tensor,
    lengths: Sequence[int],
    mask: Tensor | None,
    max_tokens_per_forward: int | None,
) -> None:
    if tokens.dim() != 1 or tokens.is_floating_point() or sum(lengths) != len(tokens):
        raise ValueError(
            f"tokens: expected [{sum(lengths)}] integers, as many as the lengths sum to, got "
            f"{tuple(tokens.shape)} of {tokens.dtype}; concatenate the sequences"
        )
    if mask is not None and (mask.shape != tokens.shape or mask.dtype != torch.bool):
        raise ValueError(
            f"mask: expected bool of shape {tuple(tokens.shape)}, got {mask.dtype} of shape "
            f"{tuple(mask.shape)}"
        )
    batches.check_limit(max_tokens_per_forward)
    context = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if context is not None and max(lengths, default=0) > context:
        i = max(range(len(lengths)), key=lengths.__getitem__)
        raise ValueError(
            f"tokens: sequence {i}: expected at most {context} tokens, the model's context, got "
            f"{lengths[i]}; truncate or split it"
        )
