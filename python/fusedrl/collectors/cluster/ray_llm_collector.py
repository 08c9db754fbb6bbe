"""torchrl's ``RayLLMCollector``: dialogs that are collected in actors of a Ray cluster."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import astuple, replace
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.collectors import ProfileConfig

from fusedrl.channel.layout import Layout
from fusedrl.collectors.cluster.actors import Actors, FirstActor, buffer_client, start_ray
from fusedrl.collectors.cluster.arguments import check_ray_arguments, ray_options, shares
from fusedrl.collectors.cluster.batches import RayBatches
from fusedrl.collectors.cluster.distributor import Distributor, InFirstActor
from fusedrl.collectors.policy_version import PolicyVersion
from fusedrl.collectors.progress import check_progress
from fusedrl.collectors.state import check_state
from fusedrl.collectors.stopwatch import Profile
from fusedrl.transport import unpack
from fusedrl.weights.base import RemoteWeightUpdaterBase

_OF_HANDLES = {
    "sync_iter",
    "max_staleness",
    "progress",
    "verbose",
    "requested_frames_per_batch",
    "total_frames",
    "_extends",
    "_layout",
    "_updatable",
    "_tracks",
    "_versions",
    "_actors",
}  # the attributes that a handle in another process has from the collector


class RayLLMCollector(RayBatches):
    """Collect dialogs in actors of a Ray cluster, each of which is an :class:`LLMCollector`.

    Takes the place of torchrl's class, and is one for ``isinstance``. Environment and policy live
    in the actors. Weights get there by one object of Ray's store an update: a policy takes them at
    its next call, also in the middle of a batch, and all actors have them under one version, which
    tags the turns. Pickled for a Ray task or actor, it is a handle of the same actors there.

    Args:
        env: an environment, or a function that makes one: for all actors, or a list, one each.
        policy: sent to the actors; trained here, it is what an update without weights sends.
        policy_factory: makes the policy in each actor, in its place.
        dialog_turns_per_batch: turns in a batch, rounded up to whole steps of the environments.
        total_dialog_turns: turns to run in all, shared out equally; -1 never ends.
        yield_only_last_steps: as for :class:`LLMCollector`.
        yield_completed_trajectories: as for :class:`LLMCollector`.
        postproc: is given each batch of an actor, in the actor.
        async_envs: as for :class:`LLMCollector`.
        replay_buffer: is extended with each batch; the iterator yields ``None`` instead. A
            ``RayReplayBuffer`` is extended by the actors, any other one in this process.
        reset_at_each_iter: as for :class:`LLMCollector`.
        flatten_data: as for :class:`LLMCollector`.
        weight_updater: one that sends to actors, such as :class:`RayRemoteWeightUpdater`, runs
            here; any other, or a function that makes it, in each actor, instead of a channel.
        ray_init_config: of ``ray.init``, which is called unless Ray runs.
        remote_config: Ray's options for an actor (``num_cpus``, ``resources``,
            ``scheduling_strategy``, ...): for all of them, or a list, one each.
        track_policy_version: whether to tag turns, or with which :class:`PolicyVersion`.
        sync_iter: ``True``: actors collect while a batch is waited for, each its share of it.
            ``False``: each collects its next batch meanwhile, and the first that is ready comes.
        progress: show a progress bar here, with rich: turns, tokens, version, staleness.
        verbose: log the same for each batch here, unless there is a bar.
        num_cpus: of each actor, where ``remote_config`` does not say.
        num_gpus: of each actor, where ``remote_config`` does not say.
        num_collectors: actors; as many as a list has.
        channel_mode: ``"alias"`` or ``"copy"``, as of :meth:`fusedrl.WeightReader.load_into`.
        max_staleness: drop a batch if its oldest turn is more than so many versions behind as it
            is handed out; ``stale_turns`` counts what is dropped.
        timeout: seconds that an actor may take to find a place, and an update to reach it.

    Raises:
        TypeError: as for :class:`LLMCollector`; a policy or environment that cannot be pickled.
        ValueError: as for :class:`LLMCollector`; lists of different lengths; fewer turns than
            actors. What can be refused is refused before Ray is touched.
        RuntimeError: Ray is not installed, or has no place for an actor; later, a dead actor. What
            an actor raises is raised here, with its traceback.

    Example:
        >>> from fusedrl import RayLLMCollector
        >>> def collect(make_env, make_policy, trained):
        ...     collector = RayLLMCollector(
        ...         make_env,
        ...         policy_factory=make_policy,
        ...         dialog_turns_per_batch=64,
        ...         total_dialog_turns=10_000,
        ...         track_policy_version=True,
        ...         num_collectors=2,
        ...         num_gpus=1,
        ...         sync_iter=False,
        ...     )
        ...     for batch in collector:
        ...         yield batch
        ...         collector.update_policy_weights_(trained)
        ...     collector.shutdown()
    """

    def __init__(
        self,
        env: Any,
        *,
        policy: Callable[[TensorDictBase], TensorDictBase] | None = None,
        policy_factory: Callable[[], Callable[[TensorDictBase], TensorDictBase]] | None = None,
        dialog_turns_per_batch: int | None = None,
        total_dialog_turns: int = -1,
        yield_only_last_steps: bool | None = None,
        yield_completed_trajectories: bool | None = None,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        async_envs: bool | None = None,
        replay_buffer: Any | None = None,
        reset_at_each_iter: bool = False,
        flatten_data: bool | None = None,
        weight_updater: Any | None = None,
        ray_init_config: dict[str, Any] | None = None,
        remote_config: dict[str, Any] | list[dict[str, Any]] | None = None,
        track_policy_version: bool | Any = False,
        sync_iter: bool = True,
        progress: bool = False,
        verbose: bool = False,
        num_cpus: float | None = None,
        num_gpus: float | None = None,
        num_collectors: int | None = None,
        channel_mode: str = "alias",
        max_staleness: int | None = None,
        timeout: float = 300.0,
    ) -> None:
        self.closed = True
        count = check_ray_arguments(locals())
        check_progress(progress)
        start_ray(ray_init_config)
        self.sync_iter, self.max_staleness = sync_iter, max_staleness
        self.progress, self.verbose = progress, verbose
        self.replay_buffer, remote_buffer = replay_buffer, buffer_client(replay_buffer)
        self._extends = replay_buffer is not None and remote_buffer is None
        if flatten_data is None and self._extends and not yield_only_last_steps:
            flatten_data = True
        self.requested_frames_per_batch = dialog_turns_per_batch or 1
        self.total_frames: Any = float("inf") if total_dialog_turns == -1 else total_dialog_turns
        self._begin()
        given = not isinstance(track_policy_version, bool)
        self._versions = track_policy_version if given else PolicyVersion()
        self._tracks = track_policy_version is not False
        sends = isinstance(weight_updater, RemoteWeightUpdaterBase)
        shared = {
            "policy": policy,
            "policy_factory": policy_factory,
            "yield_only_last_steps": yield_only_last_steps,
            "yield_completed_trajectories": yield_completed_trajectories,
            "postproc": postproc,
            "async_envs": async_envs,
            "replay_buffer": remote_buffer,
            "reset_at_each_iter": reset_at_each_iter,
            "flatten_data": flatten_data,
            "weight_updater": None if sends else weight_updater,
            "track_policy_version": track_policy_version,
            "channel_mode": channel_mode,
            "max_staleness": max_staleness,
        }
        if sync_iter and dialog_turns_per_batch is not None:
            dialog_turns_per_batch = -(-dialog_turns_per_batch // count)
        envs = env if isinstance(env, list) else [env] * count
        own = [
            {
                "env": one,
                "total_dialog_turns": turns,
                "dialog_turns_per_batch": dialog_turns_per_batch,
            }
            for one, turns in zip(envs, shares(total_dialog_turns, count), strict=True)
        ]
        self._actors = Actors(ray_options(remote_config, count, num_cpus, num_gpus), timeout)
        self._actors.start(shared, own, torch.initial_seed() % 2**62)
        self._distributor = Distributor(self._actors, self._versions)
        self.closed = False
        layout = self._actors.started[0].layout
        self._layout = None if layout is None else Layout.from_json(layout)
        self._updatable = layout is not None or weight_updater is not None
        self._policy = policy
        self._register(weight_updater)

    def __del__(self) -> None:
        """Nothing: an actor ends with its last handle."""

    def __getstate__(self) -> dict[str, Any]:
        """What makes a handle of the same actors in another process.

        Updates are numbered in the first actor from here on, for all handles.
        """
        self._refuse_closed()
        self._share()
        state = {name: value for name, value in vars(self).items() if name in _OF_HANDLES}
        sends = isinstance(self._weight_updater, RemoteWeightUpdaterBase)  # the weights here
        return state | {
            "replay_buffer": buffer_client(self.replay_buffer),
            "_weight_updater": None if sends else self._weight_updater,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A handle, which has collected nothing itself."""
        updater = state.pop("_weight_updater")
        vars(self).update(state)
        self._begin()
        self._policy = None  # of it this process would have a copy, with other weights
        self._distributor = InFirstActor(self._actors, self._versions)
        self._register(updater)
        self.closed = False

    @property
    def _collector(self) -> FirstActor:
        """torchrl's name of its one actor."""
        self._refuse_closed()
        return FirstActor(self._actors)

    def is_initialized(self) -> bool:
        """Whether the collector is ready: made, and not shut down."""
        return not self.closed

    def set_postproc(self, postproc: Callable[[TensorDictBase], TensorDictBase]) -> None:
        """Set the postprocessing of a collector that has none; it runs in the actors.

        Raises:
            RuntimeError: it has one.
        """
        self._each("set_postproc", postproc)

    @property
    def postproc(self) -> Any:
        """The postprocessing, as the first actor has it."""
        return self._of_first("get", "postproc")

    @postproc.setter
    def postproc(self, value: Any) -> None:
        self._set("postproc", value)

    @property
    def pre_collect_hook(self) -> Any:
        """Called before each batch, in the actors."""
        return self._of_first("get", "pre_collect_hook")

    @pre_collect_hook.setter
    def pre_collect_hook(self, hook: Any) -> None:
        self._set("pre_collect_hook", hook)

    @property
    def post_collect_hook(self) -> Any:
        """Called with each batch, in the actors."""
        return self._of_first("get", "post_collect_hook")

    @post_collect_hook.setter
    def post_collect_hook(self, hook: Any) -> None:
        self._set("post_collect_hook", hook)

    @property
    def total_dialog_turns(self) -> Any:
        """Turns to run in all, infinite without an end."""
        return self.total_frames

    @property
    def dialog_turns_per_batch(self) -> int:
        """Turns in a batch, before they are rounded up to whole steps."""
        return self.requested_frames_per_batch

    def rollout(self) -> TensorDictBase:
        """A batch of the first actor that does not count, before any postprocessing."""
        return unpack(self._of_first("rollout"))

    def get_policy_model(self) -> Any:
        """A copy of the model that the first actor's policy wraps."""
        return self._of_first("call", "get_policy_model")

    def get_model(self, model_id: str) -> Any:
        """A copy of a model of the first actor's collector."""
        return self._of_first("call", "get_model", (model_id,))

    def getattr_policy(self, attr: str) -> Any:
        """A copy of an attribute of the first actor's policy."""
        return self._of_first("call", "getattr_policy", (attr,))

    def getattr_env(self, attr: str) -> Any:
        """A copy of an attribute of the first actor's environment."""
        return self._of_first("call", "getattr_env", (attr,))

    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Start new dialogs in every actor, between two batches.

        Raises:
            NotImplementedError: an ``index``.
        """
        if index is not None or kwargs:
            raise NotImplementedError(
                "index: expected None, got a part of the environments; all dialogs start anew"
            )
        self._refuse_closed()
        self._forget()
        self._actors.each("call", "reset")

    def _forget(self) -> None:
        """Whatever was collected before the actors are told to start anew is not handed out."""
        self._under_way.clear()
        self._ready = None

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environments one after the other; returns the seed that would follow."""
        self._refuse_closed()
        for index in self._actors.indices:
            seed = self._actors.one(index, "call", "set_seed", (seed, static_seed))
        return seed

    def profile(self) -> Profile:
        """Where the time of all actors went: policy, env, stamping, queueing."""
        parts = [astuple(profile) for profile in self._each("profile")]
        return Profile(*map(sum, zip(*parts, strict=True)))

    def _install_profile_hooks(self, config: ProfileConfig) -> None:
        for index in set(config.workers).intersection(self._actors.indices):
            own = replace(config, save_path=config.get_save_path(index))
            self._actors.one(index, "call", "_install_profile_hooks", (own,))

    def _uninstall_profile_hooks(self, config: ProfileConfig) -> None:
        for index in set(config.workers).intersection(self._actors.indices):
            self._actors.one(index, "call", "_uninstall_profile_hooks", (config,))

    def state_dict(self) -> OrderedDict[str, Any]:
        """The state of each actor's collector, between two batches, the counts and the version."""
        states = self._each("state_dict")
        state: OrderedDict[str, Any] = OrderedDict(
            (f"worker{index}", state) for index, state in enumerate(states)
        )
        state.update(frames=sum(state["frames"] for state in states), iter=self._iter)
        if self.policy_version_tracker is not None:
            state["policy_version"] = self.policy_version
        return state

    def load_state_dict(self, state_dict: Any, **kwargs: Any) -> None:
        """Restore the collectors, the counts and the version; dialogs start anew.

        Once weights were sent, the policies keep these and their version.

        Raises:
            ValueError: a state of another number of actors, or one that does not fit one of them;
                nothing has changed then.
        """
        self._refuse_closed()
        names = [f"worker{index}" for index in self._actors.indices]
        workers = [key for key in state_dict if str(key).startswith("worker")]
        if sorted(workers) != sorted(names):
            raise ValueError(
                f"state_dict: expected {names[0]} to {names[-1]}, got {workers}; load it into as "
                "many actors as it is of"
            )
        check_state(state_dict, {}, self.policy_version_tracker, True)
        states = [state_dict[name] for name in names]
        self._each_state("check_state_dict", states, kwargs)
        self._forget()
        self._each_state("load_state_dict", states, kwargs)
        self._over.clear()
        self._iter = state_dict["iter"]
        self._turns = {index: state["frames"] for index, state in enumerate(states)}
        if "policy_version" in state_dict:
            self._distributor.load(state_dict["policy_version"], self._layout is not None)

    def _each_state(self, name: str, states: list[Any], kwargs: Any) -> None:
        """Call a method of each collector with its state."""
        asked = [
            self._actors.send(index, "call", name, (state,), kwargs)
            for index, state in enumerate(states)
        ]
        self._actors.wait(asked, None)

    def _of_first(self, method: str, *args: Any) -> Any:
        self._refuse_closed()
        return self._actors.one(0, method, *args)

    def _set(self, name: str, value: Any) -> None:
        self._refuse_closed()
        self._actors.each("set", name, value)

    def _each(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        self._refuse_closed()
        return self._actors.each("call", name, args, kwargs)

    def __repr__(self) -> str:
        """How many actors, and where."""
        if self.closed:
            return f"{type(self).__name__}(closed)"
        names = ", ".join(self._actors.name(index) for index in self._actors.indices)
        return f"{type(self).__name__}({names})"
