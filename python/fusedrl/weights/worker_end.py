"""The worker's end of a scheme's channel, where a collector computes with the weights."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor, nn
from torchrl.envs import Transform

from fusedrl.channel import WeightHandle
from fusedrl.channel.following import Follower, Following
from fusedrl.channel.sources import module_places
from fusedrl.compat import torchrl
from fusedrl.vllm.engine_follower import EngineFollower
from fusedrl.vllm.policy import wrappers_in
from fusedrl.weights.follow import Attachment, is_compiled, module_of
from fusedrl.weights.policy_copies import materialise


class WorkerEnd:
    """A reader of a channel, and the model in this process that follows it.

    Args:
        handle: the handle of the channel.
        model_id: the attribute path of the model in its collector.
        mode: ``"alias"``, ``"copy"``, or ``None``, which takes alias if dtypes and devices fit and
            the collector compiles nothing, and copy otherwise.
        buffers: values of the model's buffers that versions do not include.
        awaits_first: whether the model waits for the first version, else it begins with the weights
            that it has.
    """

    def __init__(
        self,
        handle: WeightHandle,
        model_id: str,
        mode: Literal["alias", "copy"] | None,
        buffers: Mapping[str, Tensor],
        awaits_first: bool = True,
    ) -> None:
        self.reader = handle.open()
        self._handle = handle
        self._model_id = model_id
        self._mode: Literal["alias", "copy"] | None = mode
        self._buffers = buffers
        self._awaits_first = awaits_first
        self._follower: Following | None = None
        self._attachment: Attachment | None = None

    def follow(self, model: Any, collector: Any = None) -> Following:
        """Load the newest version into a model, and hold it until the model is called.

        Args:
            model: a module, or an object with a ``module``; its weights may lie on meta, or in a
                vLLM engine.
            collector: the collector that calls the model, if it is known.

        Raises:
            TypeError: the model is not a module.
            ValueError: its weights do not fit the channel's.
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
        if self._awaits_first or self.reader.version is not None:
            self._follower.load()
        return self._follower

    def attach(self, collector: Any) -> Any:
        """Switch versions at each call of the collector's model, and return the model.

        Raises:
            TypeError, ValueError: as for :meth:`follow`.
        """
        model = find_model(collector, self._model_id)
        follower = self.follow(model, collector)
        if self._attachment is None:
            self._attachment = Attachment(collector, follower, is_policy(self._model_id))
        with follower:
            pass  # releases the version that follow() holds until the first call
        return model

    def receive(self, timeout: float | None) -> nn.Module | None:
        """Load the newest version, unless a collector's calls do; the model if it has changed."""
        follower = self._follower
        if follower is None or self._attachment is not None:
            return None
        before = follower.version
        if timeout is not None and before is not None:
            with contextlib.suppress(TimeoutError):
                self.reader.wait_for(before + 1, timeout)
        return None if follower.load() == before else follower.module

    def close(self, detach: bool) -> None:
        """Stop following and close the reader; ``detach`` as for :meth:`Follower.close`."""
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
    """Whether a model is a collector's policy, or a part of it."""
    return model_id.split(".")[0] == "policy"


def find_model(collector: Any, model_id: str) -> Any:
    """A model of a collector by its attribute path.

    Raises:
        ValueError: the collector has no such model in this process.
    """
    get = getattr(collector, "get_model", None)
    try:
        return torchrl.model_at(collector, model_id) if get is None else get(model_id)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"weight_sync_schemes: expected {model_id!r} to name a model of the collector in this "
            f"process, got {error}; for a model that only workers have, call "
            "scheme.init_on_sender(model_id=..., model=...) before the collector is made"
        ) from error
