"""What the workers of one engine do alike, or not at all."""

# vLLM has an environment of its own, which the linters do not see.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Value = TypeVar("Value")


class Ranks:
    """The workers that hold the parts of one model.

    vLLM calls each worker, and reads their answers up to the first that failed: what the others
    answered would be taken for the answers to its next call. So only the last rank raises.

    Args:
        size: of them.
        rank: of this one.
        group: that exchanges objects on the CPU, if there are several.
    """

    def __init__(self, size: int, rank: int, group: Any) -> None:
        self.size = size
        self.rank = rank
        self._group = group

    @classmethod
    def of_this_process(cls) -> Ranks:
        """Those of the engine that this process is a worker of."""
        from vllm.distributed.parallel_state import get_world_group

        world = get_world_group()
        return cls(world.world_size, world.rank_in_group, world.cpu_group)

    def gathered(self, value: Value) -> list[Value]:
        """The values of all, which have to call this together."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(values, value, group=self._group)
        return values

    def all_or_none(self, attempt: Callable[[], Value], undo: Callable[[], Any]) -> Value | None:
        """Do something on every rank, and undo it everywhere if one of them fails.

        Args:
            attempt: fails without leaving anything behind.
            undo: called where ``attempt`` succeeded and another rank's failed.

        Returns:
            What ``attempt`` returned; ``None`` where it was undone, on all ranks but the last.

        Raises:
            Exception: as ``attempt`` did, if there is one rank.
            RuntimeError: on the last of several, with the messages of all that failed.
        """
        value, failure = None, None
        try:
            value = attempt()
        except Exception as error:
            if self.size == 1:
                raise
            failure = f"{type(error).__name__}: {error}"
        failures = self.gathered(failure)
        if not any(failures):
            return value
        if failure is None:
            undo()
        if self.rank == self.size - 1:
            raise RuntimeError(
                "; ".join(f"worker {rank}: {text}" for rank, text in enumerate(failures) if text)
            )
        return None
