"""Steps that all workers of one engine take, or none of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fusedrl.compat.vllm import workers_of_this_engine

Value = TypeVar("Value")


class Ranks:
    """The workers that hold the parts of one model.

    vLLM calls every worker, and stops reading answers at the first one that failed. It would take
    the answers that are left for answers to its next call. So only the last rank raises.

    Args:
        size: number of workers.
        rank: index of this worker.
        group: a process group that exchanges objects on the CPU; unused with one worker.
    """

    def __init__(self, size: int, rank: int, group: Any) -> None:
        self.size = size
        self.rank = rank
        self._group = group

    @classmethod
    def of_this_process(cls) -> Ranks:
        """The workers of the engine that this process belongs to."""
        return cls(*workers_of_this_engine())

    def gathered(self, value: Value) -> list[Value]:
        """The values of all workers, which have to call this together.

        Raises:
            RuntimeError: one of them has ended.
        """
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        try:
            torch.distributed.all_gather_object(values, value, group=self._group)
        except RuntimeError as error:
            raise RuntimeError(
                "engine: expected all its workers to run, got one that has ended; start a new "
                "engine: its log says why the worker ended"
            ) from error
        return values

    def all_or_none(self, attempt: Callable[[], Value]) -> Value | None:
        """Do something on every rank, and learn whether it failed on one of them.

        Args:
            attempt: what to do; the caller releases it where this returns ``None`` or raises.

        Returns:
            What ``attempt`` returned; ``None`` if it failed on any rank.

        Raises:
            Exception: the error of ``attempt``, if there is only one rank.
            RuntimeError: raised on the last of several ranks, with the messages of all that failed.
        """
        if self.size == 1:
            return attempt()
        value, failure = None, None
        try:
            value = attempt()
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        failures = self.gathered(failure)
        if not any(failures):
            return value
        if self.rank == self.size - 1:
            raise RuntimeError(
                "; ".join(f"worker {rank}: {text}" for rank, text in enumerate(failures) if text)
            )
        return None
