"""One comparison of the way to compute a model's log-probs with the model's own logits."""

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

LENGTH, COMMON = 8, 5  # tokens of each of the two sequences, and of their common beginning
FAR = 1 << 20  # a position beyond those that rotary embeddings are made for
DRAWS = "its forward draws random numbers, as for noise"
PARTS_DIFFER = "its decoder and head do not compute its own logits in a row of several sequences"
BATCH_DIFFERS = "sequences in a padded batch do not get the numbers of each alone"


class Capabilities(NamedTuple):
    """How the log-probs of a model can be computed, as a comparison found.

    Args:
        why: why sequences in one forward pass do not get the numbers of each alone; ``None`` if
            they do, and several share one.
        autocast: the dtype of autocast in the model's forward, whoever enters it.
        shares: whether sequences in a row may have a common beginning once.
        splits: whether decoder and head compute the model's own logits.
        telling: there was something to compare: logits that are not all 0, nor NaN.
        parts: decoder and head, of which sequences share a row; ``None`` for its own logits.
        below: the length that no sequence of several in a pass reaches; ``None`` for any length.
    """

    why: str | None
    autocast: torch.dtype | None = None
    shares: bool = False
    splits: bool = False
    telling: bool = True
    parts: Parts | None = None
    below: int | None = None

    @property
    def together(self) -> bool:
        """Whether several sequences share a forward pass."""
        return self.why is None


def compare_parts(parts: Parts, first: int = 0) -> Capabilities:
    """Compare log-probs of ids from ``first`` on, in a shared row, with each one's own logits."""
    device = parts.embeddings.device
    rows = _rows(min(len(parts.head.weight), len(parts.embeddings)), first)
    model = parts.base.forward if parts.shared else uncompiled(parts.model)
    found = Capabilities(PARTS_DIFFER)

    def ask(row: Tensor) -> Tensor:
        ids = row[None].to(device)
        return whole_of(model(input_ids=ids, use_cache=False, return_dict=True).logits)

    def compare() -> tuple[Tensor, ...]:
        nonlocal found
        alone = [ask(row) for row in rows]
        # A head under another autocast than the embeddings is not ours to call.
        if len(seen.autocasts) == 1:
            (autocast,) = seen.autocasts
            with torch.autocast(device.type, autocast, autocast is not None):
                found = _compared(parts, rows, alone, autocast)
        return (torch.zeros(1, device=device),)

    with _trial(device, parts) as seen:
        parts.within(compare, rows[0][None].to(device))
    # Noise that is small, or drawn for a row or a shared token, looks as if it were rounding.
    if seen.draws.found:
        return Capabilities(DRAWS)
    # A draw of dropout would count for all that share a token.
    return found._replace(shares=found.shares and not seen.drops and not _is_compiled(parts))


def _is_compiled(parts: Parts) -> bool:
    """Whether something would be compiled once more for each tree of tokens."""
    return parts.decode is not parts.decoder or any(
        is_compiled_function(module.forward) or compiler_of(module) is not None
        for module in modules_of(parts.model)
    )


def _compared(
    parts: Parts, rows: list[Tensor], alone: list[Tensor], autocast: torch.dtype | None
) -> Capabilities:
    own = torch.cat(alone, 1)[0].float()
    ids = torch.cat(rows).to(own.device)
    theirs = own.log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1)
    near = _rounding(parts.base, own, alone[0].dtype, autocast or alone[0].dtype)

    def score(hidden: Tensor) -> tuple[Tensor, ...]:
        here = ids.to(hidden.device)
        return (linear_token_log_probs(hidden, parts.weight, here, **parts.options).log_probs,)

    def agrees(tree: list[Part], inputs: dict[str, Any]) -> bool:
        states = parts.hidden(**inputs)[0]
        path = torch.cat([part.path for part in tree[:2]]).to(states.device)
        (ours,) = parts.at_head(states[path], score)
        return _agree(ours, theirs, near)

    # Positions start again, and a token far ahead shows whether a call's length matters.
    tree, inputs = row_of([*rows, rows[0][:1]], [0, 0, 0], parts)
    below = shared_below(parts.base.config)
    inputs["position_ids"][0, -1] = FAR if below is None else max(below - 1, 0)
    same = _causal(alone, near) and agrees(tree, inputs)
    shares = same and attention_of(parts.config) in SHARING
    shares = shares and agrees(*row_of(rows, [0, COMMON], parts))
    return Capabilities(None if same else PARTS_DIFFER, autocast, shares, same, near > 0)


