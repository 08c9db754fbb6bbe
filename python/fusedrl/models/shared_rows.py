"""Compute common prefixes of rows of a padded batch once, inside the decoder.

For trainers that pad their batches and call the model themselves. In a ``with`` block, hooks make
the decoder compute a tree of tokens instead of the batch, and return the hidden states in the shape
of the batch, so that everything around the decoder is unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fusedrl.compat.transformers import attention_of
from fusedrl.models.capabilities import capabilities_of
from fusedrl.models.comparison import UNCOMPILED, Capabilities
from fusedrl.models.prefix_tree import in_order
from fusedrl.models.ranks import ranks_of
from fusedrl.models.split import Parts, chain_of, fits, modules_of, parts_of
from fusedrl.models.tree_mask import row_of

# Arguments of a decoder that do not prevent sharing.
_ALLOWED = {"return_dict", "output_router_logits"}
# Settings that request outputs which could not be restored to the shape of the batch.
_OUTPUTS = "output_hidden_states", "output_attentions"


@contextmanager
def sharing_prefixes(model: Any) -> Iterator[None]:
    """A block in which a model computes common prefixes of rows of a padded batch once.

    The conditions are those of ``causal_log_probs``; it affects only this thread, and calls with
    ids ``[B, T]`` and an attention mask, without a cache. Outputs for padding are undefined. A
    model that cannot share prefixes, such as one that several ranks share, is not changed.
    """
    for module in chain_of(model):
        if isinstance(module, DistributedDataParallel):
            model = module.module  # without collectives, for the comparison
    parts = None if ranks_of(model).groups else parts_of(model)
    if parts is None or fits(parts) or not (found := capabilities_of(model)).shares:
        yield
        return
    modes, thread = _modes_of(parts.decoder), get_ident()
    tree_of_call: list[Tensor] = []  # the places in the tree of the batch's tokens
    uncompiled = ExitStack()

    def lay_out(decoder: Any, args: Any, kwargs: Any = None) -> Any:
        # Another thread may call the decoder while this hook is registered, without kwargs.
        if get_ident() != thread or torch.compiler.is_compiling() or _modes_of(decoder) != modes:
            return None
        tree_of_call.clear()  # left by a call that raised
        tree = None if args else _tree_of(found, parts, kwargs)
        if tree is None:
            return None
        inputs, places = tree
        tree_of_call.append(places)
        # Compiled functions would be recompiled for each tree.
        uncompiled.enter_context(UNCOMPILED)
        return (), {**kwargs, **inputs}

    def put_back(decoder: Any, args: Any, output: Any) -> Any:
        if get_ident() != thread or not tree_of_call:
            return None
        places = tree_of_call.pop()
        uncompiled.close()
        states = output.last_hidden_state
        output.last_hidden_state = states[0, places.to(states.device)]
        if "router_logits" in output:
            flat = places.flatten()
            output.router_logits = tuple(x[flat.to(x.device)] for x in output.router_logits)
        return output

    # Hooks instead of a new forward: several threads may be in such blocks, and a model may be
    # copied in one. The second hook runs first: others see states in the shape of the batch.
    with uncompiled, ExitStack() as hooks:
        for handle in (
            parts.decoder.register_forward_pre_hook(lay_out, with_kwargs=True),
            parts.decoder.register_forward_hook(put_back, prepend=True),
        ):
            hooks.callback(handle.remove)
        yield


def _modes_of(decoder: Any) -> list[bool]:
    """The training mode of each module of a decoder, which dropout depends on."""
    return [module.training for module in modules_of(decoder)]


def _tree_of(
    found: Capabilities, parts: Parts, kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], Tensor] | None:
    """The inputs of a tree instead of a batch, and the places in it of the batch's tokens.

    ``None`` if its rows have no common prefix.
    """
    mask = _mask_of(parts.config, kwargs)
    if mask is None or (found.below is not None and mask.shape[1] >= found.below):
        return None
    ids = kwargs["input_ids"].cpu()
    rows = [row[kept] for row, kept in zip(ids, mask, strict=True)]
    order, shared = in_order(rows)
    rows = [rows[i] for i in order]
    own = sum(map(len, rows)) - sum(shared)
    stores_more = attention_of(parts.config) == "eager" and own**2 > mask.numel() * mask.shape[1]
    if not any(shared) or stores_more:
        return None
    tree, inputs = row_of(rows, shared, parts)
    places = torch.zeros_like(ids)
    for i, part in zip(order, tree, strict=True):
        places[i, mask[i]] = part.path
    return inputs, places


def _mask_of(config: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """The attention mask as bool on the CPU; ``None`` if a call has unsupported arguments."""
    if any(getattr(config, name, False) for name in _OUTPUTS) or config.return_dict is False:
        return None
    given = {name: x for name, x in kwargs.items() if x is not None and x is not False}
    ids, mask = given.pop("input_ids", None), given.pop("attention_mask", None)
    if given.keys() - _ALLOWED or kwargs.get("use_cache") is not False or ids is None:
        return None
    if not isinstance(mask, Tensor) or mask.shape != ids.shape or len(ids) < 2:
        return None
    mask = mask.cpu() != 0
    # Refuse masked tokens inside a row: they count for positions in a batch, not in a tree.
    begins = mask[:, :1].sum(1) + (mask[:, 1:] & ~mask[:, :-1]).sum(1)
    return None if bool((begins > 1).any()) else mask
