"""A fault before each weight of a load: tokens are of whole versions by their numbers, always."""

import asyncio
import copy
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_faults import inject
from engine_log_probs import answer_to, sampled, vary, worst_difference
from engine_publishers import updater
from engine_servers import answer_of, free_port, generated, server, wait_until_running
from tiny_engines import completion, has_spans, in_loop, offline

from fusedrl import WeightChannel
from fusedrl.vllm import EngineWeights

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_spans(), reason="this vLLM does not name the version of each token"),
]

WEIGHTS = 27  # of the tiny model
PROMPTS = [[5, 6, 7 + number] for number in range(4)]
LENGTH = 60


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        yield inject(tmp_path_factory.mktemp("faults"), patch)


class Offline:
    """A ``vllm.LLM`` whose requests are stepped."""

    def __init__(self, engine):
        self.engine = engine

    def update(self, weights):
        return weights.update()

    def around(self, weights):
        """The answers to requests that run while an update happens, and its error."""
        from vllm import SamplingParams

        llm, outputs = self.engine.llm_engine, {}
        settings = SamplingParams(max_tokens=LENGTH, temperature=1.0, logprobs=0, ignore_eos=True)
        for number, prompt in enumerate(PROMPTS):
            llm.add_request(f"{number}", {"prompt_token_ids": prompt}, settings)
        for _ in range(5):
            llm.step()
        error = error_of(weights)
        while llm.has_unfinished_requests():
            outputs |= {output.request_id: output.outputs[0] for output in llm.step()}
        return error, [answer_to(p, outputs[f"{n}"]) for n, p in enumerate(PROMPTS)]


class InLoop:
    """An ``AsyncLLM``."""

    def __init__(self, engine, loop):
        self.engine, self.loop = engine, loop

    def update(self, weights):
        return self.loop.run(weights.update_async())

    def around(self, weights):
        async def main():
            requests = [sampled(self.engine, f"{p}", p, LENGTH) for p in PROMPTS]
            answers = asyncio.gather(*requests)
            await asyncio.sleep(0.05)
            try:
                await weights.update_async()
            except Exception as error:
                return error, await answers
            return None, await answers

        return self.loop.run(main())


class Server:
    """A server."""

    def __init__(self, engine):
        self.engine = engine

    def update(self, weights):
        return weights.update()

    def around(self, weights):
        with ThreadPoolExecutor(len(PROMPTS)) as threads:
            requests = [threads.submit(generated, self.engine, p, LENGTH, 1.0) for p in PROMPTS]
            time.sleep(0.05)
            error = error_of(weights)
            pairs = zip(PROMPTS, requests, strict=True)
            return error, [answer_of(prompt, request.result()) for prompt, request in pairs]


def error_of(weights):
    try:
        weights.update()
    except Exception as error:
        return error
    return None


@pytest.fixture(scope="module")
def address(folder, model, faults, tmp_path_factory):
    with server(folder, free_port(), tmp_path_factory.mktemp("log") / "server.log") as address:
        yield address


@pytest.fixture(scope="module", params=["offline", "two workers", "in a loop", "server"])
def fed(request, folder, model, faults):
    if request.param == "server":
        yield Server(request.getfixturevalue("address"))
    elif request.param == "in a loop":
        loop = request.getfixturevalue("loop")
        with in_loop(loop, folder) as engine:
            yield InLoop(engine, loop)
    else:
        workers = {"tensor_parallel_size": 2} if request.param == "two workers" else {}
        with offline(folder, **workers) as llm:
            yield Offline(llm)


@pytest.mark.parametrize("before", range(WEIGHTS))
@pytest.mark.parametrize("kind", ["fails", "allocates", "spoils"])
def test_a_fault_in_a_worker(fed, model, faults, kind, before):
    start = copy.deepcopy(model.state_dict())
    with (
        WeightChannel.create(model) as channel,
        EngineWeights(channel, fed.engine, verify=True) as weights,
    ):
        states = {fed.update(weights): start}
        vary(model, start)
        with faults.told(kind, before % 2 if fed_by_two(fed) else 0, before):
            error, answers = fed.around(weights)
        assert error.__notes__ == ["engine: it goes on with the version before, '1'"]
        assert {version for answer in answers for version, _, _ in answer.spans} == {1}
        assert all(len(answer.tokens) == LENGTH for answer in answers)
        assert worst_difference(model, states, answers) < 1e-4
        for version in (3, 4):  # the requests around the second one begin with the first
            states[version] = vary(model, start)
            error, answers = fed.around(weights)
            assert error is None
            assert worst_difference(model, states, answers) < 1e-4
        assert any(version >= 3 for answer in answers for version, _, _ in answer.spans)
    model.load_state_dict(start)


def fed_by_two(fed):
    engine = getattr(fed.engine, "llm_engine", None)
    return engine and engine.vllm_config.parallel_config.tensor_parallel_size == 2


@pytest.mark.parametrize("before", range(WEIGHTS))
@pytest.mark.parametrize("kind", ["stops", "halts"])
def test_a_trainer_that_is_killed_before_the_load_goes_on_or_fails(address, faults, kind, before):
    with updater(address, before) as trainer:
        with faults.told(kind, before=before):
            faults.wait()
            trainer.kill_after(0)
        wait_until_running(address)
        choice = generated(address)
        [span] = choice["weight_versions"]
        assert choice["token_ids"] == trainer.expected(int(span["version"]))


@pytest.mark.parametrize("before", [0, WEIGHTS // 2, WEIGHTS - 1])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_is_killed_ends_the_engine(folder, model, faults, workers, before):
    with (
        offline(folder, tensor_parallel_size=workers) as llm,
        WeightChannel.create(model) as channel,
        EngineWeights(channel, llm) as weights,
    ):
        weights.update()
        with (
            faults.told("dies", workers - 1, before),
            pytest.raises(Exception, match=r"start a new|EngineCore|died"),
        ):
            weights.update()
        with pytest.raises(Exception, match=r"dead|died|Engine"):
            completion(llm)
