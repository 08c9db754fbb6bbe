"""Shows a collector's progress on a bar or in the log, and gives the figures of a batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from tensordict import TensorDictBase

from fusedrl.collectors.policy_version import versions_in
from fusedrl.compat.torchrl import frames_of

logger = logging.getLogger("fusedrl")

RESPONSES = (("tokens", "response"), "tokens_response")
MASK = ("masks", "all_attention_mask")


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
        batch: the turns.
    """

    def __init__(self, collector: Any, batch: TensorDictBase) -> None:
        self._collector, self._batch = collector, batch

    @cached_property
    def tokens(self) -> int | None:
        """The number of tokens in the responses, if there are any."""
        return response_tokens(self._batch)

    @cached_property
    def oldest(self) -> Any:
        """The oldest version that a turn has; ``None`` if versions are not counted."""
        if not isinstance(self.newest, int):
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

    def __str__(self) -> str:
        """The figures that are known."""
        known = {"version": self.newest, "staleness": self.staleness, "tokens": self.tokens}
        return ", ".join(f"{name} {value}" for name, value in known.items() if value is not None)

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
    if not collector.progress:
        yield partial(_log, collector) if getattr(collector, "verbose", False) else _ignore
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    facts_column = TextColumn("turns, {task.fields[facts]}")
    with Progress(BarColumn(), MofNCompleteColumn(), facts_column, TimeElapsedColumn()) as bar:
        total = None if collector.total_frames == float("inf") else collector.total_frames
        task = bar.add_task("turns", total=total, facts="")
        yield lambda facts: bar.update(task, completed=frames_of(collector), facts=str(facts))


def _log(collector: Any, facts: BatchFacts) -> None:
    logger.info("%s: turns %s, %s", type(collector).__name__, frames_of(collector), facts)


def _ignore(facts: BatchFacts) -> None:
    """Show nothing."""


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
