"""A script that is interrupted again and again while it collects."""

from __future__ import annotations

import multiprocessing
import queue
import random
import signal
import threading
from typing import Any

from async_workers import Loading, ones

import fusedrl.collectors.process.async_collector
from fusedrl import AsyncCollector

SIGNALS = 150


class Storm:
    """Signals from a thread, the next one after the former was dealt with."""

    def __init__(self) -> None:
        self.armed = False  # whether one is raised: not where the test itself could not bear it
        self.over = False
        self.raised = 0
        self._seen: queue.SimpleQueue[None] = queue.SimpleQueue()
        signal.signal(signal.SIGINT, self._handle)
        threading.Thread(target=self._send, daemon=True).start()

    def _handle(self, *_: Any) -> None:
        self._seen.put(None)
        if self.armed:
            self.armed = False
            self.raised += 1
            raise KeyboardInterrupt

    def _send(self) -> None:
        chance, main = random.Random(0), threading.main_thread().ident
        assert main is not None
        while self.raised < SIGNALS:
            for _ in range(chance.randrange(20_000)):  # somewhere else each time
                pass
            signal.pthread_kill(main, signal.SIGINT)
            self._seen.get()
        self.over = True


def collect(prefetch: int) -> None:
    """Each batch comes once, in order, and each answer is that of its call."""
    options: dict[str, Any] = {"frames_per_batch": 4, "prefetch": prefetch}
    with AsyncCollector(Loading, ones, **options) as collector:
        storm, expected, asked = Storm(), 0, 0
        while not storm.over:
            try:
                storm.armed = True
                for batch in collector:
                    storm.armed = False
                    assert batch["observation"].flatten().tolist() == [
                        *range(expected, expected + 4)
                    ]
                    expected += 4
                    asked += 1
                    if storm.over:
                        break
                    storm.armed = True
                    assert collector.map_fn("env.load", [(asked,)]) == [asked]
            except KeyboardInterrupt:
                pass
        storm.armed = False
        assert next(iter(collector))["observation"][0].item() == expected == collector._frames - 4
        assert storm.raised == SIGNALS


def storm() -> None:
    """Collect on demand, and ahead."""
    context = multiprocessing.get_context("fork")
    fusedrl.collectors.process.async_collector.process_context = lambda *_: context
    for prefetch in (0, 2):
        collect(prefetch)
