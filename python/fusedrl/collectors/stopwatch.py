"""Measures where a collector spends its time."""

from __future__ import annotations

import time
from dataclasses import dataclass

PARTS = ("policy", "env", "stamping", "queueing")


@dataclass(frozen=True)
class Profile:
    """Seconds that a collector has spent on each kind of work; ``print`` shows shares and rates.

    ``policy`` includes taking new weights from a channel, and ``env`` waiting for environments of
    a pool. ``stamping`` is writing versions and trajectory ids. ``queueing`` is building batches,
    postprocessing, and writing to a buffer or a queue.
    """

    turns: int
    policy: float
    env: float
    stamping: float
    queueing: float

    def __str__(self) -> str:
        """The shares of each kind of work, and the rates."""
        parts = {name: getattr(self, name) for name in PARTS}
        total = sum(parts.values()) or 1.0
        shares = ", ".join(f"{k} {v:.3g} s ({v / total:.0%})" for k, v in parts.items())
        return f"{self.turns} turns, {self.turns / total:.3g} a second: {shares}"


class Stopwatch:
    """Measures laps: the end of each lap names the work that its time was spent on."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self.turns = 0
        self._last = time.perf_counter()

    def start(self) -> None:
        """Begin a lap; the time since the last one is not counted."""
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Count the time since the last lap as ``name``."""
        now = time.perf_counter()
        self.seconds[name] += now - self._last
        self._last = now

    def profile(self) -> Profile:
        """The laps so far."""
        return Profile(turns=self.turns, **self.seconds)
