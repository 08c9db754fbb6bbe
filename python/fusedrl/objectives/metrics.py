"""The figures of a loss in the form that loggers take."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase, is_tensorclass
from torch import Tensor


def loss_metrics(result: Any, prefix: str = "loss/") -> dict[str, float]:
    """Every figure of a loss as one flat dictionary, for a logger.

    torchrl's loggers take it as ``logger.log_metrics(metrics, step=step)``, and TRL's trainers as
    ``trainer.log(metrics)``. On a GPU the call waits for the device, once.

    Args:
        result: a :class:`fusedrl.PolicyLoss`, or what :class:`fusedrl.GRPOLoss` and torchrl's own
            losses return.
        prefix: what every name begins with.

    Returns:
        The values of the tensors with one element, such as ``loss/objective`` and
        ``loss/ratio/mean``. What has a value for each token is left out, and so is ``None``.

    Raises:
        TypeError: ``result`` has no named figures.

    Example:
        >>> import torch
        >>> from fusedrl import linear_policy_loss, loss_metrics
        >>> hidden, weight, tokens = torch.ones(2, 4), torch.zeros(10, 4), torch.tensor([1, 7])
        >>> metrics = loss_metrics(linear_policy_loss(hidden, weight, tokens, torch.ones(1)))
        >>> metrics["loss/objective"], metrics["loss/ratio/mean"]
        (-1.0, 1.0)
    """
    figures = _figures(result, prefix)
    if not figures:
        return {}
    values = torch.stack([x.detach().reshape(()).to(torch.float64) for x in figures.values()])
    return dict(zip(figures, values.tolist(), strict=True))


def _figures(result: Any, prefix: str) -> dict[str, Tensor]:
    if is_tensorclass(result):
        result = result.to_tensordict(retain_none=False)
    if isinstance(result, TensorDictBase):
        named = dict(result.items())
    elif hasattr(result, "_asdict"):
        named = result._asdict()
    else:
        raise TypeError(
            f"result: expected the result of a loss, got {type(result).__name__}; pass what "
            "linear_policy_loss or GRPOLoss returned"
        )
    found: dict[str, Tensor] = {}
    for name, value in named.items():
        if isinstance(value, Tensor):
            if value.numel() == 1:
                found[f"{prefix}{name.removeprefix('loss_')}"] = value
        elif value is not None:
            found |= _figures(value, f"{prefix}{name}/")
    return found
