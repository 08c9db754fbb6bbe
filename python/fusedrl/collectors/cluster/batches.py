"""Batches out of actors: one share of each, or whichever is ready first."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

from tensordict import TensorDictBase, lazy_stack
from torchrl.collectors.utils import _maybe_normalize_replay_buffer_tensordict_device

from fusedrl.collectors.cluster.actor import Collected
from fusedrl.collectors.cluster.updates import RayUpdates
from fusedrl.collectors.interrupts import uninterrupted
from fusedrl.collectors.progress import OpenBar, progress_bar
from fusedrl.collectors.staleness import is_too_old
from fusedrl.transport import unpack

logger = logging.getLogger("fusedrl")

SECONDS_TO_END = 10.0


class RayBatches(RayUpdates):
    """How :class:`fusedrl.RayLLMCollector` gets its batches."""

    sync_iter: bool
    max_staleness: int | None
    replay_buffer: Any
    total_frames: Any
    _extends: bool  # whether the replay buffer is extended here
    _turns: dict[int, int]  # that each actor ran
    _stale: dict[int, int]  # that each actor dropped
    _dropped: int  # turns dropped here
    _under_way: dict[Any, int]  # reference to a batch that nobody has counted -> its actor
    _over: set[int]  # actors that have run their turns
    _ready: tuple[Any] | None  # a batch that was counted, and is not handed out
    _thread: threading.Thread | None
    _error: BaseException | None
    _progress: OpenBar | None  # of next()

    def _begin(self) -> None:
        """Nothing was collected by this process."""
        self._weight_updater, self._counted = None, False
        self._turns, self._stale, self._dropped, self._iter = {}, {}, 0, -1
        self._under_way, self._over, self._ready = {}, set(), None
        self._thread = self._error = self._progress = None

    @property
    def _frames(self) -> int:
        return sum(self._turns.values())

    @property
    def stale_turns(self) -> int:
        """Turns that ``max_staleness`` dropped."""
        return sum(self._stale.values()) + self._dropped

    @property
    def init_random_frames(self) -> int:
        """0: dialogs begin with the policy."""
        return 0

    def __iter__(self) -> Iterator[Any]:
        """Batches until all actors have run their turns; ``None`` each where a buffer gets them.

        An exception of an actor shuts the collector down.
        """
        return self.iterator()

    def iterator(self) -> Iterator[Any]:
        """As ``iter``."""
        self._over.clear()  # another process may have loaded a state
        with progress_bar(self) as advance:
            while (ready := self._prepare(advance)) is not None:
                # Python handles signals at calls and jumps: not between these two lines.
                self._ready = None
                yield ready[0]

    def next(self) -> TensorDictBase | None:
        """The next batch; ``None`` at the end, and where a replay buffer gets it.

        An exception of an actor shuts the collector down.
        """
        if self._progress is None:
            self._over.clear()
            # Not the collector itself, which would be a reference to itself, and stay.
            self._progress = OpenBar(progress_bar(weakref.proxy(self)))
        ready = self._prepare(self._progress.advance)
        if ready is None:
            self._end_progress()  # goes on if another state is loaded
            return None
        self._ready = None
        return ready[0]

    def _prepare(self, advance: Callable[..., None]) -> tuple[Any] | None:
        """The next batch, which is ready until it is handed out; nothing at the end."""
        self._refuse_beside_another()
        try:
            self._advance(self.sync_iter, advance)
        except Exception:
            self.shutdown(raise_on_error=False)
            raise
        return self._ready

    def _end_progress(self) -> None:
        if self._progress is not None:
            self._progress.close()
        self._progress = None

    def _refuse_beside_another(self) -> None:
        self._refuse_closed()
        if self.is_running():
            raise RuntimeError(
                "collector: expected to be iterated or start()ed, got both; read the replay buffer"
            )
        self._refuse_copied_buffer()

    def _advance(self, sync: bool, advance: Callable[..., None]) -> None:
        """Make the next batch ready, ``None`` in its place where a buffer has it.

        None is ready at the end. Ctrl-C changes nothing as long as a batch is waited for and
        unpacked; then it is counted and stored as a whole.
        """
        while self._ready is None:
            answers = self._answers(sync)
            if not answers:
                return
            in_order = sorted(answers.values(), key=itemgetter(0))
            collected = [one for _, one in in_order if not one.over]
            batches = [unpack(one.batch) for one in collected if one.batch is not None]
            batch = _joined(batches) if batches else None
            with uninterrupted():
                self._count(answers)
                if collected:
                    self._iter += 1
                    self._hand_over(batch, collected, advance)
                if not sync:
                    self._ask()  # the actor begins its next

    def _count(self, answers: dict[Any, tuple[int, Collected]]) -> None:
        for reference, (index, one) in answers.items():
            del self._under_way[reference]
            self._turns[index], self._stale[index] = one.frames, one.stale
            if one.over:
                self._over.add(index)

    def _hand_over(
        self, batch: TensorDictBase | None, collected: list[Collected], advance: Callable[..., None]
    ) -> None:
        """Make a batch ready for the iterator, or store it, unless it is too old."""
        tokens = [one.tokens for one in collected if one.tokens is not None]
        oldest = [one.oldest for one in collected if one.oldest is not None]
        advance(tokens=sum(tokens) if tokens else None, oldest=min(oldest, default=None))
        if batch is None:
            self._ready = (None,)  # its actor has stored it
        elif self._is_stale(batch, oldest):
            return
        elif self._extends:
            buffer: Any = self.replay_buffer
            buffer.extend(_maybe_normalize_replay_buffer_tensordict_device(batch, buffer))
            self._ready = (None,)
        else:
            self._ready = (batch,)

    def _answers(self, sync: bool) -> dict[Any, tuple[int, Collected]]:
        """What each actor collected, or only those that are done and the first that is not.

        By the reference of each, with the index of its actor; nothing at the end.
        """
        import ray

        self._ask()
        got: dict[Any, tuple[int, Collected]] = {}
        waiting = list(self._under_way)
        while waiting:
            (reference,), waiting = ray.wait(waiting)
            index = self._under_way[reference]
            got[reference] = (index, self._actors.answer(reference, index))
            if not sync and not got[reference][1].over:
                break
        return got

    def _ask(self) -> None:
        """Let every actor collect that does not, and is not done."""
        with uninterrupted():
            for index in set(self._actors.indices) - self._over - set(self._under_way.values()):
                self._under_way[self._actors.send(index, "collect")] = index

    def _is_stale(self, batch: TensorDictBase, oldest: list[int]) -> bool:
        """Whether too much was published since the batch began to wait here."""
        if self.max_staleness is None:
            return False
        late = self._newest() - min(oldest)
        if is_too_old(late, self.max_staleness, self._dropped, "RayLLMCollector.stale_turns"):
            self._dropped += batch.numel()
            return True
        return False

    def start(self) -> None:
        """Collect into the replay buffer in the background, in all actors at once.

        Raises:
            RuntimeError: no replay buffer.
        """
        self._refuse_closed()
        self._refuse_copied_buffer()
        if self.replay_buffer is None:
            raise RuntimeError(
                "replay_buffer: expected one to collect into in the background, got None; pass it "
                "when the collector is made"
            )
        if not self.is_running():
            self._error = None
            self._thread = threading.Thread(target=self._run, name="RayLLMCollector", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            with progress_bar(self) as advance:
                while not self.closed:
                    self._advance(False, advance)
                    if self._ready is None:
                        return
                    self._ready = None
        except Exception as error:
            if not self.closed:
                self._error = error
                logger.exception("RayLLMCollector: collecting in the background failed")

    def _refuse_copied_buffer(self) -> None:
        """In another process than the one that extends its replay buffer."""
        if self._extends and self.replay_buffer is None:
            raise RuntimeError(
                "replay_buffer: expected a RayReplayBuffer in a collector that collects in another "
                "process than that which made it, got one of that process; collect there, or "
                "make the collector with a RayReplayBuffer"
            )

    def is_running(self) -> bool:
        """Whether it collects in the background."""
        return self._thread is not None and self._thread.is_alive()

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """End the actors; a turn that runs may end first. May be called again.

        Args:
            timeout: seconds that they may take, 10 if ``None``; then they are killed.
            close_env: whether environments are closed.
            raise_on_error: whether to raise what failed in the background or in closing.

        Raises:
            RuntimeError: what actors could not close, by their names.
        """
        if self.closed and not self._actors.handles:  # they are there if Ctrl-C came meanwhile
            return
        self.closed = True
        told = self._actors.close(close_env, SECONDS_TO_END if timeout is None else timeout)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._under_way.clear()
        self._ready = None
        self._end_progress()
        if raise_on_error and self._error is not None:
            raise self._error
        if told:
            text = f"collectors: expected actors that close, got {'; '.join(told)}"
            if raise_on_error:
                raise RuntimeError(f"{text}; they are ended all the same")
            logger.warning("%s", text)

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """As :meth:`shutdown`."""
        self.shutdown(timeout, close_env)

    def __enter__(self) -> Any:
        """The collector."""
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Shut it down; an exception of the block is not hidden."""
        self.shutdown(raise_on_error=kind is None)


def _joined(batches: list[TensorDictBase]) -> TensorDictBase:
    """Dialogs of several actors under each other: columns are ragged, nothing is copied."""
    if len(batches) == 1:
        return batches[0]
    return lazy_stack([row for batch in batches for row in batch.unbind(0)])
