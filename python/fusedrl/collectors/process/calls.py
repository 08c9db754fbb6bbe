"""What an ``AsyncCollector`` asks its worker between two batches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from tensordict import TensorDictBase
from torchrl.collectors._base import ProfileConfig, _ProfilerHook

from fusedrl.collectors.process import inner
from fusedrl.collectors.process.errors import ShutDown
from fusedrl.collectors.process.updates import AsyncUpdates
from fusedrl.collectors.process.worker_process import WorkerProcess
from fusedrl.collectors.stopwatch import Profile


class Done(NamedTuple):
    """What the trainer has got: the number of its last batch, and how much that is in all."""

    number: int = 0
    frames: int = 0
    batches: int = 0
    stale: int = 0

    def with_batch(self, number: int, frames: int, stale: int) -> Done:
        """The same after one more batch."""
        return Done(number, self.frames + frames, self.batches + 1, self.stale + stale)


class AsyncCalls(AsyncUpdates):
    """How :class:`fusedrl.AsyncCollector` reaches what its worker has."""

    _done: Done
    _loaded: Done  # what a state that was loaded counts beside it

    @property
    def _frames(self) -> int:
        return self._loaded.frames + self._done.frames

    @property
    def _iter(self) -> int:
        return self._loaded.batches + self._done.batches - 1

    @property
    def stale_frames(self) -> int:
        """Frames that ``max_staleness`` dropped."""
        return self._done.stale

    def _running(self) -> WorkerProcess:
        self._raise_thread_error()
        if self._worker is None:
            raise ShutDown
        if self._worker.is_inherited:
            raise RuntimeError(
                "collector: expected the process that made it, got one that was forked from it; "
                "make another one here"
            )
        return self._worker

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        return self._running().call(function, *args)

    def _call_anew(self, function: Callable[..., Any], *args: Any) -> Any:
        """As :meth:`_call`; nobody gets batches from before it."""
        return self._running().call(function, *args, anew=True)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environment, torch and numpy in the worker, and reset the environment.

        Args:
            seed: of the environment, or the first of several.
            static_seed: whether all environments have the same one.

        Returns:
            The last environment's seed.
        """
        return self._call_anew(inner.set_seed, seed, static_seed)

    def reset(self, reset_idx: Any = None) -> None:
        """Start new trajectories; nothing of before is in any batch from now on.

        Args:
            reset_idx: ``None``, or a list of one: whether to reset the one worker's.
        """
        self._flush_trajectory_assembly()
        if reset_idx is None or any(reset_idx):
            self._call_anew(inner.reset)

    def state_dict(self) -> OrderedDict[str, Any]:
        """The worker's (``"worker0"``), and what was collected (``"frames"``, ``"iter"``)."""
        worker = self._call(inner.state_dict)
        state = OrderedDict(worker0=worker, frames=self._frames, iter=self._iter)
        if "traj_pool" in worker:
            state["traj_pool"] = worker.pop("traj_pool")
        if self.policy_version_tracker is not None:
            state["policy_version"] = self.policy_version
        return state

    def load_state_dict(self, state_dict: OrderedDict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        The policy's weights are published as one version, whose number is not less than theirs.
        """
        worker = dict(state_dict["worker0"])
        if "traj_pool" in state_dict:
            worker["traj_pool"] = state_dict["traj_pool"]
        version = state_dict.get("policy_version")
        scheme = self._weight_sync_schemes.get("policy")
        weights = worker.pop("policy_state_dict", None) if scheme is not None else None
        if scheme is not None:
            worker.pop("policy_version", None)
        if scheme is not None and weights is not None:
            # First: the worker goes on with the next batch as soon as it has its state.
            newest = scheme.version or 0
            scheme.send(weights, version=max(version or 0, newest + 1))
            version = None  # counted
        self._call_anew(inner.load_state_dict, worker, scheme is None)
        if version is not None and self.policy_version_tracker is not None:
            self.policy_version_tracker.version = version
        frames, batches = state_dict["frames"], state_dict["iter"] + 1
        self._loaded = Done(frames=frames - self._done.frames, batches=batches - self._done.batches)

    def profile(self) -> Profile:
        """Where the worker's time went: policy, env, stamping, queueing (packing is in this).

        Raises:
            RuntimeError: the worker's collector does not know.
        """
        return self._call(inner.profile)

    def getattr_policy(self, attr: str) -> Any:
        """An attribute of the worker's policy."""
        return self._call(inner.getattr_policy, attr)

    def getattr_env(self, attr: str) -> Any:
        """An attribute of the worker's environment."""
        return self._call(inner.getattr_env, attr)

    def get_distant_attr(self, attr: str) -> list[Any]:
        """What a path names in the worker's collector, as a list of one."""
        return [self._call(inner.get, attr)]

    def map_fn(
        self,
        method_name: str,
        list_of_args: list[tuple[Any, ...]] | None = None,
        list_of_kwargs: list[dict[str, Any]] | None = None,
    ) -> list[Any]:
        """Call a method of the worker's collector; arguments and result are lists of one."""
        args, kwargs = self._normalize_worker_calls(list_of_args, list_of_kwargs)
        return [self._call(inner.execute, method_name, args[0], kwargs[0])]

    @property
    def procs(self) -> list[Any]:
        """The worker's process in a list, empty after :meth:`shutdown`."""
        return [] if self._worker is None else [self._worker.process]

    def _set_worker_attr(self, attr_name: str, value: Any) -> None:
        if self._worker is not None:
            self._call(inner.assign, attr_name, value)

    def _install_profile_hooks(self, config: ProfileConfig) -> None:
        if 0 in config.workers:
            hook: Callable[[TensorDictBase], None] = _ProfilerHook(config, worker_idx=0)
            self._set_worker_attr("post_collect_hook", hook)

    def _uninstall_profile_hooks(self, config: ProfileConfig) -> None:
        if self._worker is not None and 0 in config.workers:
            self._call(inner.execute, "post_collect_hook.stop", (), {})
            self._set_worker_attr("post_collect_hook", self._post_collect_hook)
