"""The end of a channel where a collector computes with the weights."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor, nn
from torchrl.envs import Transform
from torchrl.weight_update.utils import _resolve_attr

from fusedrl.channel import WeightHandle
from fusedrl.channel.following import Follower, Following
from fusedrl.channel.sources import module_places
from fusedrl.vllm.engine_follower import EngineFollower
from fusedrl.vllm.policy import wrappers_in
from fusedrl.weights.follow import Attachment, is_compiled, module_of
from fusedrl.weights.policy_copies import materialise


class WorkerEnd:
    """A reader of a channel, and the model in this process that follows it.

    Args:
        handle: of the channel.
        model_id: the attribute path of the model in its collector.
        mode: ``"alias"``, ``"copy"``, or ``None``: alias where dtypes and devices fit and the
            collector compiles nothing, else copy.
        buffers: values of the model's buffers that no version has.
    """

    def __init__(
        self,
        handle: WeightHandle,
        model_id: str,
        mode: Literal["alias", "copy"] | None,
        buffers: Mapping[str, Tensor],
    ) -> None:
        self.reader = handle.open()
        self._handle = handle
        self._model_id = model_id
        self._mode: Literal["alias", "copy"] | None = mode
        self._buffers = buffers
        self._follower: Following | None = None
        self._attachment: Attachment | None = None

    def follow(self, model: Any, collector: Any = None) -> Following:
        """Load the newest version into a model, and keep it until the model is called.

        Args:
            model: a module, or what has one as its ``module``; its weights may lie on meta, or in
                a vLLM engine.
            collector: where it is called, if that is known.

        Raises:
            TypeError: no module.
            ValueError: weights that do not fit the channel's.
        """
        module = module_of(model)
        if isinstance(module, Transform):
            raise ValueError(
                f"weight_sync_schemes: expected a module that is called, got the transform "
                f"{self._model_id!r}; name the module in it, such as '{self._model_id}.model'"
            )
        has_engine = bool(wrappers_in(module))
        if not has_engine:
            materialise(module, self.reader.layout, self._buffers, self.reader.device)
        mode = self._mode or self._mode_for(module, collector)
        before = self._follower
        if before is not None:
            same = not isinstance(before, Follower) or before.mode == mode
            if before.module is module and same:
                return before
            before.close(detach=before.module is module)
        self._follower = (
            EngineFollower(self._handle, self.reader, module)
            if has_engine
            else Follower(self.reader, module, mode)
        )
        self._follower.load()
        return self._follower

    def attach(self, collector: Any) -> Any:
        """Switch versions at the calls of the collector's model, which is returned.

        Raises:
            TypeError, ValueError: as for :meth:`follow`.
        """
        model = find_model(collector, self._model_id)
        follower = self.follow(model, collector)
        if self._attachment is None:
            self._attachment = Attachment(collector, follower, is_policy(self._model_id))
        with follower:
            pass  # nothing is held until there is a call
        return model

    def receive(self, timeout: float | None) -> nn.Module | None:
        """Load the newest version, where no collector's calls do; the model, if it is new."""
        follower = self._follower
        if follower is None or self._attachment is not None:
            return None
        before = follower.version
        if timeout is not None and before is not None:
            with contextlib.suppress(TimeoutError):
                self.reader.wait_for(before + 1, timeout)
        return None if follower.load() == before else follower.module

    def close(self, detach: bool) -> None:
        """Follow no more, and close the reader; ``detach`` as for :meth:`Follower.close`."""
        if self._attachment is not None:
            self._attachment.remove(keeps=detach)
        if self._follower is not None:
            self._follower.close(detach)
        self.reader.close()

    def _mode_for(self, module: nn.Module, collector: Any) -> Literal["alias", "copy"]:
        dtypes = {entry.name: entry.dtype for entry in self.reader.layout.entries}
        fits = all(
            place.tensor.device == self.reader.device and place.tensor.dtype == dtypes[place.name]
            for place in module_places(module)
            if place.kind == "parameter" and place.name in dtypes
        )
        return "alias" if fits and not is_compiled(collector) else "copy"


def is_policy(model_id: str) -> bool:
    """Whether a model is a collector's policy, or in it."""
    return model_id.split(".")[0] == "policy"


def find_model(collector: Any, model_id: str) -> Any:
    """A model of a collector by its attribute path.

    Raises:
        ValueError: the collector has no such model in this process.
    """
    get = getattr(collector, "get_model", None)
    try:
        return _resolve_attr(collector, model_id) if get is None else get(model_id)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"weight_sync_schemes: expected {model_id!r} to name a model of the collector in this "
            f"process, got {error}; for a model that only workers have, call "
            "scheme.init_on_sender(model_id=..., model=...) before the collector is made"
        ) from error