def compare_batch(model: Any, kwargs: Mapping[str, Any]) -> Capabilities:
    """Compare the model's own logits of a padded batch with those of each sequence alone."""
    device = device_of(model)

    def ask(rows: list[Tensor]) -> Tensor:
        ids = pad_sequence(rows, batch_first=True).to(device)
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).to(device)
        return whole_of(model(ids, attention_mask=mask, **kwargs)["logits"])[:, -ids.shape[1] :]

    rows = _rows(vocabulary_of(model) or 2)
    short = [rows[0][:-1], rows[1][:COMMON]]  # the length of a call may matter too
    with _trial(device) as seen:
        try:
            alone = [ask([row]) for row in rows]
        except Exception as error:  # the caller sees it again when the model really runs
            return Capabilities(f"trying it raised {error!r}", telling=False)
        try:
            padded = ask(short)
        except Exception:  # the model takes no batch, or no mask
            padded = []
    near = _rounding(model, torch.cat(alone, 1), torch.float32)
    causal = _causal(alone, near)
    if not causal and getattr(getattr(model, "config", None), "is_decoder", None) is False:
        raise TypeError(
            f"model: expected a causal language model, got {type(model).__name__}, whose logits "
            "see later tokens; load a causal one, or this one with is_decoder=True"
        )
    pairs = zip(padded, alone, map(len, short), strict=False)
    agreeing = [_agree(ours[:n], theirs[0, :n], near) for ours, theirs, n in pairs]
    same = causal and agreeing == [True, True]
    why = DRAWS if seen.draws.found else None if same else BATCH_DIFFERS
    return Capabilities(why, telling=near > 0)


def _rows(vocabulary: int, first: int = 0) -> list[Tensor]:
    """Two sequences that differ behind their common beginning, the same on all ranks."""
    ids = (torch.arange(2 * LENGTH - COMMON, device="cpu") + first).remainder(vocabulary)
    return [ids[:LENGTH], torch.cat((ids[:COMMON], ids[LENGTH:]))]


def _rounding(model: Any, logits: Tensor, *dtypes: torch.dtype) -> float:
    """How far apart rounding takes values; NaN if there is one, with which nothing agrees."""
    weights = {p.dtype for p in model.parameters() if p.is_floating_point()}
    half = min(torch.finfo(x).bits for x in (*weights, *dtypes)) <= 16
    largest = logits.nan_to_num(torch.nan, 0.0, 0.0).abs().max().item()
    return (5e-2 if half else 2e-4) * largest


def _causal(alone: list[Tensor], near: float) -> bool:
    """Whether the logits of a common beginning do not depend on what is behind it."""
    return _agree(alone[0][:, :COMMON], alone[1][:, :COMMON], near)


def _agree(ours: Tensor, theirs: Tensor, near: float) -> bool:
    """Whether values differ by rounding alone. Infinities must be the same."""
    ours, theirs = ours.float(), theirs.to(ours.device).float()
    return near > 0 and torch.allclose(ours, theirs, rtol=0.0, atol=near)


@contextmanager
def _trial(device: torch.device, parts: Parts | None = None) -> Iterator[_Seen]:
    """A block without gradients, dropout or compilation, which draws no numbers of the user's."""
    devices = [device] if device.type == "cuda" else []
    try:
        # A graph would hide where autocast is entered.
        random = torch.random.fork_rng(devices)
        with torch.no_grad(), random, UNCOMPILED, _Seen(parts) as seen, seen.draws:
            yield seen
    finally:
        # Autocast keeps weights that it has converted, here without a gradient graph.
        torch.clear_autocast_cache()


class _Seen(TorchFunctionMode):
    """Skips dropout in this thread, without a change to the modules that call it.

    It records whether there was any, and autocast where tokens are embedded and multiplied with the
    head, because a forward may enter it by itself.
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
            # Asked now, because a weight may be another tensor while ranks have gathered it.
            ends = self._parts.embeddings, self._parts.head.weight
            if any(args[1] is weight for weight in ends):
                self.autocasts.add(autocast_of(args[1].device))
        return func(*args, **kwargs)


class _Draws(DispatchMode):
    """Notices what draws random numbers in this thread; attention is tagged with or without."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and "attention" not in func.name():
            # A single number switches layers, as peft's module_dropout does, and is no noise.
            self.found |= not isinstance(result, Tensor) or result.numel() > 1
        return result


class _Uncompiled:
    """Lets compiled functions run uncompiled while any thread is in its ``with`` block.

    The block of torch restores what it found. Two threads that overlap would find each other's, and
    leave the process uncompiled for ever.
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
# In a child, the lock may belong to a thread that does not exist there.
os.register_at_fork(after_in_child=lambda: setattr(UNCOMPILED, "_lock", threading.Lock()))
