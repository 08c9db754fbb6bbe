"""Conversations, and ragged columns compared whatever holds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, lazy_stack
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory

LENGTHS = (3, 5, 2)
GEN, REF = ("log_probs", "full"), ("ref_log_probs", "full")

CHATS = [
    [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "How are you?"},
        {"role": "assistant", "content": "I am well, thank you!"},
        {"role": "user", "content": "And the capital of France?"},
        {"role": "assistant", "content": "Paris."},
    ],
    [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is Paris."},
    ],
    [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}],
]


def history() -> History:
    return lazy_stack([History.from_chats([chat])[0] for chat in CHATS])


def conversations(*, stacked: bool = False, with_next: bool = False) -> TensorDictBase:
    """The conversations as a plain or a stacked tensordict, with or without a ``"next"``."""
    data = TensorDict(history=ChatHistory(full=history()), batch_size=(len(CHATS),))
    if with_next:
        data["next"] = TensorDict(history=ChatHistory(full=history()), batch_size=(len(CHATS),))
    return data.to_lazystack(0) if stacked else data


def rewarded(**options: Any) -> TensorDictBase:
    """The conversations with a reward of 1 each."""
    return conversations(**options).set("reward", torch.ones(len(CHATS), 1, 1))


def stack(samples: Sequence[dict]) -> LazyStackedTensorDict:
    """Samples as collectors deliver them."""
    return lazy_stack([TensorDict(sample) for sample in samples])


def rows(td: TensorDictBase, key: Any) -> list[torch.Tensor]:
    """The rows of a column in any representation."""
    column = td.get(key, as_list=True)
    return list(column.unbind(0)) if isinstance(column, torch.Tensor) else column


def assert_rows_equal(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> None:
    """Equal to fp32 rounding, sample by sample, in shape and dtype."""
    assert len(ours) == len(theirs)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5, equal_nan=True)
