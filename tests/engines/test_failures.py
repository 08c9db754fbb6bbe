"""Updates that are refused or fail: no answer is under another version, and the next one works."""

import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
from engine_publishers import publisher
from tiny_engines import completion, expected, offline, spans_of, train

from fusedrl import WeightChannel
from fusedrl.vllm import EngineWeights
from fusedrl.vllm.engines import engine_of
from fusedrl.vllm.update import Update, run_calls

pytestmark = pytest.mark.slow

TENSORS = 27  # of the tiny model's checkpoint


@pytest.fixture(scope="module")
def llm(folder, model, faults):
    with offline(folder) as llm:
        yield llm


def answer_of(llm):
    """The greedy tokens, and the version that all of them are of."""
    answer = completion(llm)
    [(version, _, _)] = spans_of(answer, llm.get_weight_version())
    return list(answer.token_ids), version


def load(handle, llm, version, timeout=20.0):
    source = SimpleNamespace(version=None)
    return run_calls(Update(engine_of(llm), handle, source, timeout=timeout).run(version))


class TestATrainerInAnotherProcess:
    """That ends, stops, or was never there."""

    @pytest.fixture(autouse=True)
    def goes_on(self, llm, model):
        with WeightChannel.create(model) as channel:
            weights = EngineWeights(channel, llm)
            weights.update(version=100)
            yield
            train(model)
            assert weights.update() == 101
            assert answer_of(llm) == (expected(model), "101")

    def test_killed_after_a_version_that_can_still_be_loaded(self, llm):
        with publisher() as trainer:
            version, tokens = trainer.publish()
            assert load(trainer.handle, llm, version) == 1
            assert answer_of(llm) == (tokens, "1")
            version, tokens = trainer.publish()
            trainer.kill()
            assert load(trainer.handle, llm, version) == 2
            assert answer_of(llm) == (tokens, "2")
            with pytest.raises(
                Exception, match=rf"3 or later within .*, got 2.*{trainer.pid}.*dead"
            ):
                load(trainer.handle, llm, 3)
            assert answer_of(llm) == (tokens, "2")

    def test_stopped(self, llm):
        with publisher() as trainer:
            version, tokens = trainer.publish()
            load(trainer.handle, llm, version)
            os.kill(trainer.pid, signal.SIGSTOP)
            with pytest.raises(Exception, match=rf"2 or later within 0\.3 s, got 1.*{trainer.pid}"):
                load(trainer.handle, llm, 2, 0.3)
            assert answer_of(llm) == (tokens, "1")
            # What it has published is there, whatever it does.
            assert load(trainer.handle, llm, 1, 0.3) == 1
            os.kill(trainer.pid, signal.SIGCONT)
            version, tokens = trainer.publish()
            load(trainer.handle, llm, version)
            assert answer_of(llm) == (tokens, "2")


class TestInTheMiddle:
    """Of loading, where a model has parts of two versions, the version is loaded again."""

    @pytest.fixture
    def weights(self, llm, model):
        with WeightChannel.create(model) as channel:
            weights = EngineWeights(channel, llm)
            weights.update()
            yield weights

    def repaired(self, llm, model, weights):
        before = weights.version
        assert weights.update() > before
        return answer_of(llm) == (expected(model), str(weights.version))

    @pytest.mark.parametrize("kind", ["fails", "allocates"])
    @pytest.mark.parametrize("before", [0, 10, TENSORS - 1])
    def test_a_fault(self, llm, model, weights, faults, kind, before):
        assert answer_of(llm) == (expected(model), "1")
        train(model)
        with faults.told(kind, before=before):
            assert weights.update() == weights.version == 2
            faults.wait(0)
        assert answer_of(llm) == (expected(model), "2")
        assert self.repaired(llm, model, weights)

    def test_of_several_that_fail_twice(self, llm, model, weights, faults):
        train(model)
        for version in range(2, 7):  # more than the channel has slots
            with (
                faults.failing(always=True),
                pytest.raises(RuntimeError, match=f"version {version} .*second try.*out of memory"),
            ):
                weights.update()
            assert weights.version == 1
            assert llm.get_weight_version() == "unknown"
            assert [reader.leased for reader in weights.channel.readers()] == [()]
        # Nor does an update repair it that fails before it touches the model.
        with pytest.raises(Exception, match="within"):
            load(weights.channel.handle, llm, 99, 0.1)
        assert llm.get_weight_version() == "unknown"
        assert self.repaired(llm, model, weights)

    @pytest.mark.parametrize("kind", ["stops", "halts"])
    def test_a_trainer_that_is_killed_while_the_load_goes_on_or_fails(self, llm, faults, kind):
        with publisher() as trainer:
            load(trainer.handle, llm, trainer.publish()[0])
            version, tokens = trainer.publish()
            killing = threading.Thread(
                target=lambda: (faults.wait(), trainer.kill(), faults.lift())
            )
            with faults.told(kind):
                killing.start()
                assert load(trainer.handle, llm, version) == version
            killing.join()
        assert answer_of(llm) == (tokens, str(version))

    def test_ctrl_c(self, llm, model, weights, faults, default_signals):
        train(model)

        def interrupt():
            faults.wait()
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)
            faults.lift()

        with faults.stopping():
            thread = threading.Thread(target=interrupt)
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                weights.update()
            thread.join()
        assert weights.version == 2
        assert answer_of(llm) == (expected(model), "2")
        assert self.repaired(llm, model, weights)
