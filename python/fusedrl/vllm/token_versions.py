"""The version of each token, from the spans that vLLM reports for a completion."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from fusedrl.channel.checks import MAX_VERSION

TOKENS_KEY = "token_policy_version"  # the entry of a policy's tensordicts
PADDING = -1
STARTED_WITH = "default"  # vLLM's label for the weights that an engine started with
_VERSION = re.compile(r"0|[1-9][0-9]{0,18}")


def token_versions(completion: Any) -> Tensor:
    """The version of the weights that sampled each token of a completion.

    Args:
        completion: a finished ``CompletionOutput`` of vLLM 0.32 or later, with all its tokens.

    Returns:
        int64 of shape ``[tokens]``: the channel's versions, and 0 for the weights that the engine
        started with.

    Raises:
        ValueError: the completion has no versions yet, labels that are not a channel's versions,
            or spans that do not cover its tokens.

    Example:
        >>> from types import SimpleNamespace as Span
        >>> from fusedrl.vllm import token_versions
        >>> spans = [Span(version="default", start=0, end=1), Span(version="7", start=1, end=3)]
        >>> token_versions(Span(token_ids=[5, 6, 7], weight_versions=spans, finish_reason="stop"))
        tensor([0, 7, 7])
    """
    spans, tokens = getattr(completion, "weight_versions", None), len(completion.token_ids)
    if spans is None:
        raise ValueError(
            "completion: expected weight_versions, which a finished one has from vLLM 0.32 on, got "
            f"none, and finish_reason={completion.finish_reason!r}; wait for the last output of a "
            "request, or upgrade vLLM"
        )
    ends, starts = [0, *(s.end for s in spans)], [*(s.start for s in spans), tokens]
    if starts != ends or ends != sorted(ends):
        raise ValueError(
            f"completion: expected consecutive spans of its {tokens} tokens, got "
            f"{[(span.start, span.end) for span in spans]}; pass a whole completion, not a delta "
            "of a stream"
        )
    versions = torch.empty(tokens, dtype=torch.int64)
    for span in spans:
        label = "0" if span.version == STARTED_WITH else span.version
        if not _VERSION.fullmatch(label) or int(label) > MAX_VERSION:
            raise ValueError(
                f"completion: expected versions of a channel, got {label!r}; update the "
                "engine's weights only through fusedrl, which numbers them"
            )
        versions[span.start : span.end] = int(label)
    return versions
