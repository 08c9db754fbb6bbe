"""Takes a worker's batches in the trainer, and hands them out or stores them."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tensordict import TensorDictBase
from torchrl.collectors.utils import (
    _maybe_normalize_replay_buffer_tensordict_device,
    split_trajectories,
)

from fusedrl.collectors.policy_version import versions_in
from fusedrl.collectors.process.async_options import AsyncOptions
from fusedrl.collectors.process.inbox import ReceivedBatch
from fusedrl.collectors.process.published_weights import PublishedWeights
from fusedrl.collectors.process.worker_process import WorkerProcess
from fusedrl.collectors.staleness import is_too_old


class Taken(NamedTuple):
    """What the trainer has received: the number of its last batch, and the totals."""

    number: int = 0
    frames: int = 0
    batches: int = 0
    stale: int = 0

    def with_batch(self, number: int, frames: int, stale: int) -> Taken:
        """What it has received after one more batch."""
        return Taken(number, self.frames + frames, self.batches + 1, self.stale + stale)


class BatchStream:
    """The batches of a worker, one after the other.

    Args:
        worker: the process that makes the batches.
        weights: tell which version is the newest.
        options: how many batches there are, how many are made ahead, and what is done with each.

    Attributes:
        taken: what this process has received.
        storing: a lock that is held while a batch goes into the buffer.
    """

    def __init__(
        self, worker: WorkerProcess, weights: PublishedWeights, options: AsyncOptions
    ) -> None:
        self._worker, self._weights, self._options = worker, weights, options
        self._loaded = Taken()  # the counts of a state that was loaded, which are added
        self.taken = Taken()
        self.storing = threading.Lock()

    @property
    def frames(self) -> int:
        """Frames so far, including those of a state that was loaded."""
        return self._loaded.frames + self.taken.frames

    @property
    def batches(self) -> int:
        """Batches so far, including those of a state that was loaded."""
        return self._loaded.batches + self.taken.batches

    def count_on(self, frames: int, batches: int) -> None:
        """Go on from the counts of a state."""
        self._loaded = Taken(
            frames=frames - self.taken.frames, batches=batches - self.taken.batches
        )

    def take(
        self, update: Callable[[], None] | None, advance: Callable[..., None], store: bool
    ) -> Iterator[Any]:
        """Batches until the last frame was collected; ``None`` each where a buffer gets them.

        If Ctrl-C interrupts it, the next iterator goes on with the batch that was to come.

        Args:
            update: a function that is called for each batch, before the next one is requested.
            advance: a function that is called with each batch, to show the progress.
            store: whether batches are put into the buffer here, if there is one.
        """
        while self.frames < self._options.total_frames:
            arrived = self._worker.batch(self.taken.number, self._options.timeout)
            if arrived.error is not None:
                raise arrived.error
            stale = self._stale_frames(arrived)
            taken = self.taken.with_batch(arrived.number, arrived.frames, stale)
            if arrived.is_end:
                self.taken = taken._replace(batches=self.taken.batches)
                return
            if update is not None:
                update()
            self.ask(self._options.prefetch, taken)
            advance(arrived.batch, turns=self._loaded.frames + taken.frames)
            batch, as_it_is = arrived.batch, self._is_handed_out_as_it_is()
            if self._worker.is_outdated(arrived.number):
                continue
            # Nothing is called between the next line and the handing out of the batch, so Ctrl-C
            # comes before or after both. If it interrupts a postproc or a buffer's extend(), these
            # are not run again, since they may have changed the batch or kept a part of it.
            self.taken = taken
            if as_it_is and not stale:
                yield batch
            elif not stale:
                yield self._handed_out(batch, store)
            del batch, arrived
            self._worker.drop(taken.number)  # the next request returns its memory to the worker

    def ask(self, ahead: int, taken: Taken) -> None:
        """Ask for ``ahead`` batches after those that are taken, as far as they will be needed."""
        left = self._options.total_frames - self._loaded.frames - taken.frames
        wanted = math.ceil(min(ahead, left / (self._options.frames_per_batch or 1)))
        self._worker.ask(taken.number, wanted)

    def _is_handed_out_as_it_is(self) -> bool:
        options = self._options
        return (
            options.postproc is None and options.replay_buffer is None and not options.split_trajs
        )

    def _handed_out(self, batch: TensorDictBase, store: bool) -> TensorDictBase | None:
        buffer, postproc = self._options.replay_buffer, self._options.postproc
        if buffer is None and self._options.split_trajs:
            batch = split_trajectories(batch, prefix="collector")
        if postproc is not None:
            batch = postproc(batch)
            private = [key for key in list(batch.keys()) if key.startswith("_")]
            batch = batch.exclude(*private) if private else batch
        if buffer is None or not store:
            return batch
        batch.names = None
        batch = _maybe_normalize_replay_buffer_tensordict_device(batch, buffer)
        with self.storing:
            buffer.extend(batch)
        return None

    def _stale_frames(self, arrived: ReceivedBatch) -> int:
        """How many frames of a batch are dropped: all if it is too old, otherwise none."""
        most = self._options.max_staleness
        if most is None:
            return 0
        # The worker does not tell the oldest version if the bound was set after it had started.
        oldest = min(versions_in(arrived.batch)) if arrived.oldest is None else arrived.oldest
        late = self._weights.version - oldest
        dropped = is_too_old(late, most, self.taken.stale, "AsyncCollector.stale_frames")
        return arrived.batch.numel() if dropped else 0
