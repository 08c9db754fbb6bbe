"""Hands out the batches of a collector, one after the other, or puts them into a buffer.

It does that in the thread that iterates, or in one of its own.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from tensordict import LazyStackedTensorDict, is_non_tensor, is_tensor_collection, is_tensorclass

from fusedrl.channel.rendezvous import interrupted_later
from fusedrl.collectors.options import check_whole
from fusedrl.collectors.policy_version import versions_in
from fusedrl.collectors.progress import log_batch
from fusedrl.compat.tensordict import tensordict_of
from fusedrl.compat.torchrl import for_buffer

logger = logging.getLogger("fusedrl")

Advance = Callable[[Any], None]  # shows a batch

SHUT_DOWN = "collector: expected one that runs, got one that was shut down; make another one"


class Ready(NamedTuple):
    """A batch that was counted and is handed out next; ``None`` if a buffer has it."""

    batch: Any


class Batches:
    """An iterator that goes on after an exception, where a generator would have ended in silence.

    Args:
        begin: makes the generator of the batches, anew after an exception.
    """

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin
        self._batches: Any = None

    def __iter__(self) -> Batches:
        """The iterator itself."""
        return self

    def __next__(self) -> Any:
        """The next batch, or the reason why there is none."""
        batches, self._batches = self._batches or self._begin(), None
        for batch in batches:
            self._batches = batches
            return batch
        raise StopIteration

    def close(self) -> None:
        """End the generator, as ``contextlib.closing`` does; the next batch begins another one."""
        batches, self._batches = self._batches, None
        if batches is not None:
            batches.close()


class BatchStream:
    """The batches of turns that run here, or of a worker.

    Ctrl-C changes nothing while this waits for a batch. After that, the batch is counted, and kept
    until it is handed out, so that the next iteration goes on with it: after Ctrl-C within
    ``postproc`` that begins again, and a buffer's ``extend`` is waited for. Each batch is handed
    out once, to one of the threads that iterate.

    Args:
        collector: whose batches they are; it is not kept alive.
        buffer: the buffer that gets the batches here, if any.

    Attributes:
        background: the thread that may take the batches.
        frames: frames so far, including those of a state that was loaded.
        batches: batches so far, including those of a state that was loaded.
        dropped: frames that were dropped here.
        storing: a lock that is held while a batch goes into the buffer.
        taking: a lock that is held while a batch is made ready.
        ready: a batch that was not handed out yet, if there is one.
    """

    counter = ""  # the class of the collector, and its attribute that counts what is dropped

    def __init__(self, collector: Any, buffer: Any) -> None:
        self._collector: Any = weakref.proxy(collector)
        self.buffer = buffer
        self.background = Background(self.counter.partition(".")[0])
        self.frames = self.batches = self.dropped = 0
        self.storing = threading.Lock()
        self.ready: Ready | None = None
        self._counted: Any = None  # what was counted, and is not ready yet
        self.taking: Any = threading.RLock()

    def rest(self) -> Iterator[Any]:
        """The batches until the last frame that are not too old; ``None`` where a buffer gets one.

        Raises:
            RuntimeError: the collector is shut down, or another thread takes its batches.
        """
        while True:
            self.check()
            check_whole("max_staleness", self._collector.max_staleness, 0)
            with self.taking:
                ready = self.prepare(partial(log_batch, self._collector))
            if ready is None:
                return
            # Python handles signals, and lets other threads run, at calls and jumps, and so not
            # between these lines.
            if self.ready is not ready:
                continue  # another thread was handed it
            batch, ready, self.ready = ready.batch, None, None
            yield (batch, batch := None)[0]  # a frame that waits keeps no batch; no call here

    def check(self) -> None:
        """Raise ``RuntimeError`` if no batch can be taken here; nothing has begun then."""
        self.background.refuse_others()

    def prepare(self, advance: Advance) -> Ready | None:
        """Make the next batch ready, unless one is, and return it; ``None`` at the end."""
        while self.ready is None:
            if self._counted is None:
                arrived = self._wait()
                if arrived is None:
                    break
                if not self._count(arrived):
                    continue
                self._counted = arrived
                del arrived
            try:
                self._make_ready(self._counted, advance)
            except Exception:
                self._counted = None  # it would fail again
                raise
        return self.ready

    def _make_ready(self, counted: Any, advance: Advance) -> None:
        drops = self._is_too_old(counted.batch)
        self._request()
        advance(counted.batch)
        if drops:
            self.dropped += counted.batch.numel()
            self._counted = None
            return
        batch = self._finished(counted.batch)
        with interrupted_later():  # a buffer cannot go on with half of a batch
            self.ready, self._counted = Ready(self._stored(batch)), None

    def _is_too_old(self, batch: Any) -> bool:
        """Whether to drop a batch; the first time is logged."""
        most = self._collector.max_staleness
        if most is None:
            return False
        staleness = self._collector.policy_version - min(versions_in(batch))
        if staleness > most and not self.dropped:
            logger.warning(
                "a batch was dropped, its oldest turn is %d versions old and max_staleness is %d; "
                "%s counts (this is said once)",
                staleness,
                most,
                self.counter,
            )
        return staleness > most

    def _stored(self, batch: Any) -> Any:
        """A batch to hand out, or ``None`` once it is in the buffer."""
        if batch is None or self.buffer is None:
            return batch
        with self.storing:
            if batch.numel():  # postproc may leave nothing
                self.buffer.extend(for_buffer(batch, self.buffer))
        return None

    def forget(self) -> None:
        """Drop the batch that was not handed out yet, if there is one."""
        self.ready = self._counted = None

    # What a source does in its own way.

    def _wait(self) -> Any:
        """Wait for the next ``batch``, in a record, and change nothing; ``None`` at the end."""
        raise NotImplementedError

    def _count(self, arrived: Any) -> bool:
        """Count a batch; false if it is outdated, or if there is none."""
        raise NotImplementedError

    def _request(self) -> None:
        """Let the source collect what will be needed next."""
        raise NotImplementedError

    def _finished(self, batch: Any) -> Any:
        """A batch after the postprocessing that is done in this process, without private keys."""
        postproc = self._collector.postproc
        batch = batch if postproc is None else postproc(batch)
        if not is_tensor_collection(batch):
            raise TypeError(
                f"postproc: expected a function that returns a tensordict, got {batch!r} from it; "
                "return the batch, changed or not"
            )
        # torchrl lists all keys of a batch, which takes time for many rows.
        private = list(_private_keys(batch))
        return batch.exclude(*private, inplace=True) if private else batch


def _private_keys(row: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Keys with a part that begins with ``_``; for stacked rows, those of the first row."""
    while isinstance(row, LazyStackedTensorDict) or is_tensorclass(row):
        if isinstance(row, LazyStackedTensorDict) and not row.tensordicts:
            return
        row = tensordict_of(row) if is_tensorclass(row) else row.tensordicts[0]
    for key, value in row.items():
        if key.startswith("_"):
            yield (*path, key)
        elif is_tensor_collection(value) and not is_non_tensor(value):
            yield from _private_keys(value, (*path, key))


