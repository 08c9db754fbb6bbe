"""Attention for sequences that share prefixes, as a mask that computes attention itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fusedrl.compat.torch import map_leaves
from fusedrl.compat.transformers import attention_of
from fusedrl.models.prefix_tree import BLOCK, Part, laid_out
from fusedrl.models.split import Parts

# Default limit of tokens in a row whose sequences share prefixes, for the attentions that support a
# mask. Longer rows share more; eager attention stores the square of the length.
SHARING = {"sdpa": 4096, "eager": 1024}

# Model types with a sliding window in every layer, and those with one in some layers, which accept
# one mask per kind of layer. Other types ignore the window of their configuration.
_WINDOWED = frozenset(("mistral", "mixtral", "phi3", "qwen3_moe", "starcoder2"))
_MIXED = frozenset(("gemma2", "gemma3_text", "qwen2", "qwen2_moe", "qwen3", "smollm3"))
# Limit of the keys gathered for one call of attention, in rows. Without it a layer would copy the
# complete keys of every sequence at once.
MOST_GATHERED = 4
# Attributes and methods that do not need the dense mask.
_METADATA = {getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device")}
_METADATA |= {Tensor.dim, Tensor.size, Tensor.__len__}


class Tree:
    """Attention in a row of tokens, each of which attends to the tokens of its sequence.

    With a ``window``, it attends to at most this many of the last keys.
    """

    def __init__(
        self, parts: Sequence[Part], window: int | None, device: str | torch.device
    ) -> None:
        self.parts = _joined(parts)
        self.window = window
        self.length = sum(len(part.own) for part in self.parts)
        self._masks: dict[tuple[int, int], Tensor] = {}
        # Places of the queries and keys of each call of attention.
        self._calls: list[tuple[Tensor | slice, Tensor | slice]] = []
        # The index of each token in the concatenated results of the calls.
        order = torch.zeros(self.length, dtype=torch.int64, device="cpu")
        first = 0
        for group in _grouped(self.parts, MOST_GATHERED * self.length):
            queries = [part.own for part in group]
            paths = [part.path for part in group]
            self._calls.append((_places(queries, device), _places(paths, device)))
            for own in queries:
                order[own] = torch.arange(first, first + len(own), device="cpu")
                first += len(queries[0])
        dense = torch.equal(order, torch.arange(first, device="cpu"))
        self._order = None if dense else order.to(device)

    def dense(self, device: torch.device) -> Tensor:
        """The dense mask, bool ``[T, T]``: which columns each row attends to."""
        mask = torch.zeros(self.length, self.length, dtype=torch.bool, device=device)
        for part in self.parts:
            chosen = self._chosen(len(part.own), len(part.path), device)
            mask[part.own.to(device)[:, None], part.path.to(device)] = chosen
        return mask

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Attention ``[B, H, T, D]`` that reads only a sequence's keys; ``options`` are torch's."""
        attended = []
        for queries, keys in self._calls:
            q, k, v = _rows(query, queries), _rows(key, keys), _rows(value, keys)
            own, length = q.shape[2], k.shape[2]
            causal: dict[str, Any] = {"is_causal": True}
            if own < length or self.window is not None:
                causal = {"attn_mask": self._chosen(own, length, query.device)}
            out = scaled_dot_product_attention(q, k, v, **options, **causal)
            attended.append(out.unflatten(0, (len(query), -1)).transpose(1, 2).flatten(2, 3))
        row = torch.cat(attended, 2)
        return row if self._order is None else row.index_select(2, self._order)

    def _chosen(self, own: int, length: int, device: torch.device) -> Tensor:
        """The mask ``[own, length]`` of the last ``own`` of ``length`` tokens."""
        mask = self._masks.get((own, length))
        if mask is None or mask.device != device:
            mask = torch.ones(own, length, dtype=torch.bool, device=device).tril(length - own)
            mask = mask if self.window is None else mask.triu(length - own - self.window + 1)
            self._masks[own, length] = mask
        return mask


def _joined(parts: Sequence[Part]) -> list[Part]:
    """The parts that have unshared tokens; a part that extends the one before replaces it."""
    joined: list[Part] = []
    for part in parts:
        if not len(part.own):
            continue
        if joined and part.shared == len(joined[-1].path):
            part = Part(part.path, joined.pop().shared)
        joined.append(part)
    return joined


