"""Ids of the trajectories that dialogs belong to."""

from __future__ import annotations

import torch
from torch import Tensor
from torchrl.collectors.utils import _TrajectoryPool


class Trajectories:
    """The id of the trajectory that each element of an environment is in.

    Args:
        by_first: whether rows run along the first batch dimension only, as in a pool.

    Attributes:
        source: gives ids that no trajectory has had before.
    """

    def __init__(self, by_first: bool) -> None:
        self.source = _TrajectoryPool()
        self._by_first = by_first
        self._ids = torch.empty(0, dtype=torch.int64)

    @property
    def ids(self) -> Tensor:
        """The id of each element, in the environment's shape; a new tensor at each call."""
        return self._ids.clone()

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """The ids of each row of a turn."""
        return (self.ids if self._by_first else self.ids.flatten()).unbind(0)

    def begin(self, shape: torch.Size, device: torch.device | None) -> None:
        """Begin a new trajectory in each element."""
        ids = self.source.get_traj_and_increment(shape.numel(), device=device)
        self._ids = ids.reshape(shape)

    def renew(self, over: Tensor, rows: list[int] | None = None) -> None:
        """Begin a new trajectory where one is over.

        Args:
            over: bool, for each element, or for the elements of some rows.
            rows: the indices of these rows; all if ``None``.
        """
        count = int(over.sum())
        if not count:
            return
        fresh = self.source.get_traj_and_increment(count, device=self._ids.device)
        if rows is None:
            self._ids.masked_scatter_(over, fresh)
        else:
            self._ids[rows] = self._ids[rows].masked_scatter(over, fresh)
