"""Compare the fast paths for a model's log-probs with the model's logits."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout, embedding, linear, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import TorchFunctionMode

from fusedrl.compat.torch import DispatchMode, is_compiled_function
from fusedrl.compat.transformers import attention_of
from fusedrl.models.prefix_tree import Part
from fusedrl.models.split import (
    Parts,
    autocast_of,
    compiler_of,
    device_of,
    modules_of,
    shared_below,
    uncompiled,
    vocabulary_of,
    whole_of,
)
from fusedrl.models.tree_mask import SHARING, row_of
from fusedrl.ops import linear_token_log_probs

LENGTH, COMMON = 8, 5  # tokens of each of the two sequences, and of their common prefix
FAR = 1 << 20  # a position beyond the range of rotary embeddings
DRAWS = "its forward draws random numbers"
PARTS_DIFFER = "its decoder and head do not compute its logits for several sequences in one row"
BATCH_DIFFERS = "its logits for a sequence in a padded batch differ from those without padding"


class Capabilities(NamedTuple):
    """The ways to compute the log-probs of a model that gave the right results in a comparison.

    Args:
        why: the reason to run each sequence alone; ``None`` if several may share a forward pass.
        autocast: the dtype of autocast inside the model's forward.
        shares: whether a common prefix of sequences in a row may be computed once.
        splits: whether decoder and head compute the model's logits.
        conclusive: whether the comparison can be cached: logits were neither all 0 nor NaN.
        parts: decoder and head, to pack sequences into rows; ``None`` to use the model's logits.
        below: only sequences shorter than this share a forward pass; ``None`` for any length.
    """

    why: str | None
    autocast: torch.dtype | None = None
    shares: bool = False
    splits: bool = False
    conclusive: bool = True
    parts: Parts | None = None
    below: int | None = None

    @property
    def batches(self) -> bool:
        """Whether several sequences may share a forward pass."""
        return self.why is None


def compare_parts(parts: Parts, first: int = 0) -> Capabilities:
    """Compare log-probs of sequences packed into a row with the model's logits of each sequence."""
    device = parts.embeddings.device
    rows = _rows(min(len(parts.head.weight), len(parts.embeddings)), first)
    model = parts.base.forward if parts.shared else uncompiled(parts.model)
    found = Capabilities(PARTS_DIFFER)

    def logits_of(row: Tensor) -> Tensor:
        ids = row[None].to(device)
        return whole_of(model(input_ids=ids, use_cache=False, return_dict=True).logits)

    def compare() -> tuple[Tensor, ...]:
        nonlocal found
        alone = [logits_of(row) for row in rows]
        # Calling the head under another autocast than the embeddings is not supported.
        if len(seen.autocasts) == 1:
            (autocast,) = seen.autocasts
            with torch.autocast(device.type, autocast, autocast is not None):
                found = _compared(parts, rows, alone, autocast)
        return (torch.zeros(1, device=device),)

    with _trial(device, parts) as seen:
        parts.within(compare, rows[0][None].to(device))
    # Small noise cannot be distinguished from rounding.
    if seen.draws.found:
        return Capabilities(DRAWS)
    # All sequences that share a token would get the same dropout mask for it.
    return found._replace(shares=found.shares and not seen.drops and not _is_compiled(parts))


def _is_compiled(parts: Parts) -> bool:
    """Whether a module would be recompiled for each tree of tokens."""
    return parts.decode is not parts.decoder or any(
        is_compiled_function(module.forward) or compiler_of(module) is not None
        for module in modules_of(parts.model)
    )


def _compared(
    parts: Parts, rows: list[Tensor], alone: list[Tensor], autocast: torch.dtype | None
) -> Capabilities:
    logits = torch.cat(alone, 1)[0].float()
    ids = torch.cat(rows).to(logits.device)
    expected = logits.log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1)
    near = _rounding(parts.base, logits, alone[0].dtype, autocast or alone[0].dtype)

    def score(hidden: Tensor) -> tuple[Tensor, ...]:
        here = ids.to(hidden.device)
        return (linear_token_log_probs(hidden, parts.weight, here, **parts.options).log_probs,)

    def agrees(tree: list[Part], inputs: dict[str, Any]) -> bool:
        states = parts.hidden(**inputs)[0]
        path = torch.cat([part.path for part in tree[:2]]).to(states.device)
        (log_probs,) = parts.at_head(states[path], score)
        return _agree(log_probs, expected, near)

    # Positions restart, and a token at a far position shows whether the length of a call matters.
    tree, inputs = row_of([*rows, rows[0][:1]], [0, 0, 0], parts)
    below = shared_below(parts.base.config)
    inputs["position_ids"][0, -1] = FAR if below is None else max(below - 1, 0)
    same = _causal(alone, near) and agrees(tree, inputs)
    shares = same and attention_of(parts.config) in SHARING
    shares = shares and agrees(*row_of(rows, [0, COMMON], parts))
    return Capabilities(None if same else PARTS_DIFFER, autocast, shares, same, near > 0)


