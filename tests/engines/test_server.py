"""A server that a trainer feeds by its address."""

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_publishers import updater
from engine_servers import (
    completed,
    engine_processes,
    free_port,
    generated,
    is_paused,
    post,
    server,
    wait_until_running,
    without_routes,
)
from tiny_engines import expected, train

from fusedrl import WeightChannel
from fusedrl.vllm import EngineWeights
from fusedrl.vllm.update import run_calls

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return tmp_path_factory.mktemp("log") / "server.log"


@pytest.fixture(scope="class")
def address(folder, model, faults, log):
    with server(folder, free_port(), log) as address:
        yield address


class TestRunning:
    """A server that runs."""

    def answer_of(self, address):
        choice = generated(address)
        return choice["token_ids"], [tuple(span.values()) for span in choice["weight_versions"]]

    def test_it_has_the_weights_of_each_update(self, address, model):
        with WeightChannel.create(model) as channel:
            weights = EngineWeights(channel, address)
            for version in range(1, 4):
                train(model)
                assert weights.update() == version
                assert self.answer_of(address) == (expected(model), [(str(version), 0, 12)])
                answer = completed(address)
                assert answer["token_ids"] == expected(model)
                # The other routes do not say which weights made the tokens.
                assert not any("version" in field for field in answer)

    def test_a_pause_that_somebody_made_stays(self, address, model):
        train(model)
        with WeightChannel.create(model) as channel:
            weights = EngineWeights(channel, address, timeout=0.2)
            post(address, "pause?mode=keep", {})
            channel.publish()
            with pytest.raises(RuntimeError, match="expected 7"):
                run_calls(weights._update.run(7))
            assert weights.update() == 2
            assert is_paused(address)
            with ThreadPoolExecutor(1) as thread:
                waiting = thread.submit(self.answer_of, address)
                post(address, "resume", {})
                assert waiting.result() == (expected(model), [("2", 0, 12)])

    @pytest.mark.parametrize("seed", range(10))
    def test_a_trainer_that_is_killed_at_any_moment_of_its_updates(self, address, model, seed):
        with updater(address, seed) as trainer:
            trainer.kill_after(random.Random(seed).uniform(0, 0.3))
            deadline = time.monotonic() + 60
            time.sleep(3)
            while is_paused(address):
                assert time.monotonic() < deadline, "the server stays paused"
                time.sleep(0.2)
            tokens, [(label, _, _)] = self.answer_of(address)
            assert tokens == trainer.expected(int(label))
        # And the next trainer is not kept from it.
        with WeightChannel.create(model) as channel:
            weights = EngineWeights(channel, address)
            weights.update(version=100)
            assert self.answer_of(address) == (expected(model), [("100", 0, 12)])

    def test_requests_wait_after_one_that_fails_twice(self, address, model, faults):
        with (
            WeightChannel.create(model) as channel,
            ThreadPoolExecutor(1) as thread,
        ):
            weights = EngineWeights(channel, address)
            weights.update(version=100)
            with faults.failing(always=True), pytest.raises(RuntimeError, match="out of memory"):
                weights.update()
            assert is_paused(address)
            waiting = thread.submit(self.answer_of, address)
            train(model)
            assert weights.update() == 102
            assert waiting.result() == (expected(model), [("102", 0, 12)])

    @pytest.mark.parametrize("kind", ["stops", "halts"])
    def test_a_trainer_that_is_killed_while_the_engine_loads(self, address, faults, kind):
        """The engine loads the new version then, again if it has to."""
        with updater(address, 0) as trainer:
            with faults.told(kind):
                faults.wait()
                trainer.kill_after(0)
            wait_until_running(address)
            tokens, [(label, _, _)] = self.answer_of(address)
            assert tokens == trainer.expected(int(label))

    def test_an_engine_that_ended_is_not_waited_for(self, address, model):
        with WeightChannel.create(model) as channel:
            weights = EngineWeights(channel, address)
            engines = engine_processes()
            assert engines
            for engine in engines:
                os.kill(engine, signal.SIGKILL)
            with pytest.raises(RuntimeError, match=rf"engine: expected .*(ended|{address})"):
                weights.update()


def test_a_server_that_was_restarted_gets_the_channel_again(folder, model, log):
    port = free_port()
    with WeightChannel.create(model) as channel:
        weights = EngineWeights(channel, f"http://127.0.0.1:{port}")
        with pytest.raises(RuntimeError, match=r"expected a server at .*, got .*start it first"):
            weights.update()
        for _ in range(2):
            with server(folder, port, log) as address:
                train(model)
                version = weights.update()
                answer = generated(address)
                assert answer["token_ids"] == expected(model)
                assert answer["weight_versions"][0]["version"] == str(version)


def test_a_server_without_the_routes_is_told_how_to_have_them(model, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # which gets no call, nor its secret
    with without_routes() as address, WeightChannel.create(model) as channel:
        weights = EngineWeights(channel, address)
        with pytest.raises(RuntimeError, match="VLLM_SERVER_DEV_MODE=1"):
            weights.update()
