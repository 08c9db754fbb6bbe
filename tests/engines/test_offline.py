"""A ``vllm.LLM`` that a trainer feeds through a channel."""

import copy
import random
from dataclasses import asdict

import pytest
import torch
from tiny_engines import completion, expected, offline, spans_of, tiny_model, train

from fusedrl import WeightChannel
from fusedrl.vllm import EngineWeights
from fusedrl.vllm.update import run_calls


@pytest.fixture(scope="module")
def llm(folder, model):
    with offline(folder) as llm:
        yield llm


def tokens_of(llm):
    return list(completion(llm).token_ids)


def versions_of(llm):
    return spans_of(completion(llm), llm.get_weight_version())


def test_an_engine_has_the_weights_of_each_update(llm, model):
    assert tokens_of(llm) == expected(model)
    seen = {tuple(tokens_of(llm))}
    with WeightChannel.create(model) as channel:
        weights = EngineWeights(channel, llm)
        assert weights.version is None
        for version in range(1, 21):
            train(model)
            assert weights.update() == version
            assert tokens_of(llm) == expected(model)
            assert versions_of(llm) == [(str(version), 0, 12)]
            seen.add(tuple(tokens_of(llm)))
        assert weights.version == channel.version == 20
        assert llm.get_weight_version() == "20"
    assert len(seen) > 15  # an engine that stands still would be seen


def test_the_number_is_that_of_a_version_published_in_between(llm, model, monkeypatch):
    with WeightChannel.create(model) as channel:
        weights = EngineWeights(channel, llm)
        publish = channel.publish

        def overtaken(*args):
            version = publish(*args)
            train(model)
            publish()
            return version

        monkeypatch.setattr(channel, "publish", overtaken)
        assert weights.update() == 2
        assert versions_of(llm) == [("2", 0, 12)]
        assert tokens_of(llm) == expected(model)


def test_an_engine_loads_what_is_published_already(llm, model):
    """As each of several engines of one trainer does."""
    with WeightChannel.create(model) as channel:
        weights = EngineWeights(channel, llm)
        with pytest.raises(RuntimeError, match="expected a published one, got none"):
            weights.load()
        train(model)
        channel.publish(version=7)
        assert weights.load() == weights.version == channel.version == 7
        assert versions_of(llm) == [("7", 0, 12)]
        assert tokens_of(llm) == expected(model)


def test_two_trainers_of_one_engine_do_not_get_each_other_s_weights(llm, model, tmp_path):
    other = tiny_model(tmp_path, seed=7)
    with (
        WeightChannel.create(model) as channel,
        WeightChannel.create(other) as another,
    ):
        weights = EngineWeights(channel, llm)
        others = EngineWeights(another, llm)
        for trained, given in [(model, weights), (other, others), (model, weights)]:
            given.update(version=(given.version or 0) + 1)
            assert tokens_of(llm) == expected(trained)
    assert expected(model) != expected(other)


class TestRefused:
    """What is refused leaves the engine as it was, and the next update works."""

    @pytest.fixture(autouse=True)
    def goes_on(self, llm, model):
        with WeightChannel.create(model) as channel:
            weights = EngineWeights(channel, llm)
            weights.update(version=100)
            before = tokens_of(llm)
            yield
            assert tokens_of(llm) == before
            assert versions_of(llm) == [("100", 0, 12)]
            train(model)
            assert weights.update() == 101
            assert tokens_of(llm) == expected(model)

    @pytest.mark.parametrize(
        ("sizes", "said"),
        [
            ({"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}, "embed_tok"),
            ({"num_hidden_layers": 3}, "model.layers.2"),
            ({"num_hidden_layers": 1}, "model.layers.1"),
            ({"kind": "llama"}, "bias"),
        ],
        ids=["narrower", "deeper", "shallower", "without biases"],
    )
    def test_weights_of_another_model(self, llm, tmp_path, sizes, said):
        other = tiny_model(tmp_path, **sizes)
        with WeightChannel.create(other) as channel:
            weights = EngineWeights(channel, llm)
            with pytest.raises(Exception, match=said):
                weights.update()
            assert weights.version is None

    def test_a_message_with_another_session_opens_nothing(self, llm, model):
        with WeightChannel.create(model) as channel:
            channel.publish()
            address = {**asdict(channel.handle), "session": "0" * 32}
            lease = {"version": 1, "timeout": 1.0, "server": None, "stays": False}
            for asked, said in [
                ({}, "handle"),
                ({"lease": lease}, "handle"),
                ({"load": 1}, "leas"),
            ]:
                with pytest.raises(Exception, match=f"{said}.*: expected|expected.*{said}"):
                    llm.init_weight_transfer_engine({"init_info": {"address": address, **asked}})
            llm.init_weight_transfer_engine({"init_info": {"address": address, "over": True}})
            assert channel.readers() == []

    def test_a_version_that_never_comes(self, llm, model):
        with WeightChannel.create(model) as channel:
            weights = EngineWeights(channel, llm, timeout=0.2)
            channel.publish()
            with pytest.raises(Exception, match=r"expected 7 or later within 0\.2 s, got 1"):
                run_calls(weights._update.run(7))


def test_an_update_that_somebody_began_and_left(llm, model):
    with WeightChannel.create(model) as channel:
        weights = EngineWeights(channel, llm)
        weights.update()
        llm.start_weight_update()
        assert tokens_of(llm) == expected(model)
        train(model)
        assert weights.update() == 2
        assert tokens_of(llm) == expected(model)
        llm.finish_weight_update()
        assert versions_of(llm) == [("2", 0, 12)]


@pytest.mark.parametrize("engine", [None, object(), "localhost:8000"], ids=type)
def test_another_kind_of_engine_is_refused(model, engine):
    with WeightChannel.create(model) as channel, pytest.raises(TypeError, match=r"vllm\.LLM"):
        EngineWeights(channel, engine)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_what_is_not_finite_ends_with_its_version(llm, model, seed):
    rng = random.Random(seed)
    good = copy.deepcopy(model.state_dict())
    _, parameter = rng.choice(list(model.named_parameters()))
    value = rng.choice([float("nan"), float("inf"), 1e38])
    before, after = ([rng.randrange(2, 400) for _ in range(rng.randrange(3, 200))] for _ in "12")
    with WeightChannel.create(model) as channel:
        weights = EngineWeights(channel, llm)
        with torch.no_grad():
            parameter.view(-1)[rng.randrange(parameter.numel())] = value
        weights.update()
        completion(llm, before)
        model.load_state_dict(good)
        weights.update()
        assert list(completion(llm, after).token_ids) == expected(model, after)
