"""Which trajectory each dialog is in."""

from __future__ import annotations

import torch
from torch import Tensor
from torchrl.collectors.utils import _TrajectoryPool


class Trajectories:
    """Ids of the trajectories that the elements of an environment are in.

    Args:
        by_first: rows are those along the first batch dimension only, as in a pool.

    Attributes:
        source: gives ids that no trajectory has had.
        ids: of each element, in the shape of the environment.
        rows: the same, of each row of a turn.
    """

    def __init__(self, by_first: bool) -> None:
        self.source = _TrajectoryPool()
        self._by_first = by_first
        self._set(torch.empty(0, dtype=torch.int64))

    def _set(self, ids: Tensor) -> None:
        self.ids = ids
        self.rows = (ids if self._by_first else ids.flatten()).unbind(0)

    def begin(self, shape: torch.Size, device: torch.device | None) -> None:
        """A new trajectory in each element."""
        ids = self.source.get_traj_and_increment(shape.numel(), device=device)
        self._set(ids.reshape(shape))

    def renew(self, over: Tensor, rows: list[int] | None = None) -> None:
        """Another trajectory where one is over.

        Args:
            over: bool, of each element, or of those of some rows.
            rows: which rows these are.
        """
        count = int(over.sum())
        if not count:
            return
        fresh = self.source.get_traj_and_increment(count, device=self.ids.device)
        # A new tensor: turns refer to the former one.
        if rows is None:
            ids = self.ids.masked_scatter(over, fresh)
        else:
            ids = self.ids.clone()
            ids[rows] = ids[rows].masked_scatter(over, fresh)
        self._set(ids)

    def part(self) -> None:
        """Share no memory with turns of before."""
        self._set(self.ids.clone())
