"""The attention of sequences that share their beginnings, as a mask that knows how to attend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fusedrl.compat.transformers import attention_of
from fusedrl.models.prefix_tree import Part

# Types of decoders that have the window of their configuration in every layer, and those that have
# it in some and take a mask for each kind of layer. Others ignore what their configuration says.
_WINDOWED = frozenset(("mistral", "mixtral", "phi3", "qwen3_moe", "starcoder2"))
_MIXED = frozenset(("gemma2", "gemma3_text", "qwen2", "qwen2_moe", "qwen3", "smollm3"))
# What is asked of a mask without making it.
_ASKED = {getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device")}
_ASKED |= {Tensor.dim, Tensor.size, Tensor.__len__}


class Tree:
    """Attention in a row of tokens, each of which attends to the tokens of its own sequence.

    Args:
        parts: where each sequence is in the row.
        window: how many keys a token attends to at most, the last ones; ``None`` for all.
        device: where the row is computed.
    """

    def __init__(
        self, parts: Sequence[Part], window: int | None, device: str | torch.device
    ) -> None:
        self.parts = [part for part in parts if part.own]
        self.window = window
        self.length = sum(part.own for part in parts)
        self._masks: dict[tuple[int, int], Tensor] = {}
        # Many are gathered at once, because the backward pass of each gather writes all keys; not
        # all of them, because a layer would then have the keys of every sequence in full.
        groups: list[list[Tensor]] = []
        room = 0
        for path in (part.path for part in self.parts if part.own < len(part.path)):
            if len(path) > room:
                groups.append([])
                room = self.length
            groups[-1].append(path)
            room -= len(path)
        self._gathers = [(torch.cat(paths).to(device), list(map(len, paths))) for paths in groups]

    def dense(self, device: torch.device) -> Tensor:
        """Which tokens (the columns) each token (the row) attends to, bool ``[T, T]``."""
        mask = torch.zeros(self.length, self.length, dtype=torch.bool, device=device)
        for part in self.parts:
            chosen = self._chosen(part.own, len(part.path), device)
            mask[part.first : part.first + part.own, part.path.to(device)] = chosen
        return mask

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Attention ``[B, H, T, D]``, without the keys of other sequences.

        Args:
            query: ``[B, H, T, D]``, and so are the others.
            key: may have fewer heads, with ``enable_gqa=True``.
            value: as ``key``.
            options: further arguments of ``scaled_dot_product_attention``.
        """
        branches = self._branches(key, value)
        # At once, because the backward pass of each slice would write a whole row.
        pieces = [x.split([part.own for part in self.parts], 2) for x in (query, key, value)]
        attended = []
        for part, queries, keys, values in zip(self.parts, *pieces, strict=True):
            own, length = part.own, len(part.path)
            if own < length:
                keys, values = next(branches)
            causal: dict[str, Any] = {"is_causal": True}
            if own < length or self.window is not None:
                causal = {"attn_mask": self._chosen(own, length, query.device)}
            attended.append(
                scaled_dot_product_attention(queries, keys, values, **options, **causal)
            )
        return torch.cat(attended, 2)

    def _branches(self, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values of each sequence that begins with tokens of another."""
        for places, sizes in self._gathers:
            yield from zip(
                *(x.index_select(2, places).split(sizes, 2) for x in (key, value)), strict=True
            )

    def _chosen(self, own: int, length: int, device: torch.device) -> Tensor:
        """Which of ``length`` tokens the last ``own`` of them attend to."""
        mask = self._masks.get((own, length))
        if mask is None or mask.device != device:
            mask = torch.ones(own, length, dtype=torch.bool, device=device).tril(length - own)
            mask = mask if self.window is None else mask.triu(length - own - self.window + 1)
            self._masks[own, length] = mask
        return mask


class TreeMask(Tensor):
    """A mask ``[1, 1, T, T]`` with which ``scaled_dot_product_attention`` follows a :class:`Tree`.

    Any other function gets the bool tensor that it stands for, which is made then. As the mask
    knows the tree, gradient checkpointing runs a layer in the same way once more, and nothing
    changes for other threads.
    """

    tree: Tree

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Attention by the tree, or what ``func`` makes of the bool tensor."""
        kwargs = dict(kwargs or {})
        if func is scaled_dot_product_attention and len(args) == 3:
            mask, _ = kwargs.pop("attn_mask"), kwargs.pop("is_causal", False)
            return mask.tree.attend(*args, **kwargs)
        if func in _ASKED:
            return super().__torch_function__(func, types, args, kwargs)
        return func(*map(_made, args), **{name: _made(value) for name, value in kwargs.items()})


def _made(value: Any) -> Any:
    if isinstance(value, TreeMask):
        return value.tree.dense(value.device)[None, None]
    return type(value)(map(_made, value)) if type(value) in (list, tuple) else value


def mask_of(parts: Sequence[Part], config: Any, like: Tensor) -> Tensor | Mapping[str, Tensor]:
    """What a decoder takes as ``attention_mask`` for a row of sequences.

    Args:
        parts: where each sequence is in the row.
        config: the configuration of a decoder that packs, with the attention ``sdpa`` or ``eager``.
        like: a tensor of the decoder's device and dtype.
    """
    longest = max(len(part.path) for part in parts)
    mixed = config.model_type in _MIXED
    window = config.sliding_window if mixed or config.model_type in _WINDOWED else None

    def made(window: int | None) -> Tensor:
        tree = Tree(parts, window, like.device)
        if attention_of(config) == "sdpa":
            nothing = torch.zeros((), dtype=torch.bool, device=like.device)
            mask = nothing.expand(1, 1, tree.length, tree.length).as_subclass(TreeMask)
            mask.tree = tree
            return mask
        allowed = tree.dense(like.device)[None, None]
        # From the dtype's own zeros, because the default dtype may not have its lowest value.
        nothing = torch.zeros(allowed.shape, dtype=like.dtype, device=like.device)
        return nothing.masked_fill_(~allowed, torch.finfo(like.dtype).min)

    short = window is not None and window < longest
    if not mixed:
        return made(window if short else None)
    full = made(None)  # in this form for the probe too, whose tokens are within every window
    return {"full_attention": full, "sliding_attention": made(window) if short else full}
