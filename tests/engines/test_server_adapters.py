"""A server whose adapters are updated, and the requests that name them."""

import copy
import json
from concurrent.futures import ThreadPoolExecutor
from urllib.error import HTTPError

import pytest
import torch
from engine_log_probs import vary, worst_difference
from engine_servers import answer_of, completed, free_port, generated, server, without_routes
from peft import LoraConfig, get_peft_model
from tiny_engines import PROMPT, expected, tiny_model

from fusedrl import WeightChannel
from fusedrl.vllm import EngineWeights

PROMPTS = [[5, 6, 7, 8], [9, 10], [40, 41, 42, 43, 44, 45]]
TOKENS = 60


@pytest.fixture(scope="module")
def address(folder, model, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "server.log"
    options = ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "2"]
    options += ["--middleware", "fusedrl.vllm.ServedAdapters"]
    with server(folder, free_port(), log, *options) as address:
        yield address


@pytest.fixture
def adapted(folder):
    """A peft model of the server's own base."""
    return made(folder)


def made(folder):
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear")
    model = get_peft_model(tiny_model(folder), config).eval()
    vary(model, copy.deepcopy(model.state_dict()), "lora_")
    return model


@pytest.fixture
def feeding(address, adapted):
    with (
        WeightChannel.create(adapted, adapters="only") as channel,
        EngineWeights(channel, address, lora_name="policy") as weights,
    ):
        yield weights


@pytest.fixture
def failing(feeding, monkeypatch):
    """Has the server get no number of a new version, so that it goes back."""
    name = feeding._updates._engine.name

    def fail(label):
        if label == str(feeding.channel.version):
            raise RuntimeError("no answer")
        return name(label)

    def update():
        with monkeypatch.context() as patch:
            patch.setattr(feeding._updates._engine, "name", fail)
            with pytest.raises(RuntimeError, match="no answer") as told:
                feeding.update()
        assert "goes on with the version before" in told.value.__notes__[0]

    return update


def versions_of(choice):
    return [
        (int(span["version"]), span["start"], span["end"]) for span in choice["weight_versions"]
    ]


class TestInTurn:
    """Of one server, whose first test finds it without adapters."""

    def test_before_the_first_update_nobody_can_name_them(self, address, adapted, feeding, failing):
        def refused():
            with pytest.raises(HTTPError) as told:
                generated(address, model="policy")
            assert told.value.code == 404
            assert "`policy` does not exist" in json.load(told.value)["error"]["message"]
            with adapted.disable_adapter():
                assert generated(address)["token_ids"] == expected(adapted)

        refused()
        failing()
        refused()
        assert feeding.update() == 2
        assert generated(address, model="policy")["token_ids"] == expected(adapted)

    def test_the_name_is_that_of_each_version(self, address, adapted, feeding):
        start = copy.deepcopy(adapted.state_dict())
        with adapted.disable_adapter():
            base = expected(adapted)
        seen = set()
        for version in range(1, 4):
            vary(adapted, start, "lora_")
            assert feeding.update() == version
            choice = generated(address, model=feeding.lora_name)
            assert choice["token_ids"] == expected(adapted)
            assert versions_of(choice) == [(version, 0, 12)]
            assert completed(address, "policy")["token_ids"] == expected(adapted)
            assert generated(address)["token_ids"] == completed(address)["token_ids"] == base
            seen.add(tuple(expected(adapted)))
        assert len(seen | {tuple(base)}) > 2

    def test_requests_that_run_have_whole_versions(self, address, adapted, feeding):
        start, answers = copy.deepcopy(adapted.state_dict()), []
        states = {feeding.update(version=1000): start}
        with ThreadPoolExecutor(len(PROMPTS)) as threads:
            # On a busy machine all requests may end before the first update.
            while not any(len(answer.spans) > 1 for answer in answers):
                running = [
                    threads.submit(generated, address, prompt, TOKENS, 1.0, "policy")
                    for prompt in PROMPTS * 4
                ]
                while not all(request.done() for request in running):
                    state = vary(adapted, start, "lora_")
                    states[feeding.update()] = state
                answers += [
                    answer_of(prompt, request.result())
                    for prompt, request in zip(PROMPTS * 4, running, strict=True)
                ]
        assert all(len(answer.tokens) == TOKENS for answer in answers)
        assert worst_difference(adapted, states, answers) < 1e-4
        assert worst_difference(adapted, states, answers, shift=1) > 0.01

    def test_a_failed_update_leaves_those_before(self, address, adapted, feeding, failing):
        version, tokens = feeding.update(), expected(adapted)
        start = copy.deepcopy(adapted.state_dict())
        for _ in range(2):
            vary(adapted, start, "lora_")
            with ThreadPoolExecutor(1) as thread:
                running = thread.submit(generated, address, PROMPT, 200, 0, "policy")
                failing()
                assert running.result()["token_ids"][:12] == tokens
            choice = generated(address, model="policy")
            assert choice["token_ids"] == tokens
            assert versions_of(choice) == [(version, 0, 12)]
        feeding.update()
        assert generated(address, model="policy")["token_ids"] == expected(adapted) != tokens

    def test_a_trainer_that_starts_again_takes_the_place(self, address, folder, adapted, feeding):
        feeding.update(version=100)
        later = made(folder)
        vary(later, copy.deepcopy(later.state_dict()), "lora_")
        with (
            WeightChannel.create(later, adapters="only") as channel,
            EngineWeights(channel, address, lora_name="policy") as weights,
        ):
            assert weights.update() == 1
            choice = generated(address, model="policy")
            assert choice["token_ids"] == expected(later) != expected(adapted)
            assert versions_of(choice) == [(1, 0, 12)]

    def test_two_names(self, address, folder, adapted, feeding):
        """Last of them, as the server keeps both."""
        other = made(folder)
        vary(other, copy.deepcopy(other.state_dict()), "lora_")
        with (
            WeightChannel.create(other, adapters="only") as channel,
            EngineWeights(channel, address, lora_name="critic") as weights,
        ):
            feeding.update()
            weights.update()
            assert generated(address, model="policy")["token_ids"] == expected(adapted)
            assert generated(address, model="critic")["token_ids"] == expected(other)
        with (
            WeightChannel.create(other, adapters="only") as channel,
            EngineWeights(channel, address, lora_name="third") as weights,
        ):
            with pytest.raises(RuntimeError, match=r"expected room .* give these the lora_name"):
                weights.update()
            assert generated(address, model="policy")["token_ids"] == expected(adapted)


def test_a_server_without_the_middleware_is_told_how_to_have_it(adapted):
    with without_routes() as address, WeightChannel.create(adapted, adapters="only") as channel:
        weights = EngineWeights(channel, address)
        with pytest.raises(RuntimeError, match=r"--middleware fusedrl\.vllm\.Serv"):
            weights.update()


def test_a_name_that_the_server_gives_to_its_model(address, adapted):
    with (
        WeightChannel.create(adapted, adapters="only") as channel,
        EngineWeights(channel, address, lora_name="tiny") as weights,
    ):
        with pytest.raises(RuntimeError, match=r"lora_name: expected one .* got 'tiny'"):
            weights.update()
        assert weights.version is None
        with adapted.disable_adapter():
            assert generated(address)["token_ids"] == expected(adapted)
