"""The columns of a rollout beside its tokens: the policy's log-probs, masks, and the reward."""

from __future__ import annotations

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fusedrl.transforms.columns import Column, Columns, SampleColumns, column_rows, is_dense

PROMPT = ("tokens", "prompt")
ASSISTANT, ATTENTION = ("masks", "all_assistant_mask"), ("masks", "all_attention_mask")


def readable(tokens: Column, attended: Column | None, key: NestedKey, pad: bool) -> TensorDictBase:
    """Ragged tokens in the form that a wrapper reads: rows, or dense if it pads its output."""
    ids = column_rows(tokens)
    masks = [torch.ones_like(row) for row in ids] if attended is None else column_rows(attended)
    given = {key: ids, ATTENTION: [mask.bool() for mask in masks]}
    if not pad:
        parts = zip(*given.values(), strict=True)
        return lazy_stack([TensorDict(dict(zip(given, row, strict=True))) for row in parts])
    dense = {
        name: pad_sequence(list(column), batch_first=True, padding_side="left")
        for name, column in given.items()
    }
    return TensorDict(dense, batch_size=(len(ids),))


def answer_key(key: NestedKey) -> NestedKey:
    """The key under which a policy that generates writes the answer's part of a full column."""
    return (*key[:-1], "response") if isinstance(key, tuple) else key


def policy_log_probs(data: SampleColumns | Columns, key: NestedKey, tokens: Column) -> Column:
    """The policy's log-probs of ``tokens``, NaN before the answer if it was scored alone."""
    log_probs = data.get(key)
    if log_probs is not None:
        return log_probs
    answers = data.get(answer_key(key))
    if answers is None:
        raise ValueError(
            f"tensordict: expected the policy's log-probs under {key!r}, "
            "found none; let the policy write them (return_log_probs=True), or name their key"
        )
    if is_dense(tokens) and is_dense(answers):
        return _behind_prompt(answers, tokens)
    pairs = zip(column_rows(answers), column_rows(tokens), strict=True)
    return [_behind_prompt(answer, ids) for answer, ids in pairs]


def assistant_mask(data: SampleColumns | Columns, tokens: Column) -> Column:
    """The mask of the assistant's tokens, or else of all attended tokens after the prompt."""
    mask = data.get(ASSISTANT)
    if mask is not None:
        return mask
    attended, prompts = data.get(ATTENTION), data.get(PROMPT)
    if prompts is None or (attended is None and is_dense(tokens)):
        raise ValueError(
            f"tensordict: expected an assistant mask under {ASSISTANT!r}, or {PROMPT!r} and "
            f"{ATTENTION!r} to tell the answer from, found neither; use assistant_only=False"
        )
    if attended is None:
        attended = [torch.ones_like(ids, dtype=torch.bool) for ids in column_rows(tokens)]
    if is_dense(attended) and is_dense(prompts):
        return _after(attended, prompts)
    return [
        _after(row, own)
        for row, own in zip(column_rows(attended), column_rows(prompts), strict=True)
    ]


def _behind_prompt(answer: Tensor, tokens: Tensor) -> Tensor:
    """Log-probs of an answer, with NaN for the tokens before it."""
    before = tokens.shape[-1] - answer.shape[-1]
    if before < 0:
        raise ValueError(
            f"tensordict: expected at most {tokens.shape[-1]} log-probs of an answer, as many as "
            f"tokens, got {answer.shape[-1]}; take both from the same conversation"
        )
    return torch.nn.functional.pad(answer, (before, 0), value=float("nan"))


def _after(attended: Tensor, prompt: Tensor) -> Tensor:
    """The attended tokens, without as many at the start as the prompt has."""
    answer = attended.bool().clone()
    answer[..., : prompt.shape[-1]] = False
    return answer
