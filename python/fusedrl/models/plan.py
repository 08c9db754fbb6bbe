"""The forward passes of a call, and the hidden states in them that predict its kept tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fusedrl.channel.following import one_version
from fusedrl.compat.transformers import attention_of, has_reentrant_checkpoints
from fusedrl.models import forwards
from fusedrl.models.capabilities import (
    Capabilities,
    capabilities_of,
    known_capabilities,
    may_share,
)
from fusedrl.models.checks import (
    check_all_classes,
    check_context,
    check_model,
    check_sequences,
    check_vocabulary,
)
from fusedrl.models.comparison import UNCOMPILED
from fusedrl.models.prefix_tree import Part
from fusedrl.models.ranks import FROM_LOGITS, FROM_STATES, Step, together
from fusedrl.models.sequences import Pass, Scored, nothing_of, passes_of, scored_sequences
from fusedrl.models.split import Parts, autocast_as, device_of, modules_of, unwrapped, vocabulary_of

logger = logging.getLogger("fusedrl")


class Plan(NamedTuple):
    """The forward passes of a call of :func:`causal_log_probs` or its like.

    Args:
        model: the model to call.
        tokens: packed token ids ``[N]``, on the CPU.
        kwargs: further arguments of the model's forward pass, used when its logits are needed.
        capabilities: what the model allows.
        passes: at least one, over the kept tokens.
        step: what the ranks of the model agree on.
    """

    model: Any
    tokens: Tensor
    kwargs: dict[str, Any]
    capabilities: Capabilities
    passes: list[Pass]
    step: Step

    @property
    def places(self) -> Tensor:
        """Places of the kept tokens in the pack, in the order of the passes."""
        return torch.cat([one.places for one in self.passes])

    def placed(self, values: Tensor) -> Tensor:
        """A column ``[N, ...]`` with ``values`` at the places of the kept tokens, 0 elsewhere."""
        column = values.new_zeros(len(self.tokens), *values.shape[1:])
        return column.index_copy(0, self.places.to(values.device), values)

    @property
    def shares(self) -> bool:
        """Whether sequences share tokens in any pass."""
        return any(one.shares for one in self.passes)

    def distinct(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of kept tokens without those that one state predicts more than once.

        Args:
            tokens: the kept tokens, ``[K]``, on the CPU.

        Returns:
            Which rows these are, and which of them each row is.
        """
        before = accumulate((one.inputs["input_ids"].numel() for one in self.passes), initial=0)
        numbered = zip(self.passes, before, strict=False)
        states = torch.cat([one.predicting + first for one, first in numbered])
        found, which = ((states << 32) + tokens).unique(return_inverse=True)  # ids have 31 bits
        first = which.new_empty(len(found))
        return first.scatter_(0, which, torch.arange(len(which), device="cpu")), which


@contextmanager
def planned(
    model: Any,
    tokens: Tensor,
    lengths: Sequence[int],
    mask: Tensor | None,
    max_tokens_per_forward: int | None,
    share_prefixes: bool,
    model_kwargs: Mapping[str, Any] | None,
) -> Iterator[Plan]:
    """Check the arguments and plan the forward passes to make in the block.

    The model's weights have one version in the block. Every rank of a model makes as many passes as
    the one with the most.
    """
    with together("log-probs", model) as step:
        lengths = check_sequences(tokens, lengths, mask, max_tokens_per_forward)
        model, context = unwrapped(model)
        check_model(model)
        tokens = tokens.cpu().long()
        check_vocabulary(tokens, vocabulary_of(model))
        check_context(model, lengths)
        work = [row for row in scored_sequences(tokens, lengths, mask) if len(row.kept)]
        kwargs = dict(model_kwargs or {})
        options = max_tokens_per_forward, share_prefixes, step.alone
        with context, one_version(model):
            found = known_capabilities(model, kwargs)
            passes = [] if found is None else _passes(model, found, tokens, work, *options)
            differ, most = step.agree(ways=_ways(found), passes=len(passes))
            if differ or found is None:
                known_ids = int(tokens.max()) + 1 if len(tokens) else 1
                with step.collective():
                    found = capabilities_of(model, known_ids, kwargs, step)
                passes = _passes(model, found, tokens, work, *options)
                _, most = step.agree(passes=len(passes))
            log_shared(model, [part for one in passes for part in one.parts])
            if len(passes) < (most := max(most, 1)):
                device = _device_of(model, found)
                empty = passes_of(found, [nothing_of(tokens)], device, 1, 1, None)
                passes += empty * (most - len(passes))
            yield Plan(model, tokens, kwargs, found, passes, step)


