"""What ends an engine: half of the weights of a version, or a process that is killed.

Each test has an engine of its own, as it does not outlive it.
"""

import os
import signal
import threading
from pathlib import Path

import pytest
from engine_faults import inject
from tiny_engines import completion, expected, offline, train

from fusedrl import WeightChannel
from fusedrl.vllm import EngineWeights

pytestmark = pytest.mark.slow


def test_they_leave_an_engine_with_this_backend_as_it_was(folder, model, tmp_path, monkeypatch):
    """And half of them, which a failing worker has loaded, are not generated with."""
    from vllm.v1.engine.exceptions import EngineDeadError

    faults = inject(tmp_path, monkeypatch)
    with offline(folder) as llm, WeightChannel.create(model) as channel:
        before = expected(model)
        llm.start_weight_update()
        with pytest.raises(Exception, match="address"):
            llm.update_weights({"update_info": {"weights": "of a trainer that has ended"}})
        assert list(completion(llm).token_ids) == before
        train(model)
        weights = EngineWeights(channel, llm)
        with (
            faults.failing(always=True),
            pytest.raises(RuntimeError, match=r"second try, got .*out of memory"),
        ):
            weights.update()
        with pytest.raises(EngineDeadError):
            completion(llm)
        with pytest.raises(EngineDeadError):
            weights.update()


def test_an_engine_that_is_killed_during_an_update(folder, model, tmp_path, monkeypatch):
    faults = inject(tmp_path, monkeypatch)

    def kill():
        worker = faults.wait()
        status = Path(f"/proc/{worker}/status").read_text()
        os.kill(int(status.split("PPid:")[1].split()[0]), signal.SIGKILL)

    with offline(folder) as llm, WeightChannel.create(model, slots=2) as channel:
        weights = EngineWeights(channel, llm)
        with faults.stopping():
            killing = threading.Thread(target=kill)
            killing.start()
            with pytest.raises(RuntimeError, match="ended during the call") as told:
                weights.update()
            killing.join()
        assert "start a new one" in str(told.value)
        assert weights.version is None
        # Nobody holds the slot that its worker had leased.
        assert [channel.publish(), channel.publish()] == [2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_is_killed_ends_the_engine(folder, model, tmp_path, monkeypatch, workers):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    faults = inject(tmp_path, monkeypatch)
    with (
        offline(folder, tensor_parallel_size=workers) as llm,
        WeightChannel.create(model) as channel,
    ):
        weights = EngineWeights(channel, llm)
        weights.update()
        with (
            faults.told("dies", workers - 1),
            pytest.raises(Exception, match=r"start a new|EngineCore|died"),
        ):
            weights.update()
        with pytest.raises(Exception, match=r"dead|died|Engine"):
            completion(llm)
