"""Plan the forward passes of a call, and compute the hidden states that predict kept tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from operator import index as int_of
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fusedrl.channel.follow import one_version
from fusedrl.compat.torch import buffers_of, parameters_of
from fusedrl.compat.transformers import has_reentrant_checkpoints
from fusedrl.models.capabilities import capabilities_of
from fusedrl.models.comparison import UNCOMPILED, Capabilities
from fusedrl.models.forwards import (
    Pass,
    Scored,
    check_limit,
    nothing_of,
    passes_of,
    scored_sequences,
)
from fusedrl.models.other_adapters import OtherAdapters
from fusedrl.models.ranks import Step, together
from fusedrl.models.split import (
    Parts,
    chain_of,
    device_of,
    modules_of,
    text_config,
    vocabulary_of,
)

# Largest offset of learned positions, as in OPT and BART.
_OFFSET = 8


class Plan(NamedTuple):
    """The forward passes of a call that scores the kept ones of ``tokens``, ``[N]`` on the CPU."""

    model: Any
    tokens: Tensor
    kwargs: dict[str, Any]
    capabilities: Capabilities
    passes: list[Pass]
    step: Step

    @property
    def places(self) -> Tensor:
        """Places of the kept tokens among all packed tokens, in the order of the passes."""
        return torch.cat([one.places for one in self.passes])

    def placed(self, values: Tensor) -> Tensor:
        """A column ``[N, ...]`` with ``values`` at the places of the kept tokens, 0 elsewhere."""
        column = values.new_zeros(len(self.tokens), *values.shape[1:])
        return column.index_copy(0, self.places.to(values.device), values)

    @property
    def follows(self) -> bool:
        """Whether a pass uses a mask that lets sequences share tokens."""
        return any(one.follows for one in self.passes)


@contextmanager
def planned(
    model: Any,
    tokens: Tensor,
    lengths: Any,
    mask: Tensor | None,
    max_tokens_per_forward: int | None,
    share_prefixes: bool,
    model_kwargs: Mapping[str, Any] | None,
) -> Iterator[Plan]:
    """Check the arguments and plan the forward passes to make in the block.

    In the block, the weights of the model stay at one version. All ranks of a model run the same
    number of passes.
    """
    with together("log-probs", model) as step:
        lengths = [int_of(n) for n in lengths]
        _check_packed(tokens, lengths, mask)
        check_limit(max_tokens_per_forward)
        context: Any = nullcontext()
        if isinstance(model, OtherAdapters):
            model, context = model.adapted, model.chosen()
        tokens = tokens.cpu().long()
        check_vocabulary(tokens, vocabulary_of(model))
        check_context(model, lengths)
        work = scored_sequences(tokens, lengths, mask)
        kwargs = dict(model_kwargs or {})
        with context, one_version(model):
            found = capabilities_of(model, kwargs, step)
            limit = max_tokens_per_forward
            passes = _passes(model, found, tokens, work, limit, share_prefixes, step)
            most = max(1, *step.largest(len(passes)))
            passes += [nothing_of(tokens, device_of(model))] * (most - len(passes))
            yield Plan(model, tokens, kwargs, found, passes, step)


def _check_packed(tokens: Tensor, lengths: list[int], mask: Tensor | None) -> None:
    """Refuse tokens or a mask of another shape or dtype."""
    no_integers = tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool
    if tokens.dim() != 1 or no_integers or sum(lengths) != len(tokens):
        raise ValueError(
            f"tokens: expected [{sum(lengths)}] integers, the sum of the lengths, got "
            f"{tuple(tokens.shape)} of {tokens.dtype}; concatenate the sequences"
        )
    if mask is not None and (mask.shape != tokens.shape or mask.dtype != torch.bool):
        raise ValueError(
            f"mask: expected bool of shape {tuple(tokens.shape)}, got {mask.dtype} of shape "
            f"{tuple(mask.shape)}; convert it with .bool(), and concatenate the sequences' masks"
        )


def check_context(model: Any, lengths: Sequence[int]) -> None:
    """Refuse a sequence that is longer than a table of positions of the model, if it has one.

    Exceeding the table on a GPU would abort the process. It may be learned, or precomputed sines or
    a causal mask. Rotary embeddings, ALiBi and recurrent states have no such limit.
    """
    model = chain_of(model)[-1]
    context = getattr(text_config(model), "max_position_embeddings", None)
    longest = max(lengths, default=0)
    if not isinstance(context, int) or longest <= context:
        return
    inputs = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    for module in model.modules():
        rows = getattr(module, "num_embeddings", None)
        learned = isinstance(rows, int) and module is not inputs and 0 <= rows - context <= _OFFSET
        tables = [*buffers_of(module).values()]
        tables += [weight for name, weight in parameters_of(module).items() if "pos" in name]
        if learned or any(x is not None and x.dim() > 1 and context in x.shape for x in tables):
            raise ValueError(
                f"tokens: sequence {lengths.index(longest)}: expected at most {context} tokens, "
                f"the model's context, got {longest}; truncate or split it"
            )


def check_vocabulary(tokens: Tensor, size: int | None, places: Tensor | None = None) -> None:
    """Refuse ids outside ``[0, size)``, of all tokens or of those at ``places``."""
    outside = (tokens < 0) | (tokens >= (torch.inf if size is None else size))
    if places is not None:
        outside &= torch.zeros_like(outside).index_fill(0, places, True)
    if bool(outside.any()):
        i = int(outside.nonzero()[0])
        raise ValueError(
            f"tokens: expected ids in [0, {'V' if size is None else size}), the model's "
            f"vocabulary, got {int(tokens[i])} at token {i}; use the model's tokenizer, or "
            "resize_token_embeddings"
        )


def check_all_classes(classes: int, embedded: int | None) -> None:
    """Refuse logits of one shard of a vocabulary, which would give wrong log-probs.

    A head may have a few classes less than the model embeds ids, but a shard has at most half.
    """
    if embedded is not None and classes <= (embedded + 1) // 2:
        raise ValueError(
            f"model: expected logits of the {embedded} ids that it embeds, got only {classes}, as "
            "from a head that is sharded over the vocabulary; gather its logits, or pass the shard "
            "to linear_token_log_probs with vocab_offset= and vocab_group="
        )


def _passes(
    model: Any,
    found: Capabilities,
    tokens: Tensor,
    work: list[Scored],
    limit: int | None,
    share: bool,
    step: Step,
) -> list[Pass]:
    """The forward passes over the kept tokens, whose ids are checked against the head."""
    if found.parts is not None:
        classes = len(found.parts.head.weight)
        check_all_classes(classes, len(found.parts.embeddings))
        places = [row.kept + row.start for row in work] or [tokens[:0]]
        check_vocabulary(tokens, classes, torch.cat(places))
    modules = modules_of(model) if step.call is not None and torch.is_grad_enabled() else []
    ddp = [each for each in modules if isinstance(each, DistributedDataParallel)]
    syncs = any(each.require_backward_grad_sync and not each.static_graph for each in ddp)
    # With reentrant checkpoints, each pass would mark the gradients as ready for DDP once more.
    one_pass = syncs and any(map(has_reentrant_checkpoints, modules))
    width = max((len(row.tokens) for row in work), default=1)
    if one_pass and len(work) * width**2 < len(tokens) ** 2:  # cost of attention
        found = found._replace(parts=None)  # a padded batch instead of a packed row
    # Wrappers such as DDP may expect one forward pass per backward pass.
    if one_pass or (step.call is not None and found.parts is None):
        limit = limit or max(len(work), 1) * width
    return passes_of(model, found, work, limit, share)


def at_kept_states(
    plan: Plan, parts: Parts, function: Callable[[Tensor], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """``function`` applied to the hidden states ``[K, H]`` that predict the kept tokens.

    Call it in the block of :func:`planned`. ``function`` runs while the head's weight is gathered.
    """

    def compute() -> tuple[Tensor, ...]:
        hidden, autocast = [], plan.capabilities.autocast
        with torch.autocast(parts.weight.device.type, autocast, autocast is not None):
            with plan.step.collective():
                for one in plan.passes:
                    states = parts.hidden(**one.inputs).flatten(0, 1)
                    hidden.append(states[one.predicting.to(states.device)])
            # With a sharded head, ``function`` communicates.
            with plan.step.collective() if parts.sharded else nullcontext():
                return parts.at_head(torch.cat(hidden), function)

    def run() -> tuple[Tensor, ...]:
        with UNCOMPILED if plan.follows else nullcontext():
            return parts.within(compute, plan.passes[0].inputs["input_ids"])

    # Compiled code around or inside the decoder would be recompiled for each tree, whose mask it
    # cannot guard on.
    called: Any = torch.compiler.disable(run) if plan.follows else run
    return called()
