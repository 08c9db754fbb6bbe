"""Keeps a policy's engine at the newest version, so that each call generates with one version."""

# vLLM has an environment of its own, which the linters do not see.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import threading
import weakref
from typing import Any

from fusedrl import _host
from fusedrl.channel import WeightHandle, WeightReader
from fusedrl.channel.forking import renew_in_children
from fusedrl.vllm.controls import control_of
from fusedrl.vllm.engine_loads import EngineLoads
from fusedrl.vllm.policy import ReportedVersions, wrappers_in

TIMEOUT_S = 60.0  # how long the engine's workers wait for a version, which is published already

_FOLLOWERS: weakref.WeakSet[EngineFollower] = weakref.WeakSet()


class EngineFollower(_host.Calls):
    """Keep a policy's ``vllm.LLM`` at the newest version, between calls and never during one.

    It is used as :class:`fusedrl.channel.following.Follower`: ``with follower as version:``
    encloses a call, and overlapping calls share the version of the first. Nothing is leased
    between loads, because the engine has a copy of its own. As long as the engine is followed,
    torchrl's wrappers report the version of each token, if vLLM does (from 0.32 on).

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
        super().__init__()
        self.reader = reader
        self.module = policy
        self.version: int | None = None
        wrappers = wrappers_in(policy)
        self._engine = wrappers[0].model
        control = control_of(self._engine, TIMEOUT_S)
        if any(other._engine is self._engine for other in list(_FOLLOWERS)):
            raise ValueError(
                "policy: expected an engine that nothing else gives weights to, got one that "
                "follows a channel already; shut down the other collector first"
            )
        # Re-entrant: a follower may be closed by what the garbage collector finds.
        self._lock = threading.RLock()
        renew_in_children(self, _lock=threading.RLock)
        self._loads = EngineLoads(handle, lambda: reader.version, control, timeout=TIMEOUT_S)
        try:
            self._loads.open()
        except Exception as error:  # errors of an engine in another process have lost their class
            raise ValueError(
                f"channel: expected one that the policy's engine can read, got: {error}; create it "
                "from the model that the engine runs"
            ) from error
        self._reports = [ReportedVersions(wrapper) for wrapper in wrappers if _can_tell(wrapper)]
        _FOLLOWERS.add(self)

    def load(self, timeout: float | None = None) -> int:
        """Load the newest version, unless a call is running; returns the engine's version.

        Args:
            timeout: seconds to wait for the first version; the channel's own if ``None``.

        Raises:
            TimeoutError, RuntimeError: as for :meth:`WeightReader.wait_for`, or the engine refused.
        """
        with self._lock:
            if self.running == 0:
                self._switch(self.reader.wait_for(0, timeout))
            assert self.version is not None
            return self.version

    def _begin(self) -> int | None:
        """The version of a call that begins, ``None`` before the first."""
        if self.running == 0 and (newest := self.reader.version) is not None:
            self._switch(newest)
        return self.version

    def _switch(self, newest: int) -> None:
        if not self._loads.has(newest):
            self.version = self._loads.load(newest)

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
