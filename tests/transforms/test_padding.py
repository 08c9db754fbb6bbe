"""Dense tokens without a mask: where their padding is, as far as it can be told."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict import TensorDict

from fusedrl import RetrieveLogProb

TOKENS = ("tokens", "full")
A, B, C = 40, 41, 42
END = 2  # <|im_end|>


@pytest.fixture
def reads(wrap, policy_model, tokenizer):
    """The sequences that are read from rows under a tokenizer with these special tokens."""

    def reads(rows, pad):
        own = copy.deepcopy(tokenizer)
        names = own.convert_ids_to_tokens
        own.eos_token, own.pad_token, own.bos_token = names(END), names(pad), None
        wrapper = wrap(policy_model, input_mode="tokens", tokenizer=own, pad_output=True)
        data = TensorDict({TOKENS: torch.tensor(rows)}, batch_size=len(rows))
        batch = RetrieveLogProb(wrapper, assistant_only=False).read(data)
        return [row.tolist() for row in batch.tokens.split(batch.lengths)]

    return reads


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # On the right: the first of a run is the end of the sequence.
        ([[A, B, END, END], [A, END, END, END]], [[A, B, END], [A, END]]),
        ([[A, B, C, END], [END, END, END, END]], [[A, B, C, END], [END]]),
        ([[A, B, END, END], [END, END, END, END]], [[A, B, END], [END]]),
        # Nothing else at all.
        ([[END, END], [END, END]], [[END], [END]]),
        ([[END]], [[END]]),
        ([[A]], [[A]]),
        ([[A, END, B, END]], [[A, END, B, END]]),
    ],
)
def test_a_padding_token_that_ends_sequences(reads, rows, expected):
    assert reads(rows, pad=END) == expected


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([[A, B, 0, 0], [A, END, 0, 0]], [[A, B], [A, END]]),
        ([[0, 0, A, B], [0, A, B, END]], [[A, B], [A, B, END]]),
        ([[0, A, B, 0], [A, B, C, END]], [[A, B], [A, B, C, END]]),
        ([[0, A, 0, B], [0, 0, 0, 0]], [[A, 0, B], []]),
        ([[0, 0], [0, 0]], [[], []]),
    ],
)
def test_a_padding_token_of_its_own_may_be_at_both_ends(reads, rows, expected):
    assert reads(rows, pad=0) == expected


@pytest.mark.parametrize(
    "rows",
    [
        [[A, B, END, END], [END, A, END, END]],  # starts with one, or is padded on the left
        [[END, A, B, C], [A, B, C, END]],
    ],
)
def test_what_cannot_be_told_is_refused(reads, rows):
    with pytest.raises(
        ValueError, match=r"tokens: expected unambiguous padding, .* eos or bos token"
    ):
        reads(rows, pad=END)


def test_a_mask_tells(wrap, policy_model, tokenizer):
    own = copy.deepcopy(tokenizer)
    own.pad_token = own.eos_token
    rows = torch.tensor([[END, A, END, END], [A, B, C, END]])
    mask = torch.tensor([[True, True, True, False], [True] * 4])
    data = TensorDict({TOKENS: rows, ("masks", "all_attention_mask"): mask}, batch_size=2)
    wrapper = wrap(policy_model, input_mode="tokens", tokenizer=own)
    batch = RetrieveLogProb(wrapper, assistant_only=False).read(data)
    assert batch.lengths == [3, 4]
