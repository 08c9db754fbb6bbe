"""The private names of torchrl that we need are there."""

from __future__ import annotations

import multiprocessing

import pytest
from torchrl.collectors import MultiSyncCollector
from weights_workers import Ones, make_policy

from fusedrl.compat.torchrl import before_processes_start


@pytest.mark.filterwarnings("ignore")
def test_a_function_runs_once_before_a_collectors_processes_start(monkeypatch):
    monkeypatch.setattr(
        "torchrl.collectors._multi_base._get_mp_ctx", lambda: multiprocessing.get_context("fork")
    )
    started = []

    class Watched(MultiSyncCollector):
        def _setup_multi_weight_sync(self, *args):
            before_processes_start(self, lambda: started.append(hasattr(self, "procs")))
            super()._setup_multi_weight_sync(*args)

    collector = Watched([Ones], make_policy(), frames_per_batch=2, total_frames=-1)
    before_processes_start(collector, lambda: started.append(True))
    collector.shutdown(raise_on_error=False)
    assert started == [False], "torchrl starts a collector's processes elsewhere now"
