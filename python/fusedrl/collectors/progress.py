"""Shows a collector's progress on a bar or in the log, and measures where its time goes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
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


class BatchFacts:
    """What a bar shows of a batch, and what says whether it is too old; each is read once.

    Args:
        collector: its ``policy_version`` is the newest one.
        batch: the turns; ``None`` if they are elsewhere.
        known: facts that need not be read.
    """

    def __init__(self, collector: Any, batch: TensorDictBase | None, **known: Any) -> None:
        self._collector, self._batch = collector, batch
        vars(self).update(known)

    @cached_property
    def tokens(self) -> int | None:
        """The number of tokens in the responses, if there are any."""
        return None if self._batch is None else response_tokens(self._batch)

    @cached_property
    def oldest(self) -> Any:
        """The oldest version that a turn has; ``None`` if versions are not counted."""
        if self._batch is None or not isinstance(self.newest, int):
            return None
        return min(versions_in(self._batch))

    @cached_property
    def newest(self) -> Any:
        """The newest version of the policy; ``None`` if versions are not tracked."""
        return self._collector.policy_version

    @property
    def staleness(self) -> int | None:
        """How many versions the oldest turn is behind the newest; ``None`` if it is not known."""
        newest, oldest = self.newest, self.oldest
        return newest - oldest if isinstance(newest, int) and oldest is not None else None

    def are_too_old(self, most: int | None, dropped: int, counter: str) -> bool:
        """Whether to drop the batch; the first time is logged.

        Args:
            most: how many versions it may be behind; ``None`` keeps everything.
            dropped: how many turns were dropped before.
            counter: the class and attribute that count dropped turns, for the log.
        """
        if most is None or self.staleness is None or self.staleness <= most:
            return False
        if not dropped:
            logger.warning(
                "a batch was dropped, its oldest turn is %d versions old and max_staleness is %d; "
                "%s counts (this is said once)",
                self.staleness,
                most,
                counter,
            )
        return True


@contextmanager
def progress_bar(collector: Any) -> Iterator[Callable[[BatchFacts], None]]:
    """Show or log a collector's progress; yields a function to call for each batch.

    Args:
        collector: a collector, whose ``progress`` asks for a bar, and whose ``verbose`` asks for a
            line in the log for each batch.
    """
    verbose = getattr(collector, "verbose", False)
    numbers_of = _meter(collector)

    def log(facts: BatchFacts) -> None:
        if verbose:
            numbers = numbers_of(facts)
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

        def advance(facts: BatchFacts) -> None:
            numbers = numbers_of(facts)
            bar.update(task, completed=numbers["turns"], rates=_rates(numbers))

        yield advance


def _meter(collector: Any) -> Callable[[BatchFacts], dict[str, Any]]:
    """A function that gives the numbers to show for a batch, with the rates since its last call."""
    last, turns = time.perf_counter(), frames_of(collector)

    def numbers_of(facts: BatchFacts) -> dict[str, Any]:
        nonlocal last, turns
        now, counted = time.perf_counter(), frames_of(collector)
        seconds, collected = max(now - last, 1e-9), counted - turns
        last, turns = now, counted
        numbers: dict[str, Any] = {"turns": turns, "turns_per_s": collected / seconds}
        if facts.tokens is not None:
            numbers |= {"tokens": facts.tokens, "tokens_per_s": facts.tokens / seconds}
        known = {"version": facts.newest, "staleness": facts.staleness}
        return numbers | {name: value for name, value in known.items() if value is not None}

    return numbers_of


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
