"""Truncated sampling: softmaxes over the classes that a sampler left of each row.

The support of all tokens is a sparse matrix of a row a token, in compressed rows (CSR). A head's
logits there are sampled products, which a kernel computes; what is done with them takes a few
passes over a few numbers a token, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedrl.compat.torch import assert_on_device
from fusedrl.ops import _dispatch
from fusedrl.ops.token_log_probs.reference import place_of, rows_of_tokens

_FORM = "pass (ids, offsets), as sampling_support returns them"
_INDICES = (torch.int64, torch.int32)


class Entries(NamedTuple):
    """The classes that are listed, S of them, of N tokens.

    Args:
        ids: int64 ``[S]``, the class of each entry; 0 where it is not read.
        tokens: int64 ``[S]``, the flat token of each entry.
        rows: int64 ``[N]``, the flat row that each token reads, -1 where it is not listed.
        starts: int64 ``[N + 1]``, where the entries of each token start.
        listed: bool ``[N]``, the kept tokens with entries.
        whole: bool, shaped like the tokens: the kept ones without, whose support is all classes.
        places: int64 ``[N]``, the entry of each listed token itself.
    """

    ids: Tensor
    tokens: Tensor
    rows: Tensor
    starts: Tensor
    listed: Tensor
    whole: Tensor
    places: Tensor

    @property
    def some_are_whole(self) -> bool:
        """Whether all classes of some row may be needed.

        Nobody knows in a traced graph, and nobody waits for a device to know.
        """
        on_host = self.whole.is_cpu and _dispatch.has_values(self.whole)
        return not on_host or bool(self.whole.any())

    def allowed(self, classes: int) -> Tensor:
        """The definition: which classes count for each token, bool ``[N, V]``."""
        unlisted = ~self.listed[:, None].expand(-1, classes)
        return unlisted.index_put((self.tokens, self.ids), unlisted.new_ones(()))


def checked(support: Any, count: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """The support of ``count`` tokens as int64, on ``device`` or on any."""
    if not isinstance(support, (tuple, list)) or len(support) != 2:
        raise TypeError(f"support: expected two tensors, got {_dispatch.kind(support)}; {_FORM}")
    for tensor in support:
        _dispatch.check_tensor("support", tensor)
        if tensor.dtype not in _INDICES or tensor.dim() != 1:
            raise ValueError(
                f"support: expected 1-D tensors of int64 or int32, got {tensor.dtype} "
                f"{tuple(tensor.shape)}; {_FORM}"
            )
        _dispatch.check_device("support", tensor, device or support[0].device)
    ids, offsets = (x.to(torch.int64).contiguous() for x in support)
    if len(offsets) != count + 1:
        raise ValueError(
            f"support: expected offsets of {count + 1} elements for {count} tokens, got "
            f"{len(offsets)}; give each token a row, an empty one where all classes count"
        )
    if offsets.is_cpu and _dispatch.has_values(offsets):
        _check_offsets(offsets, len(ids))
    elif not offsets.is_meta:
        fit = (offsets.diff() >= 0).all() & (offsets[0] == 0) & (offsets[-1] == len(ids))
        assert_on_device(
            fit,
            "support: expected offsets from 0 to the number of ids that do not decrease, got "
            "others",
        )
    return ids, offsets


def _check_offsets(offsets: Tensor, count: int) -> None:
    falling = (offsets.diff() < 0).nonzero()
    if len(falling):
        raise ValueError(
            f"support: expected offsets that do not decrease, got a decrease behind "
            f"{int(falling[0])}; {_FORM}"
        )
    first, last = int(offsets[0]), int(offsets[-1])
    if (first, last) != (0, count):
        raise ValueError(
            f"support: expected offsets from 0 to {count}, the number of ids, got {first} to "
            f"{last}; {_FORM}"
        )


def entries_of(
    support: Any,
    tokens: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    shift: bool,
    classes: int,
) -> Entries | None:
    """The entries of a support; ``None`` without one, and where no row is truncated.

    Entries of dropped tokens are not read. Raises ``RuntimeError`` for ids out of range or order,
    and for a token that is not among its own; where these are not on the CPU it is an assert on
    their device.
    """
    if support is None:
        return None
    ids, starts = checked(support, tokens.numel(), tokens.device)
    if len(ids) == 0:
        return None
    rows, keep = rows_of_tokens(tokens, offsets, shift)
    if mask is not None:
        keep = keep & mask.flatten()
    there = starts.diff() > 0
    listed = keep & there
    at = torch.arange(len(ids), device=ids.device)
    of_entries = torch.repeat_interleave(starts.diff(), output_size=len(ids))
    # Indexing with a tensor takes a CPU several times as long as index_select().
    read, flat = listed.index_select(0, of_entries), tokens.flatten().to(torch.int64)
    inside = (ids >= 0) & (ids < classes)
    follows = torch.zeros_like(read)
    follows[1:] = (of_entries[1:] == of_entries[:-1]) & (ids[1:] <= ids[:-1])
    own = read & (ids == flat.index_select(0, of_entries))
    behind = torch.zeros_like(rows).index_add(0, of_entries, torch.where(own, at + 1, 0))
    problems = {
        "ids": read & ~inside,
        "order": read & follows,
        "tokens": listed & (behind == 0),
    }
    if ids.is_cpu and _dispatch.has_values(ids):
        _refuse(problems, ids, of_entries, tokens, classes)
    elif not ids.is_meta:
        for name, bad in problems.items():
            assert_on_device(~bad.any(), f"support: expected {_EXPECTED[name]}, got others")
    return Entries(
        torch.where(read & inside, ids, 0),
        of_entries,
        torch.where(listed, rows, -1),
        starts,
        listed,
        (keep & ~there).view(tokens.shape),
        (behind - 1).clamp(min=0),
    )


_EXPECTED = {
    "ids": "ids in [0, V)",
    "order": "the ids of a token in ascending order, each once",
    "tokens": "every kept token among its own ids",
}


def _refuse(
    problems: dict[str, Tensor], ids: Tensor, of_entries: Tensor, tokens: Tensor, classes: int
) -> None:
    for name, bad in problems.items():
        if not bool(bad.any()):
            continue
        at = int(bad.nonzero()[0])
        token = at if name == "tokens" else int(of_entries[at])
        place = place_of(token, tokens.shape)
        if name == "ids":
            raise RuntimeError(
                f"support: expected ids in [0, {classes}), got {int(ids[at])} at {place}; mask the "
                "token, or take the ids of this model's sampler"
            )
        if name == "order":
            raise RuntimeError(
                f"support: expected the ids of a token in ascending order, each once, got "
                f"{int(ids[at])} behind {int(ids[at - 1])} at {place}; sort them, and drop repeats"
            )
        raise RuntimeError(
            f"support: expected every kept token among its own ids, got {int(tokens.flatten()[at])}"
            f" at {place}, which is not; mask the token, or compute the support from the logits "
            "that it was sampled from"
        )


def selected(support: tuple[Tensor, Tensor], places: Tensor) -> tuple[Tensor, Tensor]:
    """The support of the tokens at ``places`` of all tokens, in this order."""
    ids, starts = support
    counts = starts.diff()[places]
    ends = counts.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    skipped = torch.repeat_interleave(
        starts[:-1][places] - ends + counts, counts, output_size=total
    )
    at = skipped + torch.arange(total, device=ids.device)
    return ids[at], torch.cat((ends.new_zeros(1), ends))


def joined(
    entries: Entries,
    values: Tensor,
    temperature: Tensor,
    entropy: bool,
    of_whole: Callable[[Tensor], Any],
) -> tuple[Tensor, Tensor | None]:
    """Log-probs and entropies of all tokens from the entries' logits ``values``.

    ``of_whole(mask)`` is the op over all classes, for those tokens of which none is left out.
    """
    of_listed = _log_softmax(entries, values, temperature, entropy)
    log_probs, row_entropy = (None if x is None else x.view_as(entries.whole) for x in of_listed)
    assert log_probs is not None
    if not entries.some_are_whole:
        return log_probs, row_entropy
    others = of_whole(entries.whole)
    if row_entropy is None:
        return log_probs + others, None
    return log_probs + others.log_probs, row_entropy + others.entropy


def _log_softmax(
    entries: Entries, values: Tensor, temperature: Tensor, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Those of the listed tokens, ``[N]``; 0 elsewhere."""
    listed, of_entries = entries.listed, entries.tokens
    z = torch.where(listed.index_select(0, of_entries), values, 0).double() / temperature
    zeros = z.new_zeros(len(listed))
    none = torch.full_like(zeros, -torch.inf)
    largest = none.scatter_reduce(0, of_entries, z.detach(), "amax")
    d = z - largest.index_select(0, of_entries)
    log_sum = torch.where(listed, zeros.index_add(0, of_entries, d.exp()), 1).log()
    own = d.index_select(0, entries.places)
    log_probs = torch.where(listed, own - log_sum, 0).to(values.dtype)
    if not entropy:
        return log_probs, None
    log_p = d - log_sum.index_select(0, of_entries)
    p = log_p.exp()
    p_log_p = p * log_p.masked_fill(p == 0, 0)
    row_entropy = zeros.index_add(0, of_entries, -p_log_p)
    return log_probs, torch.where(listed, row_entropy, 0).to(values.dtype)


def of_logits(logits: Tensor, entries: Entries) -> Tensor:
    """The logits ``[S]`` of the entries, in float32."""
    rows, length = entries.rows.clamp(min=0).index_select(0, entries.tokens), logits.shape[-2]
    place = (rows,) if logits.dim() == 2 else (rows // length, rows % length)
    return logits[(*place, entries.ids)].to(_dispatch.result_dtype(logits))
