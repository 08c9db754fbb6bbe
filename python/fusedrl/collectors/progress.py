"""Shows a collector's progress on a bar or in the log, and measures where its time goes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase

from fusedrl.collectors.policy_version import versions_in
from fusedrl.compat.torchrl import frames_of

logger = logging.getLogger("fusedrl")

RESPONSES = (("tokens", "response"), "tokens_response")
MASK = ("masks", "all_attention_mask")
PARTS = ("policy", "env", "stamping", "queueing")


def check_progress(progress: bool) -> None:
    """Raise ``ImportError`` if a bar is asked for and rich is missing."""
    if progress:
        try:
            import rich.progress  # noqa: F401
        except ImportError as error:
            raise ImportError(
                "progress: expected rich to be installed; pip install rich, or leave progress out"
            ) from error


@contextmanager
def progress_bar(collector: Any) -> Iterator[Callable[..., None]]:
    """Show or log a collector's progress; yields a function to call for each batch.

    Args:
        collector: a collector, whose ``progress`` asks for a bar, and whose ``verbose`` asks for a
            line in the log for each batch.
    """
    verbose = getattr(collector, "verbose", False)
    meter = Meter(collector)

    def log(batch: TensorDictBase | None = None, **known: Any) -> None:
        if verbose:
            numbers = meter.read(batch, **known)
            line = " ".join(f"{key}={_short(value)}" for key, value in numbers.items())
            logger.info("%s: %s", collector.__class__.__name__, line, extra=numbers)

    if not collector.progress:
        yield log
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    endless = collector.total_frames == float("inf")
    columns = (
        TextColumn("turns"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rates]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns) as bar:
        task = bar.add_task("turns", total=None if endless else collector.total_frames, rates="")

        def advance(batch: TensorDictBase | None = None, **known: Any) -> None:
            numbers = meter.read(batch, **known)
            bar.update(task, completed=numbers["turns"], rates=_rates(numbers))

        yield advance


class Meter:
    """Computes the numbers to show for a collector, which counts its turns."""

    def __init__(self, collector: Any) -> None:
        self._collector = collector
        self._last = time.perf_counter()
        self._turns = frames_of(collector)

    def read(
        self,
        batch: TensorDictBase | None = None,
        tokens: int | None = None,
        oldest: Any = None,
    ) -> dict[str, Any]:
        """The numbers that are known: turns, rates since the last call, version, staleness.

        Args:
            batch: the batch that was collected since the last call. Tokens are counted in its
                responses, and staleness is how many versions its oldest turn is behind the newest.
            tokens: the number of tokens, if the batch is in another process.
            oldest: the version of the oldest turn, if the batch is in another process.
        """
        now, collector = time.perf_counter(), self._collector
        seconds, self._last = max(now - self._last, 1e-9), now
        before, self._turns = self._turns, frames_of(collector)
        rate = (self._turns - before) / seconds
        numbers: dict[str, Any] = {"turns": self._turns, "turns_per_s": rate}
        tokens = tokens if batch is None else response_tokens(batch)
        if tokens is not None:
            numbers |= {"tokens": tokens, "tokens_per_s": tokens / seconds}
        version = collector.policy_version
        if version is not None:
            numbers["version"] = version
        if batch is not None and isinstance(version, int):
            oldest = min(versions_in(batch))
        if isinstance(version, int) and oldest is not None:
            numbers["staleness"] = version - oldest
        return numbers


def response_tokens(batch: TensorDictBase) -> int | None:
    """The number of tokens in the responses of a batch; ``None`` if it has no responses.

    Padding is not counted if the policy reports its attention mask.
    """
    flat: Any = batch.reshape(-1)
    for key in RESPONSES:
        responses = flat.get(key, as_list=True)
        if responses is None:
            continue
        masks = flat.get(MASK, as_list=True)
        if masks is None or key != RESPONSES[0]:
            return sum(response.numel() for response in responses)
        pairs = zip(responses, masks, strict=True)
        return sum(int(mask[..., mask.shape[-1] - r.shape[-1] :].sum()) for r, mask in pairs)
    return None


def turn_metrics(
    batch: TensorDictBase, newest: int | None = None, prefix: str = "turns/"
) -> dict[str, float]:
    """The figures of a batch of turns as one flat dictionary, for a logger.

    It goes with those of :func:`fusedrl.loss_metrics` to torchrl's ``logger.log_metrics(metrics,
    step=step)`` or TRL's ``trainer.log(metrics)``.

    Args:
        batch: what a collector gives, of any shape.
        newest: the newest version, as ``collector.policy_version``.
        prefix: what every name begins with.

    Returns:
        ``count`` of the turns, ``tokens`` of their responses, the mean ``reward``, and with
        ``newest`` the oldest ``version`` and its ``staleness``; without those that the batch lacks.

    Raises:
        ValueError: ``newest`` is given, and the batch has no versions.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from fusedrl import turn_metrics
        >>> reward, version = torch.tensor([[1.0], [0.5]]), torch.tensor([3, 4])
        >>> batch = TensorDict({"next": {"reward": reward, "policy_version": version}}, [2])
        >>> turn_metrics(batch, newest=5)
        {'turns/count': 2.0, 'turns/reward': 0.75, 'turns/version': 3.0, 'turns/staleness': 2.0}
    """
    flat: Any = batch.reshape(-1)
    figures: dict[str, float] = {"count": flat.shape[0]}
    tokens = response_tokens(flat)
    if tokens is not None:
        figures["tokens"] = tokens
    rewards = flat.get("next", flat).get("reward", as_list=True)
    if rewards is not None:
        figures["reward"] = torch.cat([reward.flatten() for reward in rewards]).mean().item()
    if newest is not None:
        oldest = min(versions_in(flat))
        figures |= {"version": oldest, "staleness": newest - oldest}
    return {f"{prefix}{name}": float(value) for name, value in figures.items()}


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _rates(numbers: dict[str, Any]) -> str:
    shown = [f"{numbers['turns_per_s']:.3g} turns/s"]
    if "tokens_per_s" in numbers:
        shown.append(f"{numbers['tokens_per_s']:.3g} tokens/s")
    if "version" in numbers:
        shown.append(f"version {numbers['version']}")
    if "staleness" in numbers:
        shown.append(f"staleness {numbers['staleness']}")
    return ", ".join(shown)


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