def compare_batch(model: Any, kwargs: Mapping[str, Any]) -> Capabilities:
    """Compare the model's logits of a padded batch with those of each sequence without padding."""
    device = device_of(model)

    def logits_of(rows: list[Tensor]) -> Tensor:
        ids = pad_sequence(rows, batch_first=True).to(device)
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).to(device)
        return whole_of(model(ids, attention_mask=mask, **kwargs)["logits"])[:, -ids.shape[1] :]

    rows = _rows(vocabulary_of(model) or 2)
    short = [rows[0][:-1], rows[1][:COMMON]]  # another length, as that of a call may matter
    with _trial(device) as seen:
        try:
            alone = [logits_of([row]) for row in rows]
        except Exception as error:  # raised again when the caller's data runs
            return Capabilities(f"a trial forward pass raised {error!r}", conclusive=False)
        try:
            padded = logits_of(short)
        except Exception:  # the model does not support batches or masks
            padded = []
    near = _rounding(model, torch.cat(alone, 1), torch.float32)
    causal = _causal(alone, near)
    if not causal and getattr(getattr(model, "config", None), "is_decoder", None) is False:
        raise TypeError(
            f"model: expected a causal language model, got {type(model).__name__}, whose logits "
            "depend on later tokens; load a causal one, or this one with is_decoder=True"
        )
    pairs = zip(padded, alone, map(len, short), strict=False)
    agreeing = [_agree(row[:n], expected[0, :n], near) for row, expected, n in pairs]
    same = causal and agreeing == [True, True]
    why = DRAWS if seen.draws.found else None if same else BATCH_DIFFERS
    return Capabilities(why, conclusive=near > 0)


def _rows(vocabulary: int, first: int = 0) -> list[Tensor]:
    """Two sequences with a common prefix, the same on all ranks."""
    ids = (torch.arange(2 * LENGTH - COMMON, device="cpu") + first).remainder(vocabulary)
    return [ids[:LENGTH], torch.cat((ids[:COMMON], ids[LENGTH:]))]


def _rounding(model: Any, logits: Tensor, *dtypes: torch.dtype) -> float:
    """The tolerance for rounding; NaN if a logit is NaN, so that no comparison succeeds."""
    weights = {p.dtype for p in model.parameters() if p.is_floating_point()}
    half = min(torch.finfo(x).bits for x in (*weights, *dtypes)) <= 16
    largest = logits.nan_to_num(torch.nan, 0.0, 0.0).abs().max().item()
    return (5e-2 if half else 2e-4) * largest


def _causal(alone: list[Tensor], near: float) -> bool:
    """Whether the logits of a common prefix do not depend on the tokens after it."""
    return _agree(alone[0][:, :COMMON], alone[1][:, :COMMON], near)


def _agree(values: Tensor, expected: Tensor, near: float) -> bool:
    """Whether values differ only by rounding; infinities must be equal."""
    values, expected = values.float(), expected.to(values.device).float()
    return near > 0 and torch.allclose(values, expected, rtol=0.0, atol=near)


@contextmanager
def _trial(device: torch.device, parts: Parts | None = None) -> Iterator[_Seen]:
    """A block without gradients, dropout or compilation that preserves the random state."""
    devices = [device] if device.type == "cuda" else []
    try:
        # Uncompiled, because a graph would hide where autocast is entered.
        random = torch.random.fork_rng(devices)
        with torch.no_grad(), random, UNCOMPILED, _Seen(parts) as seen, seen.draws:
            yield seen
    finally:
        # Autocast caches converted weights, here without an autograd graph.
        torch.clear_autocast_cache()


class _Seen(TorchFunctionMode):
    """Skips dropout in this thread without changing modules, and records what a forward does.

    That is whether it has dropout, and the autocast of embeddings and head, because a forward may
    enter autocast.
    """

    def __init__(self, parts: Parts | None) -> None:
        super().__init__()
        self._parts = parts
        self.draws = _Draws()
        self.drops = False
        self.autocasts: set[torch.dtype | None] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is dropout:
            self.drops |= kwargs["training"] and kwargs["p"] > 0
            return args[0]
        if func is scaled_dot_product_attention:
            self.drops |= kwargs.get("dropout_p", 0.0) > 0
            kwargs = {**kwargs, "dropout_p": 0.0}
        if self._parts is not None and func in (embedding, linear):
            # Read here, because FSDP may replace a weight with a gathered tensor.
            ends = self._parts.embeddings, self._parts.head.weight
            if any(args[1] is weight for weight in ends):
                self.autocasts.add(autocast_of(args[1].device))
        return func(*args, **kwargs)


class _Draws(DispatchMode):
    """Detects random draws in this thread, except in attention, whose ops are tagged anyway."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and "attention" not in func.name():
            # A single number is no noise: peft's module_dropout switches layers with it.
            self.found |= not isinstance(result, Tensor) or result.numel() > 1
        return result


class _Uncompiled:
    """Runs compiled functions uncompiled while any thread is in a ``with`` block of it.

    It counts the blocks, because torch's context manager restores the stance that it found: two
    overlapping threads would leave the process uncompiled.
    """

    def __init__(self) -> None:
        self._blocks = 0
        self._stance = ExitStack()
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            if self._blocks == 0:
                self._stance.enter_context(torch.compiler.set_stance("force_eager"))
            self._blocks += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._blocks -= 1
            if self._blocks == 0:
                self._stance.close()


UNCOMPILED = _Uncompiled()
# In a forked child, the lock may be held by a thread of the parent.
os.register_at_fork(after_in_child=lambda: setattr(UNCOMPILED, "_lock", threading.Lock()))
