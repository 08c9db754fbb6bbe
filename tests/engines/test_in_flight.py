"""An ``AsyncLLM`` that is fed while its requests run: each token is of the version it names."""

import asyncio
import copy
import random

import pytest
import torch
from tiny_engines import VOCABULARY, has_spans, in_loop

from fusedrl import WeightChannel
from fusedrl.vllm import EngineWeights

pytestmark = pytest.mark.skipif(
    not has_spans(), reason="this vLLM does not say which tokens were made before an update"
)

REQUESTS, AT_A_TIME, TOKENS = 500, 16, 24


@pytest.fixture(scope="module")
def engine(folder, model, loop):
    with in_loop(loop, folder) as engine:
        yield engine


@torch.no_grad()
def drift(model):
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.02)


async def sampled(engine, number, prompt, tokens=TOKENS):
    """The tokens of a request, their log-probs and the spans of their versions."""
    from vllm import SamplingParams

    settings = SamplingParams(max_tokens=tokens, temperature=1.0, logprobs=0, ignore_eos=True)
    outputs = [
        out async for out in engine.generate({"prompt_token_ids": prompt}, settings, str(number))
    ]
    completion = outputs[-1].outputs[0]
    tokens = list(completion.token_ids)
    log_probs = [entry[t].logprob for entry, t in zip(completion.logprobs, tokens, strict=True)]
    return prompt, tokens, log_probs, completion.weight_versions


@torch.no_grad()
def worst_difference(model, states, sequences, shift=0):
    """Between vLLM's log-probs and those of the versions that the spans name."""
    worst = 0.0
    spans = [
        (max(0, int(span.version.replace("default", "0")) - shift), sequence, span)
        for sequence in sequences
        for span in sequence[3]
    ]
    loaded = None
    for version, (prompt, tokens, log_probs, _), span in sorted(spans, key=lambda s: s[0]):
        if version != loaded:
            model.load_state_dict(states[version])
            loaded = version
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        exact = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        difference = exact - torch.tensor(log_probs)
        worst = max(worst, difference[span.start : span.end].abs().max().item())
    return worst


def test_tokens_are_of_the_versions_that_they_name(engine, model, loop):
    states = {0: copy.deepcopy(model.state_dict())}

    async def main():
        rng = random.Random(0)
        prompts = [
            [rng.randrange(2, VOCABULARY) for _ in range(rng.randrange(3, 20))]
            for _ in range(REQUESTS)
        ]
        at_a_time = asyncio.Semaphore(AT_A_TIME)

        async def request(number, prompt):
            async with at_a_time:
                return await sampled(engine, number, prompt)

        with WeightChannel.create(model) as channel, EngineWeights(channel, engine) as weights:
            generating = asyncio.gather(*map(request, range(REQUESTS), prompts))
            while not generating.done():
                drift(model)
                version = await weights.update_async()
                states[version] = copy.deepcopy(model.state_dict())
                await asyncio.sleep(0.02)
            return await generating

    sequences = loop.run(main())
    assert all(len(tokens) == TOKENS for _, tokens, _, _ in sequences)
    assert all(
        [s.start for s in spans] == [0, *(s.end for s in spans[:-1])] and spans[-1].end == TOKENS
        for _, _, _, spans in sequences
    )
    assert sum(len(spans) > 1 for _, _, _, spans in sequences) > REQUESTS / 4
    assert worst_difference(model, states, sequences) < 1e-4
    assert worst_difference(model, states, sequences[:50], shift=1) > 0.01


def test_waiting_updates_begin_when_the_requests_have_ended(engine, model, loop):
    async def main():
        with (
            WeightChannel.create(model) as channel,
            EngineWeights(channel, engine, in_flight="wait") as weights,
        ):
            former = await engine.get_weight_version()
            running = asyncio.create_task(sampled(engine, "long", [5, 6, 7], 100))
            await asyncio.sleep(0.2)
            assert not running.done()
            await weights.update_async(version=1000)
            # Its last output may still be on the way through the event loop.
            before = await asyncio.wait_for(running, 5)
            after = await sampled(engine, "next", [5, 6, 7])
            with pytest.raises(TypeError, match="update_async"):
                weights.update()
            return former, before, after

    former, before, after = loop.run(main())
    assert [(s.version, s.start, s.end) for s in before[3]] == [(former, 0, 100)]
    assert [(s.version, s.start, s.end) for s in after[3]] == [("1000", 0, TOKENS)]
