"""What a worker process is started with; weights that a channel brings are left out."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from fusedrl.channel import WeightHandle


@dataclass
class WorkerJob:
    """What a worker needs to make its collector.

    Args:
        collector_class: the class, which is called with ``env``, ``policy`` and ``options``.
        env: an environment, or a function that makes one.
        policy: the policy; its weights may lie on the meta device.
        policy_factory: a function that makes the policy instead.
        options: further arguments of ``collector_class``.
        schemes: the schemes that bring weights, by the name of the model.
        channel: the channel that brings the policy's weights, instead of a scheme.
        channel_mode: ``"alias"`` or ``"copy"``.
        init_fn: a function that is called first.
        hooks: attributes to set on the collector.
        threads: number of torch's threads.
        dated: whether the trainer wants to know the oldest version in each batch.
    """

    collector_class: Callable[..., Any]
    env: Any
    policy: Any = None
    policy_factory: Callable[[], Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    schemes: dict[str, Any] = field(default_factory=dict)
    channel: WeightHandle | None = None
    channel_mode: str = "alias"
    init_fn: Callable[[], None] | None = None
    hooks: dict[str, Any] = field(default_factory=dict)
    threads: int = 1
    dated: bool = False


class PackedJob:
    """A pickled job, which the worker unpacks where it can report errors.

    Args:
        job: the job, which may have functions that only cloudpickle can pickle.
        brought: tensors that a channel brings, and that arrive on the meta device.
    """

    def __init__(self, job: WorkerJob, brought: Iterable[Tensor] = ()) -> None:
        self._job: WorkerJob | None = job
        self._brought = {id(tensor): tensor for tensor in brought}
        self._data = b""

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the job, while the process is started and locks and pipes can be pickled too."""
        file = io.BytesIO()
        _Pickler(file, self._brought).dump(self._job)
        return {"_job": None, "_brought": {}, "_data": file.getvalue()}

    def unpack(self) -> WorkerJob:
        """The job; in a forked process it is the trainer's own object."""
        return pickle.loads(self._data) if self._job is None else self._job


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO, brought: dict[int, Tensor]) -> None:
        super().__init__(file)
        self._brought = brought

    def reducer_override(self, obj: Any) -> Any:
        if id(obj) in self._brought:
            return _empty, (obj.shape, obj.dtype, isinstance(obj, nn.Parameter))
        return super().reducer_override(obj)  # pyright: ignore[reportAttributeAccessIssue]


def _empty(shape: torch.Size, dtype: torch.dtype, is_parameter: bool) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype, device="meta")
    return nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor
