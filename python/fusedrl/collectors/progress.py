"""The figures of a batch, and a line of them in the log."""

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
    """Log how many turns a collector has run, and the figures of a batch."""
    figures = turn_metrics(batch, collector.policy_version, prefix="")
    del figures["count"]
    figures = {"turns": frames_of(collector)} | figures
    said = ", ".join(f"{name} {round(value, 3):.9g}" for name, value in figures.items())
    logging.getLogger("fusedrl").info("%s: %s", collector.__class__.__name__, said)


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
        ``count`` of the turns, ``tokens`` of their responses, the mean ``reward``, without those
        that the batch lacks, and with ``newest`` the oldest ``version`` and its ``staleness``, or a
        ``ValueError`` if it has no versions.

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
    responses, masks = flat.get(("tokens", "response"), as_list=True), flat.get(MASK, as_list=True)
    if responses is None:
        responses, masks = flat.get("tokens_response", as_list=True), None
    if responses is not None:
        tokens = (  # a mask counts no padding
            r.numel() if mask is None else int(mask[..., mask.shape[-1] - r.shape[-1] :].sum())
            for r, mask in zip(responses, masks or repeat(None), strict=False)
        )
        figures["tokens"] = sum(tokens)
    rewards = flat.get("next", flat).get("reward", as_list=True)
    if rewards is not None:
        figures["reward"] = torch.cat([*map(torch.flatten, rewards)]).float().mean().item()
    if newest is not None:
        oldest = min(versions_in(flat))
        figures |= {"version": oldest, "staleness": newest - oldest}
    return {f"{prefix}{name}": float(value) for name, value in figures.items()}