def _ways(found: Capabilities | None) -> int:
    if found is None:
        return FROM_STATES + FROM_LOGITS
    return FROM_LOGITS if found.parts is None else FROM_STATES


def _device_of(model: Any, capabilities: Capabilities) -> torch.device:
    """Where a forward pass begins."""
    parts = capabilities.parts
    return device_of(model) if parts is None else parts.embeddings.device


def _passes(
    model: Any,
    capabilities: Capabilities,
    tokens: Tensor,
    work: list[Scored],
    limit: int | None,
    share: bool,
    alone: bool,
) -> list[Pass]:
    """The forward passes over the kept tokens, after a look whether they are in the head."""
    parts, device, follows = capabilities.parts, _device_of(model, capabilities), False
    may: Callable[[], bool] | None = None
    if parts is not None:
        check_all_classes(parts.classes, len(parts.embeddings))
        places = [row.kept + row.start for row in work] or [tokens[:0]]
        check_vocabulary(tokens, parts.classes, torch.cat(places))
        attention = attention_of(parts.config)
        usual = forwards.tokens_per_forward(device, attention)
        most = max(usual, forwards.SHARING.get(str(attention), 0))
        if capabilities.shares:
            may = partial(may_share, model, parts)
            # A model that gathers its weights for each pass makes fewer passes, of long rows, in
            # which attention then follows the sequences.
            follows = parts.gathered and may()
        usual = most if follows else usual
    else:
        usual = forwards.tokens_per_forward(device, None)
        if not alone:  # what wraps the model may take one forward pass for one backward pass
            usual = max(usual, len(tokens) * len(work))
        most = usual
    limits = limit or usual, limit or most
    passes = passes_of(capabilities, work, device, *limits, may if share else None, follows)
    if alone or len(passes) < 2 or not _takes_one_pass(model):
        return passes
    width = max(len(row.tokens) for row in work)
    if len(work) * width**2 < len(tokens) ** 2:  # as attention takes time
        capabilities = capabilities._replace(parts=None)  # a padded batch, no row
    limit = limit or len(work) * width
    passes = passes_of(capabilities, work, device, limit, limit, may if share else None, follows)
    if len(passes) > 1:
        raise ValueError(
            f"max_tokens_per_forward: expected all tokens in one forward pass, which is all that a "
            f"DistributedDataParallel takes with reentrant checkpoints, got {len(passes)} passes; "
            "leave it out, or enable checkpoints with use_reentrant=False"
        )
    return passes


def _takes_one_pass(model: Any) -> bool:
    """Whether DDP would see a weight's gradient once for each pass: checkpoints bring it anew."""
    modules = modules_of(model) if torch.is_grad_enabled() else []
    ddp = [each for each in modules if isinstance(each, DistributedDataParallel)]
    counts = any(each.require_backward_grad_sync and not each.static_graph for each in ddp)
    return counts and any(map(has_reentrant_checkpoints, modules))


def at_kept_states(
    plan: Plan, parts: Parts, function: Callable[[Tensor], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """What ``function`` makes of the hidden states ``[K, H]`` that predict the kept tokens.

    It runs where the weight of the head is whole, in the block of :func:`planned`.
    """
    # Whatever is compiled around the decoder or called by it would be compiled once for each tree,
    # and cannot guard the tree's mask.
    follows = any(one.follows for one in plan.passes)
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
