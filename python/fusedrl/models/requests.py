"""Checked sequences for a model, and the hidden states that predict their tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedrl.channel.following import one_version
from fusedrl.compat.transformers import attention_of
from fusedrl.models import forwards
from fusedrl.models.capabilities import Capabilities, capabilities_of
from fusedrl.models.checks import (
    check_all_classes,
    check_model,
    check_sequences,
    check_vocabulary,
    context_checked,
)
from fusedrl.models.prefix_tree import shares_some
from fusedrl.models.sequences import Pass, Scored, passes_of, scored_sequences
from fusedrl.models.split import Parts, autocast_as, unwrapped, vocabulary_of

logger = logging.getLogger("fusedrl")


class Request(NamedTuple):
    """The checked arguments of :func:`causal_log_probs` and its like.

    Args:
        model: the model to call, in ``context``.
        context: a block in which its adapters are as they have to be.
        tokens: packed token ids ``[N]``, on the CPU.
        lengths: tokens of each sequence.
        work: each sequence with its kept tokens.
        limit: the largest number of tokens in a forward pass.
        share: whether a common beginning of sequences may be computed once.
        kwargs: further arguments of the model's forward pass, used when its logits are needed.
    """

    model: Any
    context: AbstractContextManager[None]
    tokens: Tensor
    lengths: list[int]
    work: list[Scored]
    limit: int | None
    share: bool
    kwargs: dict[str, Any]

    @property
    def keeps_some(self) -> bool:
        """Whether any kept token has a token before it."""
        return any(len(row.kept) for row in self.work)

    def _may_share(self) -> bool:
        rows = [row.tokens for row in self.work if len(row.kept)]
        return self.share and shares_some(rows)

    @contextmanager
    def opened(self) -> Iterator[Capabilities]:
        """What the model allows, in a block in which its weights have one version."""
        with self.context, context_checked(self.model, self.lengths), one_version(self.model):
            known_ids = int(self.tokens.max()) + 1 if len(self.tokens) else 1
            found = capabilities_of(self.model, known_ids, self.kwargs, self._may_share)
            parts = found.parts
            precision = parts and autocast_as(parts.weight.device, found.autocast)
            with precision or nullcontext():
                yield found

    def placed(self, values: Tensor, places: Tensor) -> Tensor:
        """A column ``[N]`` with ``values`` at ``places`` and 0 elsewhere."""
        return values.new_zeros(len(self.tokens)).index_copy(0, places.to(values.device), values)


def request_of(
    model: Any,
    tokens: Tensor,
    lengths: Sequence[int],
    mask: Tensor | None,
    max_tokens_per_forward: int | None,
    share_prefixes: bool,
    model_kwargs: Mapping[str, Any] | None,
) -> Request:
    """Check the arguments and make a request of them."""
    lengths = check_sequences(tokens, lengths, mask, max_tokens_per_forward)
    target, context = unwrapped(model)
    check_model(target)
    tokens = tokens.cpu()
    check_vocabulary(tokens, vocabulary_of(target))
    work = scored_sequences(tokens, lengths, mask)
    kwargs = dict(model_kwargs or {})
    limit = max_tokens_per_forward
    return Request(target, context, tokens, lengths, work, limit, share_prefixes, kwargs)


class KeptStates(NamedTuple):
    """Hidden states ``[K, H]`` that predict kept tokens, those tokens, and their places.

    ``states`` is equal for tokens that one hidden state predicts, those that sequences share.
    """

    hidden: Tensor
    tokens: Tensor
    places: Tensor
    states: Tensor

    def distinct(self) -> tuple[Tensor, Tensor]:
        """Rows without their repetitions, and which of these each row is."""
        pairs = (self.states << 32) + self.tokens.to(self.states.device)  # ids have 31 bits or less
        found, which = pairs.unique(return_inverse=True)
        first = which.new_empty(len(found))
        return first.scatter_(0, which, torch.arange(len(which), device=which.device)), which


def kept_states(request: Request, capabilities: Capabilities, parts: Parts) -> KeptStates:
    """The decoder's hidden states for a request, in a block that ``opened`` began."""
    # A compiled caller would compile the decoder once for each tree, and cannot guard its mask.
    compute = torch.compiler.disable(_kept_states) if capabilities.shares else _kept_states
    return compute(request, capabilities, parts)


def _kept_states(request: Request, capabilities: Capabilities, parts: Parts) -> KeptStates:
    work = [row for row in request.work if len(row.kept)]
    device = parts.embeddings.device
    attention = attention_of(parts.config)
    limit = request.limit or forwards.tokens_per_forward(device, attention)
    most = request.limit or max(limit, forwards.SHARING.get(str(attention), 0))
    passes = passes_of(capabilities, work, device, limit, most)
    _log_shared(request.model, passes)
    nothing = torch.empty(0, dtype=torch.int64, device="cpu")
    places, numbers = [nothing], [nothing]
    hidden = [parts.weight.new_empty(0, parts.weight.shape[1])]
    before = 0  # states of earlier passes
    for step in passes:
        states = parts.hidden(**step.inputs).flatten(0, 1)
        hidden.append(states[step.predicting.to(states.device)])
        places.append(step.places)
        numbers.append(step.predicting + before)
        before += len(states)
    kept = torch.cat(places)
    check_all_classes(len(parts.weight), len(parts.embeddings))
    check_vocabulary(request.tokens, len(parts.weight), kept)
    states = torch.cat(hidden)
    return KeptStates(states, request.tokens[kept].to(states.device), kept, torch.cat(numbers))


def _log_shared(model: Any, passes: Sequence[Pass]) -> None:
    whole = sum(len(part.path) for step in passes for part in step.parts)
    own = sum(part.own for step in passes for part in step.parts)
    if own < whole:
        kind = type(model).__name__
        logger.debug("%s: %d of %d tokens computed, the others are shared", kind, own, whole)
