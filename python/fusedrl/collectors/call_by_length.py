"""Calls policies that take dialogs of one length only with dialogs of several lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensordict import LazyStackedTensorDict, TensorDictBase, lazy_stack

from fusedrl.compat.tensordict import get_entry

PROMPT = ("history", "prompt")  # what torchrl's chats give to its wrappers of language models


def call_by_length(
    policy: Callable[[TensorDictBase], TensorDictBase], dialogs: TensorDictBase
) -> TensorDictBase:
    """Call a policy once for each length that the histories of dialogs have.

    torchrl 0.14.1's wrappers of language models raise for histories of several lengths.

    Args:
        policy: a policy that returns as many rows as it gets.
        dialogs: the dialogs. They take a single call if they have no histories, or if all histories
            have the same length.

    Returns:
        The answers, in the order of the dialogs.
    """
    if not _have_several_lengths(dialogs):
        return policy(dialogs)
    rows: list[Any] = list(dialogs.unbind(0))
    groups: dict[Any, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.get(PROMPT).batch_size, []).append(index)
    answers: dict[int, TensorDictBase] = {}
    for lengths, indices in groups.items():
        if -1 in lengths:  # with two batch dimensions, a row has several dialogs
            answers.update((index, call_by_length(policy, rows[index])) for index in indices)
        else:
            answer = policy(lazy_stack([rows[index] for index in indices]))
            answers.update(zip(indices, answer.unbind(0), strict=True))
    return lazy_stack([answers[index] for index in range(len(rows))])


def _have_several_lengths(dialogs: Any) -> bool:
    if not isinstance(dialogs, LazyStackedTensorDict) or dialogs.stack_dim != 0:
        return False  # a tensordict of stacked tensors cannot hold several lengths
    if get_entry(dialogs.tensordicts[0], PROMPT[0]) is None:  # quick: most are no chats
        return False
    prompt: Any = dialogs.get(PROMPT, None)
    return prompt is not None and -1 in prompt.batch_size
