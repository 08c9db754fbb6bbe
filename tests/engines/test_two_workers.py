"""Two workers that hold a model together have one version, or none of them has a new one."""

from dataclasses import asdict

import pytest
from engine_faults import inject
from tiny_engines import completion, expected, offline, spans_of, tiny_model, train

from fusedrl import WeightChannel
from fusedrl.vllm import EngineWeights

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        yield inject(tmp_path_factory.mktemp("faults"), patch)


@pytest.fixture(scope="module")
def llm(folder, model, faults):
    with offline(folder, tensor_parallel_size=2) as llm:  # a pipeline fails in vLLM 0.32 on CPUs
        yield llm


def answer_of(llm):
    """The greedy tokens, and the version that all of them are of."""
    answer = completion(llm)
    [(version, _, _)] = spans_of(answer, llm.get_weight_version())
    return list(answer.token_ids), version


def in_step(llm):
    """Whether each worker's answers are to the calls that they are for."""
    answers = {"supports_draft_weight_updates": False, "check_health": None}
    return all(llm.collective_rpc(call) == [answers[call]] * 2 for call in [*answers, *answers])


@pytest.fixture
def weights(llm, model):
    """At a version, before and after which the engine is what it should be."""
    with WeightChannel.create(model) as channel:
        weights = EngineWeights(channel, llm)
        weights.update(version=100)
        assert answer_of(llm) == (expected(model), "100")
        yield weights
        train(model)
        weights.update()
        assert answer_of(llm) == (expected(model), str(weights.version))
        assert in_step(llm)


def test_greedy_tokens_are_those_of_transformers(llm, model, weights):
    for version in range(101, 106):
        train(model)
        assert weights.update() == version
        assert answer_of(llm) == (expected(model), str(version))


def test_weights_that_no_worker_has(llm, model, weights, tmp_path):
    before = expected(model)
    with (
        WeightChannel.create(tiny_model(tmp_path, num_hidden_layers=3)) as channel,
        pytest.raises(Exception, match=r"worker 0: ValueError[\s\S]*layers\.2"),
    ):
        EngineWeights(channel, llm).update()
    assert answer_of(llm) == (before, "100")
    assert in_step(llm)


def test_a_channel_that_one_worker_cannot_open(llm, model, weights):
    before = expected(model)
    with WeightChannel.create(model, max_readers=1) as channel:
        one_reader = EngineWeights(channel, llm)
        with pytest.raises(Exception, match=r"worker \d: RuntimeError: max_readers"):
            one_reader.update()
        assert one_reader.version is None
    assert answer_of(llm) == (before, "100")
    assert in_step(llm)


def test_a_malformed_message_is_an_error_of_all(llm, weights):
    address = asdict(weights.channel.handle)
    for message in ({}, {"address": {}}, {"address": address, "lease": {}}, {"more": 1}):
        with pytest.raises(Exception, match=r"worker 0: .*worker 1: "):
            llm.init_weight_transfer_engine({"init_info": message})
        assert in_step(llm)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_fails_in_the_middle(llm, model, weights, faults, rank):
    train(model)
    with faults.failing(rank):
        assert weights.update() == 101
        faults.wait(0)
    assert answer_of(llm) == (expected(model), "101")
    assert in_step(llm)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_fails_again(llm, model, weights, faults, rank):
    with (
        faults.failing(rank, always=True),
        pytest.raises(RuntimeError, match=rf"second try.*worker {rank}: MemoryError: out of mem"),
    ):
        weights.update()
    assert llm.get_weight_version() == "unknown"
    assert in_step(llm)
