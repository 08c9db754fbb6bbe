"""Yield the batches of a collector, or put them into its replay buffer."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from tensordict import is_tensor_collection

from fusedrl.collectors.options import check_whole
from fusedrl.collectors.policy_version import versions_in
from fusedrl.collectors.progress import log_batch
from fusedrl.compat.torchrl import for_buffer
from fusedrl.logs import warn_once

SHUT_DOWN = "collector: expected a running one, got one that was shut down; make another one"


class Stream:
    """The batches of a collector, for threads that iterate or for a thread that fills its buffer.

    Each batch goes to one thread. Ctrl-C may lose a batch in transit, which is already counted.

    The collector is referenced weakly. Its ``_next_batch()`` waits for a batch and counts it, or
    returns ``None`` at the end; ``_prefetch_next()`` requests one; ``_postproc()`` is torchrl's.
    """

    def __init__(self, collector: Any) -> None:
        self._collector: Any = weakref.proxy(collector)
        # Locks for taking a batch and for writing one into the buffer.
        self.taking, self.storing = threading.RLock(), threading.Lock()
        self.dropped = 0  # number of stale frames
        self._thread: Any = None
        self._error: BaseException | None = None  # raised in the thread
        self._stopping = False

    def take(self) -> list[Any]:
        """The next fresh batch (``None`` if the buffer got it) in a list, or ``[]`` at the end."""
        collector = self._collector
        self.check()
        if self.is_running() and self._thread is not threading.current_thread():
            raise RuntimeError(
                "collector: expected iteration or start(), got both; read from the replay buffer"
            )
        check_whole("max_staleness", collector.max_staleness, 0)
        with self.taking:
            while (batch := collector._next_batch()) is not None:
                stale = self._is_stale(batch)
                collector._prefetch_next()
                if collector.verbose:
                    log_batch(collector, batch)
                if stale:
                    self.dropped += batch.numel()
                    continue
                batch, buffer = collector._postproc(batch), collector.replay_buffer
                if buffer is None or collector._ignore_rb:
                    return [batch]
                with self.storing:
                    if batch.numel():  # postproc may drop all rows
                        buffer.extend(for_buffer(batch, buffer))
                return [None]
        return []

    def _is_stale(self, batch: Any) -> bool:
        most = self._collector.max_staleness
        if most is None or self._collector.policy_version - min(versions_in(batch)) <= most:
            return False
        warn_once(
            "collector: dropped a stale batch, whose oldest turn exceeds max_staleness; stale_turns"
            " (AsyncCollector: stale_frames) counts dropped turns (logged once)"
        )
        return True

    def start(self, batches: Callable[[], Iterator[Any]]) -> None:
        """Consume ``batches()`` in a thread, until the end or :meth:`stop`."""
        if self._collector.replay_buffer is None:
            raise RuntimeError(
                "replay_buffer: expected one for start(), got None; pass it to the constructor, or "
                "iterate"
            )
        if not self.is_running():
            options: Any = {"args": (batches,), "daemon": True, "name": "fusedrl-fill"}
            self._thread = threading.Thread(target=self._run, **options)
            self._thread.start()

    def _run(self, batches: Callable[[], Iterator[Any]]) -> None:
        try:
            for _ in batches():
                if self._stopping:
                    return
        except BaseException as error:
            if not self._stopping:  # else a consequence of the shutdown
                logging.getLogger("fusedrl").exception("collecting in the background failed")
                self._error = error

    def is_running(self) -> bool:
        """Whether the background thread is alive."""
        return self._thread is not None and self._thread.is_alive()

    def check(self) -> None:
        """Raise the error of the background thread, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def stop(self) -> None:
        """Tell the thread to stop after the current batch."""
        self._stopping = True

    def join(self, timeout: float | None = None) -> None:
        """Join the thread, unless called from it."""
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(timeout)


class Batches:
    """Iterates over the generator of ``begin``, and calls ``begin`` again after an exception."""

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin
        self._batches: Any = None

    def __iter__(self) -> Batches:
        """The iterator itself."""
        return self

    def __next__(self) -> Any:
        """The next batch."""
        batches, self._batches = self._batches or self._begin(), None
        batch = next(batches)
        self._batches = batches
        return batch

    def close(self) -> None:
        """Drop the generator, for ``contextlib.closing``; the next batch starts a new one."""
        self._batches = None


def finished(batch: Any, postproc: Callable[[Any], Any] | None) -> Any:
    """Apply the user's ``postproc``, and drop keys with a part that begins with ``_``."""
    batch = batch if postproc is None else postproc(batch)
    if not is_tensor_collection(batch):
        raise TypeError(
            f"postproc: expected a function that returns a tensordict, got {batch!r} from it; "
            "return the batch"
        )
    # Keys of one row: torchrl intersects those of all rows, which is slow for many.
    row: Any = batch if 0 in batch.shape else batch[(0,) * batch.batch_dims]
    paths = [key if isinstance(key, tuple) else (key,) for key in row.keys(True)]
    private = [path for path in paths if any(part.startswith("_") for part in path)]
    return batch.exclude(*private, inplace=True) if private else batch
