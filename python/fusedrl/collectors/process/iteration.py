"""How an ``AsyncCollector`` takes batches from its worker, and what becomes of them."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tensordict import TensorDictBase
from torchrl.collectors.utils import (
    _maybe_normalize_replay_buffer_tensordict_device,
    split_trajectories,
)

from fusedrl.collectors.process.calls import AsyncCalls
from fusedrl.collectors.progress import progress_bar
from fusedrl.collectors.staleness import is_too_old

logger = logging.getLogger("fusedrl")


class AsyncIteration(AsyncCalls):
    """The trainer's side of :class:`fusedrl.AsyncCollector`, a batch at a time."""

    _ignore_rb = False  # torchrl's: whether whole trajectories go into the buffer elsewhere

    total_frames: Any
    requested_frames_per_batch: Any
    postproc: Callable[[TensorDictBase], TensorDictBase] | None
    prefetch: int
    timeout: float | None
    max_staleness: int | None
    stale_frames: int
    _thread: threading.Thread | None  # of start()
    _thread_error: Exception | None
    _storing: threading.Lock  # held while a batch goes into the buffer
    _stop: bool

    def iterator(self) -> Iterator[Any]:
        """Batches until ``total_frames`` were collected; ``None`` each where a buffer gets them."""
        if self.update_at_each_batch:
            self.update_policy_weights_()
        with progress_bar(self) as advance:
            while self._frames < self.total_frames:
                self._ask(1)
                arrived = self._running().batch(self.timeout)
                if arrived is None:
                    return
                shipment, frames, oldest = arrived
                self._asked -= 1
                self._iter += 1
                self._frames += frames
                batch = self._mappings.unpack(shipment)
                if self.update_at_each_batch:
                    self.update_policy_weights_()
                self._ask(self.prefetch)
                advance(batch)
                if not self._is_stale(batch, oldest):
                    yield self._handed_out(batch)
                del batch, shipment, arrived  # its memory is given back with the next question

    def _ask(self, ahead: int) -> None:
        """See to it that ``ahead`` batches are under way, but for those that nobody would get."""
        under_way = self._frames + self._asked * (self.requested_frames_per_batch or 1)
        missing = ahead - self._asked
        if (self._asked and under_way >= self.total_frames) or self._frames >= self.total_frames:
            missing = 0
        if missing > 0:
            self._running().ask(missing, self._mappings.released())
            self._asked += missing

    def _handed_out(self, batch: TensorDictBase) -> TensorDictBase | None:
        if self.replay_buffer is None and self.split_trajs:
            batch = split_trajectories(batch, prefix="collector")
        if self.postproc is not None:
            batch = self.postproc(batch)
            private = [key for key in list(batch.keys()) if key.startswith("_")]
            batch = batch.exclude(*private) if private else batch
        if self.replay_buffer is None or self._ignore_rb:
            return batch
        batch.names = None
        batch = _maybe_normalize_replay_buffer_tensordict_device(batch, self.replay_buffer)
        with self._storing:
            self.replay_buffer.extend(batch)
        return None

    def _is_stale(self, batch: TensorDictBase, oldest: int | None) -> bool:
        if self.max_staleness is None or oldest is None:
            return False
        late = self.policy_version - oldest
        if is_too_old(late, self.max_staleness, self.stale_frames, "AsyncCollector.stale_frames"):
            self.stale_frames += batch.numel()
            return True
        return False

    def start(self) -> None:
        """Fill the replay buffer from a thread, until the end or :meth:`async_shutdown`.

        Raises:
            RuntimeError: there is no replay buffer.
        """
        if self.replay_buffer is None:
            raise RuntimeError(
                "replay_buffer: expected one for start(), got None; pass it, or iterate"
            )
        if not self.is_running():
            self._thread = threading.Thread(target=self._fill, daemon=True, name="fusedrl-fill")
            self._thread.start()

    def _fill(self) -> None:
        try:
            for _ in self:
                if self._stop:
                    return
        except Exception as error:
            if not self._stop:
                logger.error("AsyncCollector: the thread of start() ended: %s", error)
                self._thread_error = error

    def is_running(self) -> bool:
        """Whether :meth:`start` was called and its thread still fills the buffer."""
        return self._thread is not None and self._thread.is_alive()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Let nothing into the buffer in this block; the worker goes on for ``prefetch`` batches.

        Raises:
            RuntimeError: there is nothing to pause.
        """
        if not self.is_running():
            raise RuntimeError("pause: expected a collector after start(), got none that runs")
        with self._storing:
            yield
