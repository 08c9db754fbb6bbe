"""What a worker process is started with, without the weights that a channel brings it."""

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
    """What a worker makes its collector of.

    Args:
        collector_class: is called with ``env``, ``policy`` and ``options``.
        env: an environment, or what makes one.
        policy: the policy; its weights may lie on the meta device.
        policy_factory: makes the policy, in its place.
        options: further arguments of ``collector_class``.
        schemes: what brings weights, by the name of the model.
        channel: what brings those of the policy, in the place of schemes.
        channel_mode: ``"alias"`` or ``"copy"``.
        init_fn: is called first.
        hooks: attributes of the collector.
        threads: of torch.
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
    """A job on its way to a worker, which unpacks it where errors can be reported.

    Args:
        job: may have functions that only cloudpickle takes.
        brought: tensors that arrive as empty ones on the meta device.
    """

    def __init__(self, job: WorkerJob, brought: Iterable[Tensor] = ()) -> None:
        self._job: WorkerJob | None = job
        self._brought = {id(tensor): tensor for tensor in brought}
        self._data = b""

    def __getstate__(self) -> dict[str, Any]:
        """Pickled while the process is started, when locks and pipes can be, too."""
        file = io.BytesIO()
        _Pickler(file, self._brought).dump(self._job)
        return {"_job": None, "_brought": {}, "_data": file.getvalue()}

    def unpack(self) -> WorkerJob:
        """The job: in a forked process the trainer's own."""
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
