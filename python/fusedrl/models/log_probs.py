"""Log-probs of token sequences under a causal language model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fusedrl.models.plan import (
    Plan,
    at_kept_states,
    check_all_classes,
    check_vocabulary,
    planned,
)
from fusedrl.models.split import Parts, device_of, vocabulary_of
from fusedrl.ops import linear_token_log_probs, token_log_probs
from fusedrl.ops.token_log_probs import TokenLogProbs


def causal_log_probs(
    model: Any,
    tokens: Tensor,
    lengths: Sequence[int],
    mask: Tensor | None = None,
    *,
    max_tokens_per_forward: int | None = None,
    share_prefixes: bool = True,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    model_kwargs: Mapping[str, Any] | None = None,
) -> TokenLogProbs:
    """Log-prob of every kept token of packed sequences under a transformers causal LM.

    Sequences are packed into rows of the decoder and cut at their last kept token, and the head is
    applied only to hidden states that predict kept tokens. This requires a tested model type whose
    results agree with its logits in a comparison at the first call, and after a change of the
    model. Any other model computes its full logits, in padded batches.

    Args:
        model: the model, a peft model around one, or a :class:`fusedrl.models.WithAdapter`.
        tokens: integer token ids, packed ``[N]``, on any device.
        lengths: number of tokens of each sequence, integers that sum to ``N``.
        mask: bool ``[N]``; ``None`` keeps all. A dropped token has log-prob 0.
        max_tokens_per_forward: largest number of tokens in one forward pass, including padding; a
            longer sequence runs alone. ``None`` means 512 on a CPU, 16384 with flash attention, and
            4096 otherwise; at least 4096 (1024 with eager attention) if sequences share a prefix or
            FSDP gathers weights; all tokens if several ranks compute full logits.
        share_prefixes: compute a common prefix of at least 32 tokens once, if the model's type and
            attention (sdpa, eager) allow it and it has no active dropout and is not compiled.
            Results differ by rounding.
        temperature: positive divisor of the logits.
        entropy: also compute the entropy of each kept token's distribution.
        model_kwargs: more arguments of the model's forward, used if its logits are needed.

    Returns:
        :class:`fusedrl.TokenLogProbs`: float32 ``[N]`` (float64 for a float64 model), on the device
        of the model's head, and 0 for the first token of every sequence. The entropy is ``None``
        without ``entropy=True``. Both have gradients for the model, which are 0 rather than
        missing if no token is kept.

    Raises:
        TypeError: the model is not causal.
        ValueError: lengths or mask do not fit the tokens, a sequence is longer than the
            model's table of positions, or an id is outside its vocabulary.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from fusedrl.models import causal_log_probs
        >>> config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=32,
        ...     num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(config).eval()
        >>> causal_log_probs(model, torch.arange(7), [4, 3]).log_probs.shape
        torch.Size([7])
    """
    sequences: Any = (tokens, lengths, mask, max_tokens_per_forward, share_prefixes, model_kwargs)
    options = {"temperature": temperature, "entropy": entropy}
    with planned(model, *sequences) as plan:
        parts = plan.capabilities.parts
        if parts is None:
            scored = _from_logits(plan, options)
        else:
            scored = _from_states(plan, parts, options)
        columns = [plan.placed(values) for values in scored]
    return TokenLogProbs(columns[0], columns[1] if entropy else None)


def _from_states(plan: Plan, parts: Parts, options: dict[str, Any]) -> tuple[Tensor, ...]:
    """Log-probs of the kept tokens, and entropies if requested, from the hidden states."""
    tokens = plan.tokens[plan.places]
    first = which = torch.arange(len(tokens), device="cpu")
    if plan.follows:  # the head is applied once to a token that sequences share
        before = accumulate((one.inputs["input_ids"].numel() for one in plan.passes), initial=0)
        numbered = zip(plan.passes, before, strict=False)
        states = torch.cat([one.predicting + place for one, place in numbered])
        pairs, which = ((states << 32) + tokens).unique(return_inverse=True)  # ids have 31 bits
        first = which.new_empty(len(pairs)).scatter_(0, which, first)

    def score(hidden: Tensor) -> tuple[Tensor, ...]:
        ids, rows = tokens[first].to(hidden.device), first.to(hidden.device)
        hidden = hidden[rows] if plan.follows else hidden
        result = linear_token_log_probs(hidden, parts.weight, ids, **parts.options, **options)
        found = [x for x in result if x is not None]
        return tuple(x[which.to(x.device)] if plan.follows else x for x in found)

    return at_kept_states(plan, parts, score)


def _from_logits(plan: Plan, options: dict[str, Any]) -> tuple[Tensor, ...]:
    """Log-probs of the kept tokens, and entropies if requested, from the model's logits."""
    device = device_of(plan.model)
    scored = []
    for number, one in enumerate(plan.passes, 1):
        inputs = dict(one.inputs)
        ids = inputs.pop("input_ids")
        mask = torch.zeros(ids.numel(), dtype=torch.bool, device="cpu")
        mask[one.predicting + 1] = True
        mask = mask.view(ids.shape).to(device)
        with plan.step.collective():
            output = plan.model(ids, **inputs, **plan.kwargs)
        # Other ranks may have begun the next pass.
        with plan.step.collective() if number < len(plan.passes) else nullcontext():
            # The last rows, as prompt tuning puts others in front.
            logits = output["logits"][:, -ids.shape[1] :]
            check_all_classes(logits.shape[-1], vocabulary_of(plan.model))
            check_vocabulary(plan.tokens, logits.shape[-1], one.places)
            result = token_log_probs(logits, ids, mask, shift=True, **options)
            scored.append([column[mask] for column in result if column is not None])
    return tuple(torch.cat(column) for column in zip(*scored, strict=True))
