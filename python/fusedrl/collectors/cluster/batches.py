"""Batches out of actors: one share of each, or whichever is ready first."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tensordict import TensorDictBase, lazy_stack
from torchrl.collectors.utils import _maybe_normalize_replay_buffer_tensordict_device

from fusedrl.collectors.cluster.actor import Collected
from fusedrl.collectors.cluster.updates import RayUpdates
from fusedrl.collectors.policy_version import PolicyVersion
from fusedrl.collectors.progress import progress_bar
from fusedrl.collectors.staleness import is_too_old
from fusedrl.parcel import unpack

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
    _under_way: dict[Any, int]  # reference to a batch that is collected -> its actor
    _over: set[int]  # actors that have run their turns
    _thread: threading.Thread | None
    _error: BaseException | None
    _iterator: Iterator[Any] | None  # of next()

    def _begin(self, track_policy_version: Any) -> None:
        given = not isinstance(track_policy_version, bool)
        self._versions = track_policy_version if given else PolicyVersion()
        self.policy_version_tracker = None if track_policy_version is False else self._versions
        self._weight_updater, self._stored, self._counted = None, None, False
        self._lock, self._updating = threading.RLock(), threading.RLock()
        self._turns, self._stale, self._dropped, self._iter = {}, {}, 0, -1
        self._under_way, self._over = {}, set()
        self._thread = self._error = self._iterator = None

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
        with progress_bar(self) as advance:
            while True:
                self._refuse_beside_another()
                try:
                    batches = self._advance(self.sync_iter, advance)
                except Exception:
                    self.shutdown(raise_on_error=False)
                    raise
                if batches is None:
                    return
                yield batches[0]

    def next(self) -> TensorDictBase | None:
        """The next batch; ``None`` at the end, and where a replay buffer gets it.

        An exception of an actor shuts the collector down.
        """
        self._refuse_beside_another()
        if self._iterator is None:
            self._iterator = self.iterator()
        for batch in self._iterator:
            return batch
        self._iterator = None  # goes on if another state is loaded

    def _refuse_beside_another(self) -> None:
        self._refuse_closed()
        if self.is_running():
            raise RuntimeError(
                "collector: expected to be iterated or start()ed, got both; read the replay buffer"
            )

    def _advance(self, sync: bool, advance: Callable[..., None]) -> tuple[Any] | None:
        """The next batch, ``None`` in its place where a buffer has it; nothing at the end."""
        while collected := self._all() if sync else self._first():
            self._iter += 1
            tokens = [one.tokens for one in collected if one.tokens is not None]
            oldest = [one.oldest for one in collected if one.oldest is not None]
            advance(tokens=sum(tokens) if tokens else None, oldest=min(oldest, default=None))
            if self.replay_buffer is not None and not self._extends:
                return (None,)
            batch = _joined([unpack(one.batch) for one in collected if one.batch is not None])
            if self._is_stale(batch, oldest):
                continue
            if not self._extends:
                return (batch,)
            buffer: Any = self.replay_buffer
            buffer.extend(_maybe_normalize_replay_buffer_tensordict_device(batch, buffer))
            return (None,)
        return None

    def _all(self) -> list[Collected]:
        """A batch of each actor that is not done."""
        self._ask()
        got = {}
        while self._under_way:
            index, collected = self._one()
            if not collected.over:
                got[index] = collected
        return [got[index] for index in sorted(got)]

    def _first(self) -> list[Collected]:
        """The first batch that is ready; its actor begins the next."""
        self._ask()
        while self._under_way:
            _, collected = self._one()
            if not collected.over:
                self._ask()
                return [collected]
        return []

    def _ask(self) -> None:
        """Let every actor collect that does not, and is not done."""
        for index in set(self._actors.indices) - self._over - set(self._under_way.values()):
            self._under_way[self._actors.send(index, "collect")] = index

    def _one(self) -> tuple[int, Collected]:
        import ray

        (reference,), _ = ray.wait(list(self._under_way))
        index = self._under_way.pop(reference)
        collected = self._actors.answer(reference, index)
        self._turns[index], self._stale[index] = collected.frames, collected.stale
        if collected.over:
            self._over.add(index)
        return index, collected

    def _is_stale(self, batch: TensorDictBase, oldest: list[int]) -> bool:
        """Whether too much was published since the batch began to wait here."""
        if self.max_staleness is None:
            return False
        late = self._versions.version - min(oldest)
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
                while not self.closed and self._advance(False, advance) is not None:
                    pass
        except Exception as error:
            if not self.closed:
                self._error = error
                logger.exception("RayLLMCollector: collecting in the background failed")

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
        if self.closed:
            return
        self.closed = True
        told = self._actors.close(close_env, SECONDS_TO_END if timeout is None else timeout)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._under_way.clear()
        self._iterator = None  # ends its progress bar
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
