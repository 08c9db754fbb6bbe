"""The metrics of a loss as a dictionary for loggers."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase, is_tensorclass
from torch import Tensor


def loss_metrics(result: Any, prefix: str = "loss/") -> dict[str, float]:
    """Every scalar of a loss as one flat dictionary, for a logger.

    Pass it to ``logger.log_metrics(metrics, step=step)`` of torchrl, or to ``trainer.log(metrics)``
    of TRL. On a GPU the call synchronises once.

    Args:
        result: a :class:`fusedrl.PolicyLoss`, or the result of :class:`fusedrl.GRPOLoss` or another
            torchrl loss.
        prefix: prefix of every name.

    Returns:
        The values of the tensors with one element, such as ``loss/objective`` and
        ``loss/ratio/mean``. Values per token and ``None`` are left out.

    Raises:
        TypeError: ``result`` is not the result of a loss.

    Example:
        >>> import torch
        >>> from fusedrl import linear_policy_loss, loss_metrics
        >>> hidden, weight, tokens = torch.ones(2, 4), torch.zeros(10, 4), torch.tensor([1, 7])
        >>> metrics = loss_metrics(linear_policy_loss(hidden, weight, tokens, torch.ones(1)))
        >>> metrics["loss/objective"], metrics["loss/ratio/mean"]
        (-1.0, 1.0)
    """
    scalars = _scalars(result, prefix)
    if not scalars:
        return {}
    values = torch.stack([x.detach().reshape(()).to(torch.float64) for x in scalars.values()])
    return dict(zip(scalars, values.tolist(), strict=True))


def _scalars(result: Any, prefix: str) -> dict[str, Tensor]:
    if is_tensorclass(result):
        result = result.to_tensordict(retain_none=False)
    if isinstance(result, TensorDictBase):
        named = dict(result.items())
    elif hasattr(result, "_asdict"):
        named = result._asdict()
    else:
        raise TypeError(
            f"result: expected the result of a loss, got {type(result).__name__}; pass the "
            "result of linear_policy_loss or GRPOLoss"
        )
    found: dict[str, Tensor] = {}
    for name, value in named.items():
        if isinstance(value, Tensor):
            if value.numel() == 1:
                found[f"{prefix}{name.removeprefix('loss_')}"] = value
        elif value is not None:
            found |= _scalars(value, f"{prefix}{name}/")
    return found
