"""Checked sequences for a model, and the hidden states that predict their tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedrl.channel.following import one_version
from fusedrl.compat.transformers import attention_of
from fusedrl.models import forwards
from fusedrl.models.capabilities import (
    Capabilities,
    capabilities_of,
    known_capabilities,
    may_share,
)
from fusedrl.models.checks import (
    check_all_classes,
    check_model,
    check_sequences,
    check_vocabulary,
    context_checked,
)
from fusedrl.models.comparison import UNCOMPILED
from fusedrl.models.prefix_tree import Part
from fusedrl.models.ranks import Step
from fusedrl.models.sequences import Pass, Scored, nothing_of, passes_of, scored_sequences
from fusedrl.models.split import Parts, autocast_as, device_of, unwrapped, vocabulary_of

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

    @contextmanager
    def opened(self, step: Step) -> Iterator[Plan]:
        """The forward passes to make, in a block in which the model's weights have one version.

        Every rank of a model makes as many as the one with the most, and has an error at the end of
        the block where another one has.
        """
        with self.context, context_checked(self.model, self.lengths), one_version(self.model):
            found = known_capabilities(self.model, self.kwargs)
            passes = [] if found is None else self._passes(found, step.alone)
            tries, most = step.agree(tries=found is None, passes=len(passes))
            if tries or found is None:
                known_ids = int(self.tokens.max()) + 1 if len(self.tokens) else 1
                found = capabilities_of(self.model, known_ids, self.kwargs, step)
                passes = self._passes(found, step.alone)
                _, most = step.agree(passes=len(passes))
            log_shared(self.model, [part for one in passes for part in one.parts])
            if not step.alone:
                passes += [self._empty_pass(found)] * (max(most, 1) - len(passes))
            yield Plan(found, passes, step)
            step.close()

    def _passes(self, capabilities: Capabilities, alone: bool) -> list[Pass]:
        """The forward passes over the kept tokens, after a look whether they are in the head."""
        work = [row for row in self.work if len(row.kept)]
        parts = capabilities.parts
        if parts is not None:
            check_all_classes(parts.classes, len(parts.embeddings))
            places = [row.kept + row.start for row in work] or [self.tokens[:0]]
            check_vocabulary(self.tokens, parts.classes, torch.cat(places))
            device = parts.embeddings.device
            attention = attention_of(parts.config)
            limit = forwards.tokens_per_forward(device, attention)
            most = max(limit, forwards.SHARING.get(str(attention), 0))
            # A model that gathers its weights for each pass makes fewer passes, of long rows, in
            # which attention then follows the sequences.
            follows = capabilities.shares and parts.gathered and may_share(self.model, parts)
            limit = most if follows else limit
        else:
            device = device_of(self.model)
            limit = forwards.tokens_per_forward(device, None)
            if not alone:  # what wraps the model may take one forward pass for one backward pass
                limit = max(limit, len(self.tokens) * len(work))
            most = limit
            follows = False
        limits = self.limit or limit, self.limit or most
        may = self._may_share(capabilities)
        return passes_of(capabilities, work, device, *limits, may, follows)

    def _may_share(self, capabilities: Capabilities) -> Callable[[], bool] | None:
        """Says whether common beginnings may be shared; ``None`` if they need not be looked for."""
        parts = capabilities.parts
        if parts is None or not (self.share and capabilities.shares):
            return None
        return partial(may_share, self.model, parts)

    def _empty_pass(self, capabilities: Capabilities) -> Pass:
        """A pass over one token in which nothing is scored."""
        parts = capabilities.parts
        device = device_of(self.model) if parts is None else parts.embeddings.device
        return passes_of(capabilities, [nothing_of(self.tokens)], device, 1, 1, None)[0]

    def placed(self, values: Tensor, places: Tensor) -> Tensor:
        """A column ``[N, ...]`` with ``values`` at ``places`` and 0 elsewhere."""
        column = values.new_zeros(len(self.tokens), *values.shape[1:])
        return column.index_copy(0, places.to(values.device), values)


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


class Plan(NamedTuple):
    """What a model allows, and the forward passes that a request makes of it."""

    capabilities: Capabilities
    passes: list[Pass]
    step: Step

    @property
    def places(self) -> Tensor:
        """Places of the kept tokens in the pack, in the order of the passes."""
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        return torch.cat([none, *(step.places for step in self.passes)])

    @property
    def shares(self) -> bool:
        """Whether sequences share tokens in any pass."""
        return any(step.shares for step in self.passes)

    def distinct(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of kept tokens without those that one state predicts more than once.

        Args:
            tokens: the kept tokens, ``[K]``, on the CPU.

        Returns:
            Which rows these are, and which of them each row is.
        """
        before = accumulate((step.inputs["input_ids"].numel() for step in self.passes), initial=0)
        numbered = zip(self.passes, before, strict=False)
        states = torch.cat([step.predicting + first for step, first in numbered])
        found, which = ((states << 32) + tokens).unique(return_inverse=True)  # ids have 31 bits
        first = which.new_empty(len(found))
        return first.scatter_(0, which, torch.arange(len(which), device="cpu")), which


def at_kept_states(
    plan: Plan, parts: Parts, function: Callable[[Tensor], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """What ``function`` makes of the hidden states ``[K, H]`` that predict the kept tokens.

    It runs where the weight of the head is whole, in a block that ``opened`` began.
    """
    # Whatever is compiled around the decoder or called by it would be compiled once for each tree,
    # and cannot guard the tree's mask.
    follows = any(step.follows for step in plan.passes)
    run: Any = torch.compiler.disable(_uncompiled) if follows else _at_kept_states
    return run(plan, parts, function)


def _uncompiled(
    plan: Plan, parts: Parts, function: Callable[[Tensor], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    with UNCOMPILED:
        return _at_kept_states(plan, parts, function)


def _at_kept_states(
    plan: Plan, parts: Parts, function: Callable[[Tensor], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    def compute() -> tuple[Tensor, ...]:
        hidden = []
        with autocast_as(parts.weight.device, plan.capabilities.autocast):
            with plan.step.collective():
                for one in plan.passes:
                    states = parts.hidden(**one.inputs).flatten(0, 1)
                    hidden.append(states[one.predicting.to(states.device)])
            # Ranks with parts of a head put together what it makes.
            with plan.step.collective() if parts.shard else nullcontext():
                return parts.at_head(torch.cat(hidden), function)

    return parts.within(compute, plan.passes[0].inputs["input_ids"])


def log_shared(model: Any, parts: Sequence[Part]) -> None:
    """Say at debug level how many tokens of sequences are computed, if they share some."""
    whole = sum(len(part.path) for part in parts)
    own = sum(part.own for part in parts)
    if own < whole:
        kind = type(model).__name__
        logger.debug("%s: %d of %d tokens computed, the others are shared", kind, own, whole)
