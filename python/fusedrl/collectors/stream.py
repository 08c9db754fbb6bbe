"""Hands out a collector's batches, one after the other, or puts them into its replay buffer."""

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

SHUT_DOWN = "collector: expected one that runs, got one that was shut down; make another one"


class Stream:
    """The batches of a collector, each of which one of the threads that iterate gets.

    Or a thread of the stream takes them all, for the buffer. Ctrl-C may lose the batch that it
    meets, which is counted by then.

    The collector is not kept alive. Its ``_arrive()`` waits for a batch, counts it and returns it,
    or ``None`` at the end; ``_ahead()`` lets the next one begin; ``_postproc(batch)`` is torchrl's.
    """

    def __init__(self, collector: Any) -> None:
        self._collector: Any = weakref.proxy(collector)
        # Held while a batch is taken, and while one goes into the buffer.
        self.taking, self.storing = threading.RLock(), threading.Lock()
        self.dropped = 0  # frames that were too old
        self._thread: Any = None
        self._error: BaseException | None = None  # what ended the thread
        self._stopping = False

    def take(self) -> list[Any]:
        """The next batch that is not too old, ``None`` if the buffer has it; nothing at the end."""
        collector = self._collector
        self.check()
        if self.is_running() and self._thread is not threading.current_thread():
            raise RuntimeError(
                "collector: expected to be iterated or start()ed, got both; read the replay buffer"
            )
        check_whole("max_staleness", collector.max_staleness, 0)
        with self.taking:
            while (batch := collector._arrive()) is not None:
                too_old = self._is_too_old(batch)
                collector._ahead()
                if collector.verbose:
                    log_batch(collector, batch)
                if too_old:
                    self.dropped += batch.numel()
                    continue
                batch, buffer = collector._postproc(batch), collector.replay_buffer
                if buffer is None or collector._ignore_rb:
                    return [batch]
                with self.storing:
                    if batch.numel():  # postproc may leave nothing
                        buffer.extend(for_buffer(batch, buffer))
                return [None]
        return []

    def _is_too_old(self, batch: Any) -> bool:
        most = self._collector.max_staleness
        if most is None or self._collector.policy_version - min(versions_in(batch)) <= most:
            return False
        warn_once(
            "collector: a batch was dropped, as its oldest turn is more than max_staleness "
            "versions old; stale_turns (AsyncCollector: stale_frames) counts (this is said once)"
        )
        return True

    def start(self, batches: Callable[[], Iterator[Any]]) -> None:
        """Take what ``batches()`` yields in a thread, until the end or :meth:`stop`."""
        if self._collector.replay_buffer is None:
            raise RuntimeError(
                "replay_buffer: expected one for start(), got None; pass it when the collector is "
                "made, or iterate"
            )
        if not self.is_running():
            options: Any = {"args": (batches,), "daemon": True, "name": "fusedrl-fill"}
            self._thread = threading.Thread(target=self._take_all, **options)
            self._thread.start()

    def _take_all(self, batches: Callable[[], Iterator[Any]]) -> None:
        try:
            for _ in batches():
                if self._stopping:
                    return
        except BaseException as error:
            if not self._stopping:  # otherwise it is that of a collector that ends
                logging.getLogger("fusedrl").exception("collecting in the background failed")
                self._error = error

    def is_running(self) -> bool:
        """Whether the thread is taking batches."""
        return self._thread is not None and self._thread.is_alive()

    def check(self) -> None:
        """Raise the error that ended the thread, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def stop(self) -> None:
        """Let the thread take no further batch."""
        self._stopping = True

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the thread, unless this is called in it."""
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(timeout)


class Batches:
    """What the generator yields that ``begin`` makes, anew after an exception, which ends it."""

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin
        self._batches: Any = None

    def __iter__(self) -> Batches:
        """The iterator itself."""
        return self

    def __next__(self) -> Any:
        """The next batch, or the reason why there is none."""
        batches, self._batches = self._batches or self._begin(), None
        batch = next(batches)
        self._batches = batches
        return batch

    def close(self) -> None:
        """End the generator, as ``contextlib.closing`` does; the next batch begins another one."""
        self._batches = None


def finished(batch: Any, postproc: Callable[[Any], Any] | None) -> Any:
    """A batch after the caller's postprocessing, without keys of which a part begins with ``_``."""
    batch = batch if postproc is None else postproc(batch)
    if not is_tensor_collection(batch):
        raise TypeError(
            f"postproc: expected a function that returns a tensordict, got {batch!r} from it; "
            "return the batch, changed or not"
        )
    # torchrl lists the keys that all rows have, which takes time for many.
    row: Any = batch if 0 in batch.shape else batch[(0,) * batch.batch_dims]
    paths = [key if isinstance(key, tuple) else (key,) for key in row.keys(True)]
    private = [path for path in paths if any(part.startswith("_") for part in path)]
    return batch.exclude(*private, inplace=True) if private else batch
