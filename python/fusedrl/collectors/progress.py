"""Shows a collector's progress on a bar or in the log, and gives the figures of a batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase

from fusedrl.collectors.policy_version import versions_in
from fusedrl.compat.torchrl import frames_of

logger = logging.getLogger("fusedrl")

RESPONSES = (("tokens", "response"), "tokens_response")
MASK = ("masks", "all_attention_mask")


@contextmanager
def progress_bar(collector: Any) -> Iterator[Callable[[TensorDictBase], None]]:
    """Show or log a collector's progress; yields a function to call for each batch.

    Args:
        collector: a collector, whose ``progress`` asks for a bar, and whose ``verbose`` asks for a
            line in the log for each batch.
    """
    if not collector.progress:
        yield partial(_log if collector.verbose else _ignore, collector)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    facts_column = TextColumn("turns, {task.fields[facts]}")
    with Progress(BarColumn(), MofNCompleteColumn(), facts_column, TimeElapsedColumn()) as bar:
        total = None if collector.total_frames == float("inf") else collector.total_frames
        task = bar.add_task("turns", total=total, facts="")
        yield lambda batch: bar.update(
            task, completed=frames_of(collector), facts=_facts(collector, batch)
        )


def _log(collector: Any, batch: TensorDictBase) -> None:
    name, turns = collector.__class__.__name__, frames_of(collector)
    logger.info("%s: turns %s, %s", name, turns, _facts(collector, batch))


def _ignore(collector: Any, batch: TensorDictBase) -> None:
    """Show nothing."""


def _facts(collector: Any, batch: TensorDictBase) -> str:
    """The figures of a batch as a line shows them."""
    figures = turn_metrics(batch, collector.policy_version, prefix="")
    del figures["count"]  # all turns are counted beside them
    return ", ".join(f"{name} {round(value, 3):.9g}" for name, value in figures.items())


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
    if not batch.batch_size.numel():
        return {f"{prefix}count": 0.0}
    flat: Any = batch.reshape(-1)
    figures: dict[str, float] = {"count": flat.shape[0]}
    tokens = response_tokens(flat)
    if tokens is not None:
        figures["tokens"] = tokens
    rewards = flat.get("next", flat).get("reward", as_list=True)
    if rewards is not None:
        figures["reward"] = (
            torch.cat([reward.flatten() for reward in rewards]).float().mean().item()
        )
    if newest is not None:
        oldest = min(versions_in(flat))
        figures |= {"version": oldest, "staleness": newest - oldest}
    return {f"{prefix}{name}": float(value) for name, value in figures.items()}
