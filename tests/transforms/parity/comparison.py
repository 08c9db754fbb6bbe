"""torchrl's classes beside ours, and what has to be the same of their answers."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from tensordict import NestedKey, NonTensorStack, TensorDict, TensorDictBase, lazy_stack
from torch.nn.utils.rnn import pad_sequence
from torchrl.envs.llm import transforms as torchrl_transforms

import fusedrl

from ..dialogs import CHATS, assert_rows_equal, conversations, rows

GEN, REF = ("log_probs", "full"), ("ref_log_probs", "full")

# How a batch of dialogs may lie in a tensordict, by what the models read.
LAYOUTS = [
    *(("history", layout) for layout in ("plain", "stack")),
    *(("text", layout) for layout in ("plain", "stack")),
    *(("tokens", layout) for layout in ("padded", "masked", "strided", "jagged", "stack")),
]
# Those, padded by the wrapper or not, and scored for the assistant's tokens only or for all.
CASES = [
    (mode, layout, pad_output, assistant_only)
    for (mode, layout), pad_output, assistant_only in itertools.product(
        LAYOUTS, [False, True], [False, True]
    )
    if mode == "history" or not assistant_only
]


def both(name: str) -> tuple[Any, Any]:
    """Our class of this name, and torchrl's."""
    return getattr(fusedrl, name), getattr(torchrl_transforms, name)


def dialogs(mode: str, layout: str, scored: TensorDictBase) -> TensorDictBase:
    """The conversations as ``mode`` reads them; ``scored`` has their text and tokens."""
    if mode == "history":
        return conversations(stacked=layout == "stack")
    data = TensorDict(batch_size=(len(CHATS),))
    data = data.to_lazystack(0) if layout == "stack" else data
    if mode == "text":
        return data.set(("text", "full"), NonTensorStack(*scored["text"].full))
    tokens = rows(scored, ("tokens", "full"))
    if layout in ("stack", "strided", "jagged"):
        kind = torch.jagged if layout == "jagged" else torch.strided
        return data.set(("tokens", "full"), torch.nested.as_nested_tensor(tokens, layout=kind))
    attended = [torch.ones_like(row, dtype=torch.bool) for row in tokens]
    columns = {("tokens", "full"): tokens}
    if layout == "masked":
        columns["masks", "all_attention_mask"] = attended
    for key, column in columns.items():
        data[key] = pad_sequence(column, batch_first=True, padding_side="left")
    return data


def with_next(data: TensorDictBase) -> TensorDictBase:
    """The data as the root and as its own ``"next"``, where rewards and answers are."""
    following = data.clone()
    if "reward" in data:
        data = data.exclude("reward")
    if isinstance(data, TensorDict):
        return data.set("next", following)
    pairs = zip(data.unbind(0), following.unbind(0), strict=True)
    return lazy_stack([td.set("next", after) for td, after in pairs])


def kind_of(data: TensorDictBase, key: NestedKey) -> Any:
    """What holds a column: one tensor a sample, or a tensor of a layout."""
    try:
        column = data.get(key)
    except RuntimeError:
        return list
    return column.is_nested, column.layout


def assert_same(ours: TensorDictBase, theirs: TensorDictBase, *keys: NestedKey) -> None:
    """Same keys, and columns ``keys`` of the same kind, shapes, dtypes and values."""
    assert type(ours) is type(theirs)
    assert (ours.batch_size, ours.device) == (theirs.batch_size, theirs.device)
    assert set(map(str, ours.keys(True))) == set(map(str, theirs.keys(True)))
    for key in keys:
        assert (key in ours.keys(True)) == (key in theirs.keys(True))
        if key in theirs.keys(True):
            assert kind_of(ours, key) == kind_of(theirs, key), key
            assert_values(ours, theirs, key)


def assert_values(ours: TensorDictBase, theirs: TensorDictBase, key: NestedKey) -> None:
    """Equal rows, whatever holds them."""
    assert_rows_equal(*([row.detach() for row in rows(data, key)] for data in (ours, theirs)))
