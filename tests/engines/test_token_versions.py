"""The versions of a completion's tokens, out of the spans that vLLM reports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.outputs import CompletionOutput, WeightVersionSpan

from fusedrl.vllm import token_versions


def completion(tokens: int, *spans: tuple[str, int, int], finished: bool = True) -> Any:
    return CompletionOutput(
        index=0,
        text="",
        token_ids=list(range(tokens)),
        cumulative_logprob=None,
        logprobs=None,
        finish_reason="length" if finished else None,
        weight_versions=[WeightVersionSpan(*span) for span in spans] if finished else None,
    )


def test_a_version_for_each_token():
    versions = token_versions(completion(6, ("default", 0, 1), ("7", 1, 4), ("12", 4, 6)))
    assert versions.dtype == torch.int64
    assert versions.tolist() == [0, 7, 7, 7, 12, 12]


def test_a_version_that_takes_more_than_32_bits():
    assert token_versions(completion(2, (str(2**40), 0, 2))).tolist() == [2**40] * 2


@pytest.mark.parametrize("label", ["step-3", "", "-1", "07", "1.0", " 1", "٣", str(2**63)])
def test_labels_that_no_channel_gives(label):
    with pytest.raises(ValueError, match=r"completion: expected versions of a channel, got "):
        token_versions(completion(2, ("1", 0, 1), (label, 1, 2)))


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [("1", 0, 2)],
        [("1", 1, 3)],
        [("1", 0, 4)],
        [("1", 0, 1), ("2", 2, 3)],
        [("1", 0, 2), ("2", 1, 3)],
        [("1", 0, 2), ("2", 2, 1), ("3", 1, 3)],
    ],
    ids=str,
)
def test_spans_that_are_not_of_the_tokens(spans):
    with pytest.raises(ValueError, match=r"consecutive spans of its 3 tokens, got \["):
        token_versions(completion(3, *spans))


def test_answers_without_spans():
    old = SimpleNamespace(token_ids=[1, 2], finish_reason="length")
    silent = completion(2)
    silent.weight_versions = None
    for answer, message in (
        (completion(3, finished=False), "finish_reason=None; wait for the last output"),
        (old, r"from vLLM 0\.32 on, got none, .*or upgrade vLLM"),
        (silent, "got none, and finish_reason='length'"),
    ):
        with pytest.raises(ValueError, match=message):
            token_versions(answer)