def _grouped(parts: Sequence[Part], room: int) -> list[list[Part]]:
    """Groups of parts for one call each, with equally many shared and similarly many own tokens.

    The longest is first. A call with several parts has at most ``room`` keys.
    """
    groups: list[list[Part]] = []
    for part in sorted(parts, key=lambda part: (part.shared, -len(part.path))):
        longest = groups[-1][0] if groups else None
        if (
            longest is None
            or part.shared != longest.shared
            or len(longest.path) - len(part.path) > max(len(longest.own) // 4, BLOCK)
            or (len(groups[-1]) + 1) * len(longest.path) > room
        ):
            groups.append([])
        groups[-1].append(part)
    return sorted(groups, key=lambda group: min(int(part.own[0]) for part in group))


def _places(paths: Sequence[Tensor], device: str | torch.device) -> Tensor | slice:
    """Paths as ``[n, t]``, padded with their last places; a slice for a single contiguous one."""
    first, size = int(paths[0][0]), len(paths[0])
    if len(paths) == 1 and int(paths[0][-1]) - first == size - 1:
        return slice(first, first + size)
    rows = [torch.cat((path, path[-1:].expand(size - len(path)))) for path in paths]
    return torch.stack(rows).to(device)


def _rows(states: Tensor, places: Tensor | slice) -> Tensor:
    """States ``[B, H, T, D]`` at places ``[n, t]``, as ``[B n, H, t, D]``."""
    if isinstance(places, slice):
        return states[:, :, places]
    chosen = states.index_select(2, places.flatten())
    return chosen.unflatten(2, places.shape).transpose(1, 2).flatten(0, 1)


class TreeMask(Tensor):
    """A mask ``[1, 1, T, T]`` with which ``scaled_dot_product_attention`` follows a :class:`Tree`.

    Any other function gets the dense bool mask, which is computed then. The mask holds the tree, so
    that the recomputation of a checkpointed layer uses the same one.
    """

    tree: Tree

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Attention by the tree, or ``func`` with the dense bool mask."""
        kwargs = dict(kwargs or {})
        if func is scaled_dot_product_attention and len(args) == 3:
            mask, _ = kwargs.pop("attn_mask"), kwargs.pop("is_causal", False)
            return mask.tree.attend(*args, **kwargs)
        if func in _METADATA:
            return super().__torch_function__(func, types, args, kwargs)

        def dense(value: Any) -> Any:
            is_mask = isinstance(value, TreeMask)
            return value.tree.dense(value.device)[None, None] if is_mask else value

        args, kwargs = map_leaves(dense, (args, kwargs))
        return func(*args, **kwargs)


def row_of(
    rows: Sequence[Tensor], shared: Sequence[int], model: Parts, follows: bool = False
) -> tuple[list[Part], dict[str, Any]]:
    """The places of sequences in one row, and the row as inputs of a model's decoder.

    ``shared`` has the number of tokens that each shares with the one before it. Sequences are
    separated by restarting positions, or by a mask if any share tokens or attention ``follows``.
    """
    device = model.embeddings.device
    parts = laid_out([len(row) for row in rows], shared)
    own = list(zip(rows, shared, strict=True))
    ids = torch.cat([row[n:] for row, n in own])
    positions = torch.cat([torch.arange(n, len(row), device="cpu") for row, n in own])
    inputs = {"input_ids": ids[None].to(device), "position_ids": positions[None].to(device)}
    if follows or any(shared):
        inputs["attention_mask"] = _mask_of(parts, model)
    return parts, inputs


def _mask_of(parts: Sequence[Part], model: Parts) -> Any:
    """The ``attention_mask`` of a decoder; a dict by kind of layer if there are two."""
    config, like = model.config, model.embeddings
    mixed = config.model_type in _MIXED
    window = config.sliding_window if mixed or config.model_type in _WINDOWED else None
    if window is not None and window >= max(len(part.path) for part in parts):
        window = None

    def mask_of(window: int | None) -> Tensor:
        tree = Tree(parts, window, like.device)
        if attention_of(config) == "sdpa":
            nothing = torch.zeros((), dtype=torch.bool, device=like.device)
            mask = nothing.expand(1, 1, tree.length, tree.length).as_subclass(TreeMask)
            mask.tree = tree
            return mask
        allowed = tree.dense(like.device)[None, None]
        # Filled in this dtype, because its lowest value may not exist in the default dtype.
        nothing = torch.zeros(allowed.shape, dtype=like.dtype, device=like.device)
        return nothing.masked_fill_(~allowed, torch.finfo(like.dtype).min)

    if not mixed:
        return mask_of(window)
    full = mask_of(None)
    return {
        "full_attention": full,
        "sliding_attention": full if window is None else mask_of(window),
    }
