"""The batches of a worker process, as its collector's attributes say at the time."""

from __future__ import annotations

import math
import weakref
from typing import Any

from torchrl.collectors.utils import split_trajectories

from fusedrl.collectors.batch_stream import Advance, Background, BatchStream, Ready
from fusedrl.collectors.policy_version import versions_in
from fusedrl.collectors.process.worker_handle import Arrived, WorkerHandle


class WorkerBatches(BatchStream):
    """The batches of a worker.

    Args:
        worker: the process.
        collector: its attributes say what is done with each batch; it is not kept alive.
        background: the thread that may take the batches.
        max_staleness: as for the collector.

    Attributes:
        number: the number that the worker gave to the batch that was taken last.
    """

    counter = "AsyncCollector.stale_frames"

    def __init__(
        self, worker: WorkerHandle, collector: Any, background: Background, max_staleness: Any
    ) -> None:
        super().__init__(background, None, max_staleness)
        self._worker, self._collector = worker, weakref.proxy(collector)
        self.number = 0

    def count_on(self, frames: int, batches: int) -> None:
        """Go on from the counts of a state."""
        self.frames, self.batches = frames, batches

    def _prepare(self, advance: Advance) -> Ready | None:
        if self.number <= self._worker.outdated:
            self._ready = None
        return super()._prepare(advance)

    def _wait(self) -> Arrived | None:
        if self.frames >= self._collector.total_frames:
            return None
        arrived = self._worker.batch(self.number, self._collector.timeout)
        if arrived.batch is None:
            self.number = arrived.number
            return None
        return arrived

    def _count(self, arrived: Arrived) -> bool:
        if arrived.number <= self._worker.outdated:
            return False
        self.number = arrived.number
        self.frames += arrived.frames
        self.batches += 1
        return True

    def _request(self) -> None:
        collector = self._collector
        if collector.update_at_each_batch:
            collector.update_policy_weights_()
        left = (collector.total_frames - self.frames) / (collector.requested_frames_per_batch or 1)
        self._worker.ask(self.number, math.ceil(min(collector.prefetch, left)))

    def _lateness(self, arrived: Arrived) -> int:
        return self._collector.policy_version - min(versions_in(arrived.batch))

    def _finished(self, batch: Any) -> Any:
        collector = self._collector
        if collector.replay_buffer is None and collector.split_trajs:
            batch = split_trajectories(batch, prefix="collector")
        if collector.postproc is not None:
            batch = collector.postproc(batch)
            private = [key for key in list(batch.keys()) if key.startswith("_")]
            batch = batch.exclude(*private) if private else batch
        if self.buffer is not None:
            batch.names = None
        return batch
