"""The log-probs that an engine gives its tokens, beside those of the versions that they name."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

State = Mapping[str, Tensor]


class Answer(NamedTuple):
    """What an engine answered.

    Attributes:
        prompt: its tokens.
        tokens: that were sampled.
        log_probs: of these.
        spans: the version of each of these, from where to where; 0 is what an engine starts with.
    """

    prompt: list[int]
    tokens: list[int]
    log_probs: list[float]
    spans: list[tuple[int, int, int]]


def answer_to(prompt: list[int], completion: Any) -> Answer:
    """Of a ``CompletionOutput`` that was asked for with ``logprobs=0``."""
    tokens = list(completion.token_ids)
    log_probs = [entry[t].logprob for entry, t in zip(completion.logprobs, tokens, strict=True)]
    spans = [
        (int(span.version.replace("default", "0")), span.start, span.end)
        for span in completion.weight_versions
    ]
    return Answer(prompt, tokens, log_probs, spans)


async def sampled(engine: Any, name: str, prompt: list[int], tokens: int) -> Answer:
    """An ``AsyncLLM``'s answer to one request."""
    from vllm import SamplingParams

    settings = SamplingParams(max_tokens=tokens, temperature=1.0, logprobs=0, ignore_eos=True)
    request = engine.generate({"prompt_token_ids": prompt}, settings, name)
    outputs = [output async for output in request]
    return answer_to(prompt, outputs[-1].outputs[0])


@torch.no_grad()
def vary(model: nn.Module, start: State, names: str = "") -> State:
    """Give a model other weights near those of ``start``; a copy of its state.

    They never go far: the larger weights grow, the more float32 rounds off log-probs.
    """
    for name, parameter in model.named_parameters():
        if names in name:
            parameter.copy_(start[name] + torch.randn_like(parameter) * 0.05)
    return copy.deepcopy(model.state_dict())


@torch.no_grad()
def worst_difference(
    model: Any, states: Mapping[int, State], answers: Iterable[Answer], shift: int = 0
) -> float:
    """The largest, over all tokens.

    Args:
        model: that the states are loaded into.
        states: by their versions.
        answers: with spans of these versions.
        shift: takes each span for one of so many versions before, if there is one.
    """
    worst = 0.0
    first = min(states)
    for prompt, tokens, log_probs, spans in answers:
        for version, start, end in spans:
            model.load_state_dict(states[max(first, version - shift)])
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            exact = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
            difference = (exact - torch.tensor(log_probs))[start:end]
            worst = max(worst, difference.abs().max().item())
    return worst
