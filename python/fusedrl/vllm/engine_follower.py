"""Keeps a policy's engine at the newest version, so that each call generates with one version."""

# vLLM has an environment of its own, which the linters do not see.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import weakref
from typing import Any

from fusedrl.channel import WeightHandle, WeightReader
from fusedrl.channel.following import Following
from fusedrl.vllm.engines import engine_of
from fusedrl.vllm.policy import ReportedVersions, wrappers_in
from fusedrl.vllm.updates import Updates

TIMEOUT_S = 60.0  # how long the engine's workers wait for a version, which is published already

_FOLLOWERS: weakref.WeakSet[EngineFollower] = weakref.WeakSet()


class EngineFollower(Following):
    """Keep a policy's ``vllm.LLM`` at the newest version, between calls and never during one.

    As long as the engine is followed, torchrl's wrappers report the version of each token, if vLLM
    does (from 0.32 on).

    Args:
        handle: the handle of the channel, which the engine opens itself.
        reader: a reader of the same channel, which tells what is published; :meth:`close` leaves
            it open.
        policy: the policy that contains the engine. The weights that the engine started with are
            version 0.

    Raises:
        ValueError: the engine was started without the backend, another follower has it, or its
            model has other weights than the channel.
    """

    def __init__(self, handle: WeightHandle, reader: WeightReader, policy: Any) -> None:
        super().__init__(reader, policy)
        wrappers = wrappers_in(policy)
        self.engine = wrappers[0].model
        engine = engine_of(self.engine, TIMEOUT_S)
        if any(other.engine is self.engine for other in list(_FOLLOWERS)):
            raise ValueError(
                "policy: expected an engine that nothing else gives weights to, got one that "
                "follows a channel already; shut down the other collector first"
            )
        self._updates = Updates(handle, lambda: reader.version, engine, timeout=TIMEOUT_S)
        try:
            self._updates.open()
        except Exception as error:  # errors of an engine in another process have lost their class
            raise ValueError(
                f"channel: expected one that the policy's engine can read, got: {error}; create it "
                "from the model that the engine runs"
            ) from error
        self._reports = [ReportedVersions(wrapper) for wrapper in wrappers if _can_tell(wrapper)]
        _FOLLOWERS.add(self)

    def _switch(self, timeout: float | None) -> None:
        newest = self.reader.wait_for(0, timeout)
        if not self._updates.has(newest):
            self.version = self._updates.load(newest)

    def close(self, detach: bool = True) -> None:
        """Stop following the channel; the engine keeps the version that it has."""
        while self._reports:
            self._reports.pop().remove()
        _FOLLOWERS.discard(self)


def _can_tell(wrapper: Any) -> bool:
    """Whether a wrapper is torchrl's, and vLLM reports versions with what it generates."""
    from torchrl.modules.llm import vLLMWrapper
    from vllm.outputs import CompletionOutput

    generates = isinstance(wrapper, vLLMWrapper) and wrapper.generate
    return generates and hasattr(CompletionOutput, "weight_versions")
