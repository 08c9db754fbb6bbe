"""Updates of an ``AsyncLLM`` that are cancelled, or fail in the middle."""

import asyncio

import pytest
from tiny_engines import PROMPT, expected, in_loop, spans_of, train

from fusedrl import WeightChannel
from fusedrl.vllm import EngineWeights

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine(folder, model, faults, loop):
    with in_loop(loop, folder) as engine:
        yield engine


async def answer_of(engine, name, tokens=12):
    """The greedy tokens, and the versions that they are of."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    outputs = [o async for o in engine.generate({"prompt_token_ids": PROMPT}, greedy, name)]
    completion = outputs[-1].outputs[0]
    spans = spans_of(completion, await engine.get_weight_version())
    return list(completion.token_ids), [version for version, _, _ in spans]


@pytest.fixture
def run(engine, model, loop):
    """A test with an engine that is at a version, before and after which it goes on."""

    def run(test):
        async def main():
            with WeightChannel.create(model) as channel:
                weights = EngineWeights(channel, engine)
                await weights.update_async(version=100)
                train(model)
                await test(weights)
                assert not await engine.is_paused()
                train(model)
                version = await weights.update_async()
                assert await answer_of(engine, "after") == (expected(model), [str(version)])

        loop.run(main())

    return run


def test_a_cancelled_update_is_whole_before_it_is_cancelled(engine, model, faults, run):
    async def test(weights):
        with faults.stopping():
            update = asyncio.create_task(weights.update_async())
            await asyncio.to_thread(faults.wait)
            update.cancel()
            # The next update, and requests, come behind the one that goes on.
            following = asyncio.create_task(weights.update_async())
            request = asyncio.create_task(answer_of(engine, "behind"))
            await asyncio.sleep(0.1)
            assert not update.done()
            assert not following.done()
            assert not request.done()
            following.cancel()
            with pytest.raises(asyncio.CancelledError):
                await following
        with pytest.raises(asyncio.CancelledError):
            await update
        assert weights.version == weights.channel.version == 101
        assert await request == (expected(model), ["101"])

    run(test)


def test_an_update_from_another_channel_waits_for_the_one_that_goes_on(engine, model, faults, run):
    async def test(weights):
        with WeightChannel.create(model) as channel:
            others = EngineWeights(channel, engine)
            with faults.stopping():
                update = asyncio.create_task(weights.update_async())
                await asyncio.to_thread(faults.wait)
                other = asyncio.create_task(others.update_async(version=500))
                await asyncio.sleep(0.5)
                assert channel.version is None
            assert [await update, await other] == [101, 500]
            assert await answer_of(engine, "the last") == (expected(model), ["500"])

    run(test)


def test_a_cancelled_wait_for_a_pause_changes_nothing(engine, model, run):
    async def test(weights):
        await weights.update_async()
        patient = EngineWeights(weights.channel, engine, in_flight="wait")
        running = engine.generate({"prompt_token_ids": PROMPT}, long_request(), "long")
        await anext(running)
        update = asyncio.create_task(patient.update_async())
        while not await engine.is_paused():
            await asyncio.sleep(0.001)
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        assert not await engine.is_paused()
        assert [reader.leased for reader in weights.channel.readers()] == [()]
        async for _ in running:
            pass
        assert await answer_of(engine, "next") == (expected(model), ["101"])

    def long_request():
        from vllm import SamplingParams

        return SamplingParams(max_tokens=200, ignore_eos=True)

    run(test)


def test_one_that_fails_twice_lets_them_wait_for_the_next_update(engine, model, faults, run):
    async def test(weights):
        with (
            faults.failing(always=True),
            pytest.raises(RuntimeError, match=r"second try, got .*out of memory"),
        ):
            await weights.update_async()
        assert await engine.is_paused()
        assert await engine.get_weight_version() == "unknown"
        request = asyncio.create_task(answer_of(engine, "waits"))
        # Nor does an update repair it that fails before it touches the model.
        impatient = EngineWeights(weights.channel, engine, timeout=0.1)
        with pytest.raises(Exception, match="within"):
            await impatient._update.run(999)
        assert await engine.is_paused()
        assert not request.done()
        await weights.update_async()
        assert await request == (expected(model), ["102"])

    run(test)
