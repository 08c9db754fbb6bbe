"""Beginnings that rows of a padded batch share, computed once by the decoder that gets the batch.

A trainer that pads its own batches calls its model as ever. Within a ``with`` block, hooks of the
decoder put a tree of tokens in the place of the batch, and hand out its hidden states in the shape
of the batch, so that whatever is around the decoder is as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from fusedrl.compat.transformers import attention_of
from fusedrl.models import prefix_tree
from fusedrl.models.capabilities import capabilities_of, may_share
from fusedrl.models.comparison import UNCOMPILED
from fusedrl.models.forwards import SHARING
from fusedrl.models.plan import log_shared
from fusedrl.models.ranks import ranks_of
from fusedrl.models.split import CannotSplit, Parts, chain_of, split
from fusedrl.models.tree_mask import mask_of

# What a decoder may be told beside a batch.
_BESIDE = {"return_dict", "output_router_logits"}


@contextmanager
def sharing_prefixes(model: Any) -> Iterator[None]:
    """A block in which a model computes a beginning once that rows of a padded batch share.

    It does so where ``causal_log_probs`` would, for this thread, and for batches ``[B, T]`` of ids
    and their attention mask without a cache. What it returns for padding then means nothing.

    Args:
        model: a transformers causal LM, or peft's or DDP's wrapper around one. A model that cannot
            share, such as one that ranks compute together, computes as ever.
    """
    inner = model
    for module in chain_of(model):
        if isinstance(module, DistributedDataParallel):
            inner = module.module  # which this rank can try alone
    with _shared_rows_of(inner) or nullcontext():
        yield


def _shared_rows_of(model: Any) -> _SharedRows | None:
    """The hooks for a model whose type, attention and state let it share; others are not logged."""
    if ranks_of(model) is not None:
        return None
    try:
        parts = split(model)
    except CannotSplit:
        return None
    if attention_of(parts.config) not in SHARING or parts.gathered or not may_share(model, parts):
        return None
    found = capabilities_of(model)
    return _SharedRows(model, parts, found.below) if found.shares else None


class _SharedRows:
    """The hooks of a decoder for the length of a block, and for the thread that is in it.

    Args:
        model: that is called, or what of it one rank can call alone.
        parts: its decoder and head.
        below: the length from which on rows cannot share a call.
    """

    def __init__(self, model: nn.Module, parts: Parts, below: int | None) -> None:
        self._model, self._parts, self._below = model, parts, below
        self._hooks: list[RemovableHandle] = []
        self._thread: int | None = None  # that the hooks work for
        self._uncompiled = ExitStack()
        self._places: Tensor | None = None  # of the batch's tokens in the tree that is computed

    def __enter__(self) -> None:
        decoder = self._parts.decoder
        self._hooks.append(decoder.register_forward_pre_hook(self._lay_out, with_kwargs=True))
        # First of all, so that other hooks see states in the shape of the batch.
        self._hooks.append(
            decoder.register_forward_hook(self._put_back, with_kwargs=True, prepend=True)
        )
        self._thread = get_ident()

    def __exit__(self, *error: object) -> None:
        self._thread = None
        for hook in self._hooks:
            hook.remove()
        self._close()

    def _lay_out(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments for the tree in the place of a batch, if its rows share something."""
        if get_ident() != self._thread or torch.compiler.is_compiling():
            return None
        self._close()
        mask = None if args else _mask_of(kwargs)
        if mask is None:
            return None
        ids = kwargs["input_ids"].cpu()
        rows = [row[kept] for row, kept in zip(ids, mask, strict=True)]
        order = prefix_tree.in_order(rows)
        rows = [rows[i] for i in order]
        shared = prefix_tree.shared_with_former(rows)
        if not any(shared) or not self._can_share(mask, sum(map(len, rows)) - sum(shared)):
            return None
        parts = prefix_tree.laid_out([len(row) for row in rows], shared)
        log_shared(self._model, parts)
        places = torch.zeros_like(ids)
        for i, part in zip(order, parts, strict=True):
            places[i, mask[i]] = part.path
        self._places = places
        # Functions that are compiled by themselves would be compiled once for each tree.
        self._uncompiled.enter_context(UNCOMPILED)
        row = prefix_tree.row_of(rows, parts, kwargs["input_ids"].device)
        row["attention_mask"] = mask_of(parts, self._parts.config, self._parts.embeddings)
        return (), {**kwargs, **row}

    def _put_back(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """The output with the states of the tree's tokens at their places in the batch."""
        if get_ident() != self._thread or self._places is None:
            return None
        places = self._places
        self._close()
        states = output.last_hidden_state
        output.last_hidden_state = states[0, places.to(states.device)]
        if "router_logits" in output:
            flat = places.flatten()
            output.router_logits = tuple(x[flat.to(x.device)] for x in output.router_logits)
        return output

    def _close(self) -> None:
        """End the call that is in progress, if one is."""
        self._places = None
        self._uncompiled.close()

    def _can_share(self, mask: Tensor, nodes: int) -> bool:
        """Whether the model can compute a tree of so many tokens in the place of a batch now."""
        if attention_of(self._parts.config) == "eager" and nodes**2 > mask.numel() * mask.shape[1]:
            return False  # it would store more than for the batch
        return self._below is None or mask.shape[1] < self._below


def _mask_of(kwargs: Mapping[str, Any]) -> Tensor | None:
    """Which tokens of a batch are real, on the CPU; ``None`` if a call is not of such a batch."""
    given = {name: x for name, x in kwargs.items() if x is not None and x is not False}
    ids, mask = given.pop("input_ids", None), given.pop("attention_mask", None)
    if given.keys() - _BESIDE or kwargs.get("use_cache") is not False:
        return None
    if not isinstance(ids, Tensor) or ids.dim() != 2 or len(ids) < 2:
        return None
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        return None
    mask = mask.cpu() != 0
    # The positions of a batch count what is masked between a row's tokens, those of a tree do not.
    begins = mask[:, :1].sum(1) + (mask[:, 1:] & ~mask[:, :-1]).sum(1)
    return None if bool((begins > 1).any()) else mask
