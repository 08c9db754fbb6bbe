"""Checks and conversion of the arguments of ``linear_token_log_probs``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedrl.ops import _autograd, _dispatch, _head, _nested, _rows


class Call(NamedTuple):
    """A call whose arguments have been checked.

    Args:
        batch: the form of the results.
        chosen: the implementation that runs.
        of_reference: the arguments of the reference implementation.
        args: the arguments of the compiled ops.
        temperature: the 0-dim temperature.
        needs_grad: whether an autograd function has to record a gradient.
    """

    batch: _nested.Batch
    chosen: str
    of_reference: tuple[Any, ...]
    args: tuple[Any, ...]
    temperature: Tensor
    needs_grad: bool


def prepare(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    softcap: float | None,
    scale: float | None,
    offsets: Tensor | None,
    shift: bool,
    temperature: float | Tensor,
    entropy: bool,
    vocab_offset: int | None,
    batch_invariant: bool,
    impl: str,
) -> Call:
    """Check the arguments, and choose the implementation."""
    _dispatch.check_flags(shift=shift, entropy=entropy, batch_invariant=batch_invariant)
    batch = _nested.pack("hidden", hidden, offsets, like=tokens)
    tokens, mask = batch.companion("tokens", tokens), batch.optional("mask", mask)
    head = _head.prepare("", batch.values, weight, bias, scale, softcap)
    _rows.check_rows("hidden", head.hidden, batch.offsets, shift)
    _rows.check_tokens(tokens, "hidden", head.hidden)
    _dispatch.check_mask(mask, tokens.shape, head.hidden.device)
    device, dtype = head.hidden.device, head.hidden.dtype
    chosen = _dispatch.choose(impl, "linear_token_log_probs", device, dtype, triton=True)
    divisor = _dispatch.temperature_tensor(temperature, device, chosen)
    _dispatch.check_counted_on_host(mask, shift, device)
    if chosen == "reference":
        _dispatch.check_without_kernel("vocab_offset", vocab_offset, None)
        _dispatch.check_without_kernel("batch_invariant", batch_invariant, False)
    rows = (
        tokens.to(torch.int64).contiguous(),
        None if mask is None else mask.contiguous(),
        None if batch.offsets is None else batch.offsets.to(torch.int64).contiguous(),
        *(shift, divisor),
    )
    options = head.scale, head.softcap, entropy, vocab_offset, batch_invariant
    args = (head.hidden, head.weight, head.bias, *rows, *options)
    needs_grad = chosen != "reference" and _autograd.needs_grad(
        hidden=head.hidden, weight=head.weight, bias=head.bias, temperature=divisor
    )
    return Call(batch, chosen, (head, *rows, entropy), args, divisor, needs_grad)


def check_shard(vocab_offset: int | None, vocab_group: ProcessGroup | None) -> None:
    """Refuse ``vocab_offset`` without ``vocab_group``, or the reverse."""
    if (vocab_offset is None) != (vocab_group is None):
        raise ValueError(
            "vocab_offset, vocab_group: expected both for a sharded vocabulary, or neither, got "
            f"{vocab_offset!r} and {vocab_group!r}; pass the first class of this rank's shard and "
            "the group of all shards"
        )
    if vocab_offset is not None:
        check_first_class(vocab_offset)
    if vocab_group is not None and not isinstance(vocab_group, ProcessGroup):
        raise TypeError(
            "vocab_group: expected a torch.distributed.ProcessGroup, got "
            f"{type(vocab_group).__name__}; pass torch.distributed.group.WORLD, or the "
            "result of torch.distributed.new_group"
        )


def check_first_class(vocab_offset: int) -> None:
    """Refuse a value that is not an integer >= 0."""
    if type(vocab_offset) is bool or not isinstance(vocab_offset, int) or vocab_offset < 0:
        raise ValueError(
            f"vocab_offset: expected an integer >= 0, got {vocab_offset!r}; "
            "pass the number of classes in all shards before this one"
        )
