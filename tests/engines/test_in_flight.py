"""An ``AsyncLLM`` that is fed while its requests run: each token is of the version it names."""

import asyncio
import copy
import random

import pytest
from engine_log_probs import sampled, vary, worst_difference
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


def test_tokens_are_of_the_versions_that_they_name(engine, model, loop):
    start = copy.deepcopy(model.state_dict())
    states = {0: start}

    async def main():
        rng = random.Random(0)
        prompts = [
            [rng.randrange(2, VOCABULARY) for _ in range(rng.randrange(3, 20))]
            for _ in range(REQUESTS)
        ]
        at_a_time = asyncio.Semaphore(AT_A_TIME)

        async def request(number, prompt):
            async with at_a_time:
                return await sampled(engine, f"{number}", prompt, TOKENS)

        with WeightChannel.create(model) as channel:
            weights = EngineWeights(channel, engine)
            generating = asyncio.gather(*map(request, range(REQUESTS), prompts))
            while not generating.done():
                state = vary(model, start)
                states[await weights.update_async()] = state
                await asyncio.sleep(0.02)
            return await generating

    answers = loop.run(main())
    assert all(len(answer.tokens) == TOKENS for answer in answers)
    for answer in answers:
        _, starts, ends = zip(*answer.spans, strict=True)
        assert (*starts, TOKENS) == (0, *ends)
    assert sum(len(answer.spans) > 1 for answer in answers) > REQUESTS / 4
    assert worst_difference(model, states, answers) < 1e-4
    assert worst_difference(model, states, answers[:50], shift=1) > 0.01


def test_waiting_updates_begin_when_the_requests_have_ended(engine, model, loop):
    async def main():
        with WeightChannel.create(model) as channel:
            weights = EngineWeights(channel, engine, in_flight="wait")
            former = await engine.get_weight_version()
            running = asyncio.create_task(sampled(engine, "long", [5, 6, 7], 100))
            await asyncio.sleep(0.2)
            assert not running.done()
            await weights.update_async(version=1000)
            # Its last output may still be on the way through the event loop.
            before = await asyncio.wait_for(running, 5)
            after = await sampled(engine, "next", [5, 6, 7], TOKENS)
            with pytest.raises(TypeError, match="update_async"):
                weights.update()
            return former, before, after

    former, before, after = loop.run(main())
    assert before.spans == [(int(former), 0, 100)]
    assert after.spans == [(1000, 0, TOKENS)]
