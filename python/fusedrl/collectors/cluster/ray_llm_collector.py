"""torchrl's ``RayLLMCollector``: dialogs that are collected in actors of a Ray cluster."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.collectors import ProfileConfig
from torchrl.collectors.llm.ray_collector import RayLLMCollector as _RayLLMCollector

from fusedrl.collectors.cluster.delegation import (
    FirstActor,
    OwnArguments,
    in_actors,
)
from fusedrl.collectors.cluster.dialog_actor import DialogActor
from fusedrl.collectors.cluster.ray_actors import Actors, start_ray
from fusedrl.collectors.cluster.ray_batches import RayBatches
from fusedrl.collectors.cluster.ray_options import RayOptions
from fusedrl.collectors.cluster.ray_weights import RayWeights, one_of_policy
from fusedrl.collectors.options import arguments_of, check_state, of_part
from fusedrl.collectors.progress import Profile, progress_bar
from fusedrl.transport import deserialize


class RayLLMCollector(_RayLLMCollector, metaclass=OwnArguments):
    """Collects dialogs in actors of a Ray cluster, each of which is an :class:`LLMCollector`.

    It takes the place of torchrl's class, and ``isinstance`` accepts it as one. Environment and
    policy live in the actors. An update puts the weights into Ray's object store once. A policy
    takes them at its next call, also in the middle of a batch, and all actors have them under one
    version, which tags the turns. If it is pickled for a Ray task or actor, it is a handle of the
    same actors there.

    Args:
        env: an environment or a function that makes one, for all actors, or a list with one for
            each.
        policy: the policy, which is sent to the actors. An update without weights sends its
            weights.
        policy_factory: a function that makes the policy in each actor; pass it instead of
            ``policy``.
        dialog_turns_per_batch: number of turns in a batch, rounded up to whole steps.
        total_dialog_turns: number of turns to run in all, shared out equally; -1, ``None`` or
            infinity never ends.
        yield_only_last_steps: as for :class:`LLMCollector`.
        yield_completed_trajectories: as for :class:`LLMCollector`.
        postproc: a function that gets each batch of an actor, in the actor.
        async_envs: as for :class:`LLMCollector`.
        replay_buffer: a buffer that is extended with each batch; the iterator then yields ``None``.
            The actors extend a ``RayReplayBuffer``; any other buffer is extended in this process.
        reset_at_each_iter: as for :class:`LLMCollector`.
        flatten_data: as for :class:`LLMCollector`.
        weight_updater: an updater that sends to actors, such as :class:`RayRemoteWeightUpdater`,
            runs here. Any other, or a function that makes one, runs in each actor, instead of a
            channel.
        ray_init_config: arguments of ``ray.init``, which is called unless Ray runs.
        remote_config: Ray's options (``num_cpus``, ``resources``, ``scheduling_strategy``, ...) for
            all actors, or a list with one set of options for each.
        track_policy_version: whether to tag turns, or the :class:`PolicyVersion` that tags them.
        sync_iter: with ``True`` the actors collect while you wait for a batch, each its share of
            it. With ``False`` each collects its next batch meanwhile, and you get the first that is
            ready.
        progress: show a progress bar here, with rich: turns, tokens, version, staleness.
        verbose: log the same figures for each batch here, unless there is a bar.
        num_cpus: number of CPUs of each actor, unless ``remote_config`` names it.
        num_gpus: number of GPUs of each actor, unless ``remote_config`` names it.
        num_collectors: number of actors; by default as many as a list has.
        channel_mode: ``"alias"`` or ``"copy"``, as for :meth:`fusedrl.WeightReader.load_into`.
        copy_turns: as for :class:`fusedrl.LLMCollector`.
        max_staleness: drop a batch if its oldest turn is more than this number of versions behind
            when it is handed out; ``stale_turns`` counts the dropped turns.
        timeout: seconds that Ray may take to place an actor, and an update to reach it.

    Raises:
        TypeError: as for :class:`LLMCollector`, or a policy or environment cannot be pickled.
        ValueError: as for :class:`LLMCollector`, or lists have different lengths, or there are
            fewer turns than actors. It is raised before Ray is started, where that is possible.
        RuntimeError: Ray is not installed or has no place for an actor, or later an actor is dead.
            What an actor raises is raised here, with its traceback.

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

    @arguments_of(RayOptions)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        options = RayOptions(*args, **kwargs)
        start_ray(options.ray_init_config)
        self.progress, self.verbose = options.progress, options.verbose
        self.requested_frames_per_batch = options.dialog_turns_per_batch or 1
        self.total_frames: Any = options.total
        self._actors = Actors(options.timeout)
        own = options.for_each(torch.initial_seed() % 2**62)
        self._actors.start(DialogActor, options.of_ray(), options.for_all(), own)
        has_updater = options.weight_updater is not None
        self._weights = RayWeights(
            self._actors, options.policy, options.track_policy_version, has_updater
        )
        self._weights.register(options.weight_updater, self)
        self._batches = RayBatches(
            self._actors,
            self._weights,
            options.replay_buffer,
            options.extends_here,
            options.sync_iter,
            options.max_staleness,
        )

    _iterator: Iterator[Any] | None = None  # of next()

    def __del__(self) -> None:
        """Nothing: an actor ends with its last handle."""

    def __getstate__(self) -> dict[str, Any]:
        """What makes a handle of the same actors in another process."""
        self._actors.require_open()
        own = ("progress", "verbose", "requested_frames_per_batch", "total_frames")
        return {name: vars(self)[name] for name in (*own, "_actors", "_weights", "_batches")}

    postproc = in_actors("postproc", "The postprocessing, in the actors.")
    pre_collect_hook = in_actors("pre_collect_hook", "Called before each batch, in the actors.")
    post_collect_hook = in_actors("post_collect_hook", "Called with each batch, in the actors.")
    sync_iter = of_part("_batches", "sync_iter", "Whether a batch has a share of each actor.")
    max_staleness = of_part("_batches", "max_staleness", "Versions that a batch may be behind.")
    replay_buffer = of_part("_batches", "replay_buffer", "What gets the batches, if any.")
    stale_turns = of_part("_batches", "stale_turns", "Turns that ``max_staleness`` dropped.")
    policy_version = of_part("_weights", "version", "That of the next policy calls, if tracked.")
    policy_version_tracker = of_part("_weights", "tracker", "The tracker, which knows all counts.")
    closed = of_part("_actors", "closed", "Whether the collector is shut down.")
    _frames = of_part("_batches", "frames", "torchrl's name of the turns that were collected.")
    _iter = of_part("_batches", "number", "torchrl's name of the number of the last batch.")

    def is_initialized(self) -> bool:
        """Whether the collector is ready: made, and not shut down."""
        return not self.closed

    @property
    def total_dialog_turns(self) -> Any:
        """Number of turns to run in all; infinite if they never end."""
        return self.total_frames

    @property
    def dialog_turns_per_batch(self) -> int:
        """Number of turns in a batch, before it is rounded up to whole steps."""
        return self.requested_frames_per_batch

    def __iter__(self) -> Iterator[Any]:
        """Batches until all actors have run their turns; ``None`` each where a buffer gets them.

        An exception of an actor shuts the collector down.
        """
        return self.iterator()

    def iterator(self) -> Iterator[Any]:
        """As ``iter``."""
        yield from self._batches.rest(progress_bar(self))

    def next(self) -> TensorDictBase | None:
        """The next batch; ``None`` at the end, and if a replay buffer gets it.

        An exception of an actor shuts the collector down.
        """
        if self._iterator is None:
            # Not of the collector itself, which would be a reference to itself, and stay.
            self._iterator = self._batches.rest(progress_bar(weakref.proxy(self)))
        try:
            for batch in self._iterator:
                return batch
        except BaseException:
            self._iterator = None  # this one has ended, and another one can go on
            raise
        self._iterator = None

    def start(self) -> None:
        """Collect into the replay buffer in the background, in all actors at once.

        Raises:
            RuntimeError: there is no replay buffer, or only another process has it.
        """
        self._batches.start(progress_bar(self))

    def is_running(self) -> bool:
        """Whether it collects in the background."""
        return self._batches.background.is_running()

    def rollout(self) -> TensorDictBase:
        """A batch of the first actor that does not count, before any postprocessing."""
        return deserialize(self._actors.one(0, "rollout"))

    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Start new dialogs in every actor, between two batches.

        Raises:
            NotImplementedError: an ``index``.
        """
        if index is not None or kwargs:
            raise NotImplementedError(
                "index: expected None, got a part of the environments; all dialogs start anew"
            )
        self._actors.require_open()
        self._batches.forget()
        self._actors.each("call", "reset")

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        worker_ids: Any = None,
        model_id: str | None = None,
        weights_dict: dict[str, Any] | None = None,
        policy_weights: Any = None,
    ) -> None:
        """Update the weights of all actors' policies: one version, the same for all.

        Without a weight updater, every call of a policy that begins afterwards uses the weights,
        also in the middle of a batch. A call that runs keeps its weights, and the update does not
        wait for it. An updater that derives from :class:`fusedrl.RemoteWeightUpdaterBase` runs
        here, and any other in the actors, between two batches.

        Args:
            policy_or_weights: a tensordict, a module or a state dict of the policy, or of the model
                that it wraps; the policy that the collector was given if ``None``.
            weights: the same.
            policy: the same.
            worker_ids: workers that the updater shall reach; without an updater ``None`` or all
                actors.
            model_id: ``None`` or ``"policy"``.
            weights_dict: weights for ``"policy"``, and for nothing else.
            policy_weights: the same as ``policy_or_weights``, by its former name.

        Raises:
            TypeError: the policy has no module, and there is no weight updater.
            ValueError: the weights do not fit, and nothing has changed; or only some workers are
                named.
            RuntimeError: an actor is dead. The others have the weights, unless it is the first one,
                which numbers updates.
            TimeoutError: an actor does not answer.
        """
        forms = [policy_or_weights, weights, policy, policy_weights]
        self._weights.update(one_of_policy(forms, model_id, weights_dict), worker_ids)

    def receive_weights(self, *args: Any, **kwargs: Any) -> None:
        """As :meth:`update_policy_weights_`."""
        self.update_policy_weights_(*args, **kwargs)

    def increment_version(self) -> None:
        """Count a version in every actor, without other weights."""
        self._weights.count()

    @property
    def weight_updater(self) -> Any:
        """The weight updater that was set, or the function that makes it in the actors."""
        return self._weights.updater

    @weight_updater.setter
    def weight_updater(self, value: Any) -> None:
        self._weights.replace_updater(value, self)

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """Call ``init`` of the weight updater, where it runs."""
        self._weights.init_updater(*args, **kwargs)

    @property
    def remote_collectors(self) -> list[Any]:
        """The actors, as :class:`fusedrl.RayRemoteWeightUpdater` takes them."""
        return self._weights.numbered_actors()

    @property
    def _collector(self) -> FirstActor:
        """torchrl's name of its one actor."""
        self._actors.require_open()
        return FirstActor(self._actors)

    def _first(self, name: str, *args: Any) -> Any:
        return self._actors.one(0, "call", name, args)

    def _each(self, name: str, *args: Any) -> list[Any]:
        return self._actors.each("call", name, args)

    def set_postproc(self, postproc: Callable[[TensorDictBase], TensorDictBase]) -> None:
        """Set the postprocessing of a collector that has none; it runs in the actors.

        Raises:
            RuntimeError: it has one.
        """
        self._each("set_postproc", postproc)

    def get_policy_model(self) -> Any:
        """A copy of the model that the first actor's policy wraps."""
        return self._first("get_policy_model")

    def get_model(self, model_id: str) -> Any:
        """A copy of a model of the first actor's collector."""
        return self._first("get_model", model_id)

    def getattr_policy(self, attr: str) -> Any:
        """A copy of an attribute of the first actor's policy."""
        return self._first("getattr_policy", attr)

    def getattr_env(self, attr: str) -> Any:
        """A copy of an attribute of the first actor's environment."""
        return self._first("getattr_env", attr)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environments one after the other; returns the seed that would follow."""
        self._actors.require_open()
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

        If weights have been sent, the policies keep them and their version.

        Raises:
            ValueError: the state has another number of actors or does not fit one of them. Nothing
                has changed then.
        """
        self._actors.require_open()
        names = [f"worker{index}" for index in self._actors.indices]
        workers = [key for key in state_dict if str(key).startswith("worker")]
        if sorted(workers) != sorted(names):
            raise ValueError(
                f"state_dict: expected {names[0]} to {names[-1]}, got {workers}; load it into as "
                "many actors as it is of"
            )
        check_state(state_dict, {}, self.policy_version_tracker, True)
        states = [state_dict[name] for name in names]
        self._actors.each_its_own("call", [("check_state_dict", (one,), kwargs) for one in states])
        self._batches.forget()
        self._actors.each_its_own("call", [("load_state_dict", (one,), kwargs) for one in states])
        self._batches.load(state_dict["iter"], [state["frames"] for state in states])
        if "policy_version" in state_dict:
            self._weights.load(state_dict["policy_version"])

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """End the actors, after their current turns. It may be called again.

        Args:
            timeout: seconds that actors may take, 10 if ``None``; then they are killed.
            close_env: whether environments are closed.
            raise_on_error: whether to raise errors of the background or of closing.

        Raises:
            RuntimeError: what actors could not close, by their names.
        """
        self._iterator = None
        self._batches.end(timeout, close_env, raise_on_error)

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """As :meth:`shutdown`."""
        self.shutdown(timeout, close_env)

    def __enter__(self) -> Any:
        """The collector."""
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Shut it down; an exception of the block is not hidden."""
        self.shutdown(raise_on_error=kind is None)

    def __repr__(self) -> str:
        """How many actors, and where."""
        if self.closed:
            return f"{type(self).__name__}(closed)"
        names = ", ".join(self._actors.name(index) for index in self._actors.indices)
        return f"{type(self).__name__}({names})"
