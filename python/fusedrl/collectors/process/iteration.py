"""How an ``AsyncCollector`` takes batches from its worker, and what becomes of them."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tensordict import TensorDictBase
from torchrl.collectors.utils import (
    _maybe_normalize_replay_buffer_tensordict_device,
    split_trajectories,
)

from fusedrl.collectors.process.calls import AsyncCalls, Done
from fusedrl.collectors.process.errors import ShutDown
from fusedrl.collectors.process.inbox import Arrived
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
    _iterator: Any  # of next()
    _thread: threading.Thread | None  # of start()
    _storing: threading.Lock  # held while a batch goes into the buffer
    _stop: bool

    def iterator(self) -> Iterator[Any]:
        """Batches until ``total_frames`` were collected; ``None`` each where a buffer gets them.

        Where Ctrl-C breaks this off, the next iterator goes on with the batch that was to come.
        """
        self._refuse_beside_thread()
        if self.update_at_each_batch:
            self.update_policy_weights_()
        with progress_bar(self) as advance:
            while self._frames < self.total_frames:
                arrived = self._running().batch(self._done.number, self.timeout)
                if arrived.error is not None:
                    raise arrived.error
                stale = self._stale_frames(arrived)
                done = self._done.with_batch(arrived.number, arrived.frames, stale)
                if arrived.is_end:
                    self._done = done._replace(batches=self._done.batches)
                    return
                if self.update_at_each_batch:
                    self.update_policy_weights_()
                self._ask(self.prefetch, done)
                advance(arrived.batch, turns=self._loaded.frames + done.frames)
                batch, as_it_is = arrived.batch, self._is_handed_out_as_it_is()
                if self._running().is_outdated(arrived.number):
                    continue
                # Ctrl-C comes before the next line, or after the batch is handed out: nothing is
                # called in between. What it breaks off of a postproc or a buffer's extend() is
                # not begun again, as they may have changed the batch, or kept a part of it.
                self._done = done
                if as_it_is and not stale:
                    yield batch
                elif not stale:
                    yield self._handed_out(batch)
                del batch, arrived
                self._running().drop(done.number)  # its memory is given back with the next question

    def next(self) -> TensorDictBase | None:
        """The next batch without its device; ``None`` at the end, and where a buffer gets it."""
        if self._iterator is None:
            self._iterator = iter(self)
        try:
            for batch in self._iterator:
                if batch is None or batch.device is None:
                    return batch
                return batch.copy().clear_device_()
        except BaseException:
            self._iterator = None  # it is over; another one goes on
            raise
        self._iterator = None

    def _ask(self, ahead: int, done: Done) -> None:
        """Have ``ahead`` batches made after what is done, but for those that nobody would get."""
        left = self.total_frames - self._loaded.frames - done.frames
        wanted = math.ceil(min(ahead, left / (self.requested_frames_per_batch or 1)))
        self._running().ask(done.number, wanted)

    def _is_handed_out_as_it_is(self) -> bool:
        return self.postproc is None and self.replay_buffer is None and not self.split_trajs

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

    def _stale_frames(self, arrived: Arrived) -> int:
        """How many frames are dropped: all of a batch that is too old, else none."""
        if self.max_staleness is None or arrived.oldest is None:
            return 0
        late = self.policy_version - arrived.oldest
        told = "AsyncCollector.stale_frames"
        if is_too_old(late, self.max_staleness, self.stale_frames, told):
            return arrived.batch.numel()
        return 0

    def start(self) -> None:
        """Fill the replay buffer from a thread, until the end or :meth:`async_shutdown`.

        What goes wrong in the thread is logged at once, and raised by the next call.

        Raises:
            RuntimeError: there is no replay buffer.
        """
        if self.replay_buffer is None:
            raise RuntimeError(
                "replay_buffer: expected one for start(), got None; pass it, or iterate"
            )
        self._running()
        if not self.is_running():
            self._thread = threading.Thread(target=self._fill, daemon=True, name="fusedrl-fill")
            self._thread.start()

    def _fill(self) -> None:
        try:
            batches = (
                self.iterator() if self.trajs_per_batch is None else self._iter_by_trajectories()
            )
            for _ in batches:
                if self._stop:
                    return
        except ShutDown:
            pass
        except BaseException as error:
            logger.exception("AsyncCollector: collecting in the background failed")
            self._thread_error = error

    def is_running(self) -> bool:
        """Whether :meth:`start` was called and its thread still fills the buffer."""
        return self._thread is not None and self._thread.is_alive()

    def _refuse_beside_thread(self) -> None:
        if self.is_running() and self._thread is not threading.current_thread():
            raise RuntimeError(
                "collector: expected to be iterated or start()ed, got both; read the replay buffer"
            )

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Let nothing into the buffer in this block; the worker goes on for ``prefetch`` batches.

        Raises:
            RuntimeError: there is nothing to pause.
        """
        if not self.is_running():
            self._raise_thread_error()
            raise RuntimeError("pause: expected a collector after start(), got none that runs")
        with self._storing:
            yield