class Background:
    """A thread that takes one batch after the other, each of which goes into the buffer.

    Args:
        owner: the name of the collector, for the log.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._stopping = False

    def start(self, batches: Callable[[], Iterator[Any]], buffer: Any) -> None:
        """Take what ``batches()`` yields, until the end or :meth:`stop`; one thread at a time.

        Raises:
            RuntimeError: there is no replay buffer that gets the batches.
        """
        if buffer is None:
            raise RuntimeError(
                "replay_buffer: expected one for start(), got None; pass it when the collector is "
                "made, or iterate"
            )
        if not self.is_running():
            self._error = None
            self._thread = threading.Thread(
                target=self._take, args=(batches,), daemon=True, name="fusedrl-fill"
            )
            self._thread.start()

    def _take(self, batches: Callable[[], Iterator[Any]]) -> None:
        try:
            for _ in batches():
                if self._stopping:
                    return
        except BaseException as error:
            if not self._stopping:  # otherwise it is that of a collector that ends
                logger.exception("%s: collecting in the background failed", self._owner)
                self._error = error

    def is_running(self) -> bool:
        """Whether the thread is taking batches."""
        return self._thread is not None and self._thread.is_alive()

    def is_current(self) -> bool:
        """Whether this is called in the thread."""
        return self._thread is threading.current_thread()

    def check(self) -> None:
        """Raise the error that ended the thread, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def refuse_others(self) -> None:
        """Raise ``RuntimeError`` if the thread runs and another one calls this."""
        if self.is_running() and not self.is_current():
            raise RuntimeError(
                "collector: expected to be iterated or start()ed, got both; read the replay buffer"
            )

    def stop(self) -> None:
        """Take no further batch."""
        self._stopping = True

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the thread, unless this is called in it."""
        if self._thread is not None and not self.is_current():
            self._thread.join(timeout)
