"""Metrics of a batch of turns, and their log line."""

from __future__ import annotations

import logging
from itertools import repeat
from typing import Any

import torch
from tensordict import TensorDictBase

from fusedrl.collectors.policy_version import versions_in
from fusedrl.compat.torchrl import frames_of

MASK = ("masks", "all_attention_mask")


def log_batch(collector: Any, batch: TensorDictBase) -> None:
    """Log the number of turns that a collector has run, and the metrics of a batch."""
    metrics = turn_metrics(batch, collector.policy_version, prefix="")
    del metrics["count"]
    metrics = {"turns": frames_of(collector)} | metrics
    line = ", ".join(f"{name} {round(value, 3):.9g}" for name, value in metrics.items())
    logging.getLogger("fusedrl").info("%s: %s", collector.__class__.__name__, line)


def turn_metrics(
    batch: TensorDictBase, newest: int | None = None, prefix: str = "turns/"
) -> dict[str, float]:
    """Metrics of a batch of turns as a flat dictionary for a logger.

    Pass it, with the result of :func:`fusedrl.loss_metrics`, to torchrl's
    ``logger.log_metrics(metrics, step=step)`` or TRL's ``trainer.log(metrics)``.

    Args:
        batch: a batch of a collector, of any shape.
        newest: the newest version, such as ``collector.policy_version``.
        prefix: prefix of every name.

    Returns:
        ``count`` of turns, ``tokens`` of their responses and mean ``reward``, as far as the batch
        has them. With ``newest`` also the oldest ``version`` and its ``staleness``; a batch without
        versions is a ``ValueError``.

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
    metrics: dict[str, float] = {"count": flat.shape[0]}
    responses, masks = flat.get(("tokens", "response"), as_list=True), flat.get(MASK, as_list=True)
    if responses is None:
        responses, masks = flat.get("tokens_response", as_list=True), None
    if responses is not None:
        tokens = (  # without padding, if there is a mask
            r.numel() if mask is None else int(mask[..., mask.shape[-1] - r.shape[-1] :].sum())
            for r, mask in zip(responses, masks or repeat(None), strict=False)
        )
        metrics["tokens"] = sum(tokens)
    rewards = flat.get("next", flat).get("reward", as_list=True)
    if rewards is not None:
        metrics["reward"] = torch.cat([*map(torch.flatten, rewards)]).float().mean().item()
    if newest is not None:
        oldest = min(versions_in(flat))
        metrics |= {"version": oldest, "staleness": newest - oldest}
    return {f"{prefix}{name}": float(value) for name, value in metrics.items()}
