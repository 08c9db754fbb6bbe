"""torchrl's ``RayLLMCollector``: dialogs that are collected in actors of a Ray cluster."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import astuple
from functools import partial
from operator import attrgetter, methodcaller
from types import SimpleNamespace
from typing import Any

from tensordict import TensorDict, TensorDictBase
from torchrl.collectors import BaseCollector, ProfileConfig
from torchrl.collectors.llm.ray_collector import RayLLMCollector as _RayLLMCollector

from fusedrl.channel.layout import Layout
from fusedrl.collectors.cluster.dialog_actor import (
    BETWEEN,
    DialogActor,
    refuse_sharded,
    start_actors,
    start_ray,
    weights_in,
)
from fusedrl.collectors.cluster.options import RayOptions
from fusedrl.collectors.cluster.ray_batches import RayBatches
from fusedrl.collectors.options import arguments_of, of_part
from fusedrl.collectors.policy_version import tracker_of
from fusedrl.collectors.progress import Profile, progress_bar
from fusedrl.compat.torchrl import ray_buffer_client
from fusedrl.transport import deserialize, serialize
from fusedrl.weights.base import RemoteWeightUpdaterBase
from fusedrl.weights.copying import unwrap
from fusedrl.weights.ray_store import StoredWeights

logger = logging.getLogger("fusedrl")

SECONDS_TO_END = 10.0

_Meta: Any = type(_RayLLMCollector)


class _OwnArguments(_Meta):
    """A metaclass that passes all arguments on; torchrl's takes ``num_collectors`` for itself."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore
        return type.__call__(cls, *args, **kwargs)


def _in_actors(name: str, doc: str) -> Any:
    """An attribute that is read from the first actor, and set in all."""

    def read(self: Any) -> Any:
        return self._first(getattr, name)

    def write(self: Any, value: Any) -> None:
        self._each(setattr, name, value)

    return property(read, write, doc=doc)


class RayLLMCollector(_RayLLMCollector, metaclass=_OwnArguments):
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
        postproc: a function that gets each batch of an actor, in the actor.
        replay_buffer: a buffer that is extended with each batch; the iterator then yields ``None``.
            The actors extend a ``RayReplayBuffer``; any other buffer is extended in this process.
        weight_updater: an updater that sends to actors, such as :class:`RayRemoteWeightUpdater`,
            runs here. Any other, or a function that makes one, runs in each actor, instead of a
            channel.
        ray_init_config: arguments of ``ray.init``, which is called unless Ray runs.
        remote_config: Ray's options (``num_cpus``, ``resources``, ``scheduling_strategy``, ...) for
            all actors, or a list with one set of options for each.
        sync_iter: with ``True`` the actors collect while you wait for a batch, each its share of
            it. With ``False`` each collects its next batch meanwhile, and you get the first that is
            ready.
        num_cpus: number of CPUs of each actor, unless ``remote_config`` names it.
        num_gpus: number of GPUs of each actor, unless ``remote_config`` names it.
        num_collectors: number of actors; by default as many as a list has.
        max_staleness: drop a batch if its oldest turn is more than this number of versions behind
            when it is handed out; ``stale_turns`` counts the dropped turns.
        timeout: seconds that Ray may take to place an actor, and an update to reach it.

    Further arguments are those of :class:`fusedrl.LLMCollector`, in each actor. Bar and log are
    here.

    Raises:
        TypeError: as for :class:`LLMCollector`, or a policy or environment cannot be pickled.
        ValueError: as for :class:`LLMCollector`, or lists have different lengths, or there are
            fewer turns than actors.
        RuntimeError: Ray is not installed, or has no place for an actor.
        ray.exceptions.RayActorError: later, an actor is dead. What an actor raises is raised here,
            with its traceback.

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
    def __init__(self, options: RayOptions) -> None:
        refuse_sharded("policy", options.policy)
        start_ray(options.ray_init_config)
        self.progress, self.verbose = options.progress, options.verbose
        self.requested_frames_per_batch = options.dialog_turns_per_batch or 1
        self.total_frames: Any = options.total
        self.sync_iter, self._timeout = options.sync_iter, options.timeout
        self.replay_buffer = options.replay_buffer
        self._policy = options.policy
        self._tracker = tracker_of(options.track_policy_version)
        self._begin(options.max_staleness)
        self.actors, layout = start_actors(options)
        self.closed = False
        self._layout = None if layout is None else Layout.from_json(layout)  # of their channels
        self._register(options.weight_updater)

    def _begin(self, max_staleness: int | None) -> None:
        """Make what each process has for itself."""
        extends = ray_buffer_client(self.replay_buffer) is None
        self._batches = RayBatches(self, self.replay_buffer if extends else None, max_staleness)
        self._updating = threading.RLock()  # updates reach all actors in one order
        self._sent: tuple[Any, Any] = (None, None)  # weights that an updater sent, their version

    closed = True  # until the actors have started
    _worker_idx = None  # torchrl's worker_idx raises without it, which Ray's errors of pickles read

    def __del__(self) -> None:
        """Nothing: an actor ends with its last handle."""

    def __getstate__(self) -> dict[str, Any]:
        """What makes a handle of the same actors in another process."""
        self.require_open()
        buffer = ray_buffer_client(self.replay_buffer)
        if buffer is None and self.replay_buffer is not None:
            raise TypeError(
                "replay_buffer: expected a RayReplayBuffer in a collector that is sent to another "
                "process, got one of this process; make the collector with a RayReplayBuffer"
            )
        own = ("_batches", "_updating", "_sent")
        state = {name: value for name, value in vars(self).items() if name not in own}
        updater = None if self._sends_from_here else self._updater
        state |= {"_policy": None, "_updater": updater, "replay_buffer": buffer}
        return state | {"max_staleness": self.max_staleness}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        most = state.pop("max_staleness")
        vars(self).update(state)
        self._begin(most)

    postproc = _in_actors("postproc", "The postprocessing, in the actors.")
    pre_collect_hook = _in_actors("pre_collect_hook", "Called before each batch, in the actors.")
    post_collect_hook = _in_actors("post_collect_hook", "Called with each batch, in the actors.")
    max_staleness = of_part("_batches", "max_staleness", "Versions that a batch may be behind.")
    stale_turns = of_part("_batches", "stale_turns", "Turns that ``max_staleness`` dropped.")
    total_dialog_turns = property(
        attrgetter("total_frames"), doc="Number of turns to run in all; infinite if they never end."
    )
    dialog_turns_per_batch = property(
        attrgetter("requested_frames_per_batch"), doc="Number of turns in a batch, not rounded up."
    )
    _frames = of_part("_batches", "frames", "torchrl's name of the turns that were collected.")

    @property
    def _iter(self) -> int:
        return self._batches.batches - 1

    def is_initialized(self) -> bool:
        """Whether the collector is ready: made, and not shut down."""
        return not self.closed

    # Calls of actors.

    def require_open(self) -> None:
        """Raise ``RuntimeError`` after a shutdown of the collector or of Ray."""
        import ray

        if self.closed or not ray.is_initialized():  # almost every call of Ray's would start it
            raise RuntimeError(
                "collector: expected one that runs, got one after shutdown() or ray.shutdown(); "
                "make another"
            )

    def _all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every actor at once, also while it collects."""
        import ray

        sent = [getattr(actor, method).remote(*args) for actor in self.actors]
        return ray.get(sent, timeout=self._timeout)

    def _one(self, index: int, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function(collector, *args)`` in an actor between two batches, for a reference."""
        self.require_open()
        call = self.actors[index].__ray_call__.options(concurrency_group=BETWEEN)
        return call.remote(function, *args)

    def _first(self, function: Callable[..., Any], *args: Any) -> Any:
        import ray

        return ray.get(self._one(0, function, *args))

    def _each(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        import ray

        return ray.get([self._one(index, function, *args) for index in range(len(self.actors))])

    @property
    def _collector(self) -> Any:
        """torchrl's name of its one actor."""
        self.require_open()
        return self.actors[0]

    # Batches.

    def __iter__(self) -> Iterator[Any]:
        """Batches until all actors have run their turns; ``None`` each where a buffer gets them.

        An exception of an actor shuts the collector down.
        """
        return self.iterator()

    def iterator(self) -> Iterator[Any]:
        """As ``iter``."""
        return self._batches.rest(lambda: progress_bar(self))

    def next(self) -> TensorDictBase | None:
        """The next batch; ``None`` at the end, and if a replay buffer gets it.

        An exception of an actor shuts the collector down.
        """
        this: Any = weakref.proxy(self)  # the iterator stays, and would keep the collector alive
        return self._batches.next(lambda: self._batches.rest(lambda: progress_bar(this)))

    def start(self) -> None:
        """Collect into the replay buffer in the background, in all actors at once.

        Raises:
            RuntimeError: there is no replay buffer.
        """
        self.require_open()
        self._batches.background.start(self.iterator, self.replay_buffer)

    def is_running(self) -> bool:
        """Whether it collects in the background."""
        return self._batches.background.is_running()

    def rollout(self) -> TensorDictBase:
        """A batch of the first actor that does not count, before any postprocessing."""
        return deserialize(self._first(_rollout))

    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Start new dialogs in every actor, between two batches.

        Raises:
            NotImplementedError: an ``index``.
        """
        self._batches.forget()
        self._each(methodcaller("reset", index, **kwargs))

    # Weights and versions.

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
            ValueError: the weights do not fit, or several ranks have parts of them, and nothing has
                changed; or only some workers are named.
            ray.exceptions.RayActorError: an actor is dead.
            TimeoutError: an actor does not answer.
        """
        models = {model_id or "policy", *(weights_dict or {})}
        named = (policy_or_weights, weights, policy, policy_weights, *(weights_dict or {}).values())
        forms = [form for form in named if form is not None]
        if models != {"policy"} or len(forms) > 1:
            raise ValueError(
                f"policy_or_weights: expected weights of the policy in one argument, got "
                f"{len(forms)} for {sorted(models)}; pass one, and no other model_id than 'policy'"
            )
        weights = forms.pop() if forms else None
        self.require_open()
        refuse_sharded("policy_or_weights", self._policy if weights is None else weights)
        with self._updating:
            if self._sends_from_here:
                self._updater(weights, worker_ids)
            elif self._updater is not None:
                stored = _stored(unwrap(weights))
                self._each(DialogActor.update_as, self._next_version(), stored, worker_ids)
            else:
                stored = _stored(self._named(weights, worker_ids))
                self._all("publish", stored, self._next_version())

    def _named(self, weights: Any, worker_ids: Any) -> TensorDict:
        """The weights that all actors shall publish, by their names in the channels."""
        everyone = set(range(len(self.actors)))
        chosen = worker_ids if isinstance(worker_ids, list | tuple | set) else [worker_ids]
        if self._layout is None:
            raise TypeError(
                "policy: expected a module, or what has one as its model, got another, whose "
                "weights are not known; pass a weight_updater= that knows them"
            )
        if worker_ids is not None and set(chosen) != everyone:
            raise ValueError(
                f"worker_ids: expected None or all of {sorted(everyone)}, got {worker_ids!r}; a "
                "version is the same everywhere: pass a RayRemoteWeightUpdater to update some"
            )
        weights = self._policy if weights is None else weights
        if weights is None:
            raise ValueError(
                "policy_or_weights: expected weights, got none, and no policy= that they could be "
                "of; pass the trained module, its tensordict or its state dict"
            )
        named: Any = self._layout.named(weights_in(weights))
        return TensorDict(named)

    def _next_version(self) -> Any:
        """A version that no actor has had; ``None`` if versions are not tracked."""
        tracker = self.policy_version_tracker
        if tracker is None:
            return None
        tracker.increment_version()
        return tracker.version

    def receive_weights(self, *args: Any, **kwargs: Any) -> None:
        """As :meth:`update_policy_weights_`."""
        self.update_policy_weights_(*args, **kwargs)

    def increment_version(self) -> None:
        """Count a version in every actor, without other weights."""
        self.require_open()
        with self._updating:
            self._all("renumber", self._next_version())

    @property
    def policy_version(self) -> Any:
        """The version of the next policy calls; ``None`` if versions are not tracked."""
        tracker = self.policy_version_tracker
        return None if tracker is None else tracker.version

    @property
    def policy_version_tracker(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The tracker, at the newest version of all actors; ``None`` if there is none."""
        if self._tracker is not None and not self.closed:
            self.require_open()
            versions = self._all("get_policy_version")
            newest = versions[0] if isinstance(versions[0], str) else max(versions)
            if newest != self._tracker.version:
                self._tracker.version = newest
        return self._tracker

    @property
    def _sends_from_here(self) -> bool:
        return isinstance(self._updater, RemoteWeightUpdaterBase)

    @property
    def weight_updater(self) -> Any:
        """The weight updater that was set, or the function that makes it in the actors."""
        return self._updater

    @weight_updater.setter
    def weight_updater(self, updater: Any) -> None:
        sends = isinstance(updater, RemoteWeightUpdaterBase)
        in_actors = self._updater is not None and not self._sends_from_here
        if not sends and (updater is not None or in_actors):
            self._layout = None
            self._each(DialogActor.set_updater, updater)
        self._register(updater)

    def _register(self, updater: Any) -> None:
        """Keep an updater that sends to the actors, or of which the actors have copies."""
        self._updater = updater
        if self._sends_from_here:
            updater.register_collector(self)

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """Call ``init`` of the weight updater, where it runs."""
        if self._sends_from_here:
            self._updater.init(*args, **kwargs)
        else:
            self._each(methodcaller("init_updater", *args, **kwargs))

    @property
    def remote_collectors(self) -> list[Any]:
        """The actors, as :class:`fusedrl.RayRemoteWeightUpdater` takes them.

        Weights that are sent to several of them have one version.
        """
        this: Any = weakref.proxy(self)
        sends = [partial(RayLLMCollector._send, this, actor) for actor in self.actors]
        return [SimpleNamespace(update_policy_weights_=SimpleNamespace(remote=s)) for s in sends]

    def _send(self, actor: Any, stored: Any) -> Any:
        with self._updating:
            weights, version = self._sent
            if weights != stored:
                version = self._next_version()
                self._sent = stored, version
            return actor.publish.remote(stored, version)

    # What the actors' collectors answer.

    def set_postproc(self, postproc: Callable[[TensorDictBase], TensorDictBase]) -> None:
        """Set the postprocessing of a collector that has none; it runs in the actors.

        Raises:
            RuntimeError: it has one.
        """
        self._each(methodcaller("set_postproc", postproc))

    def get_policy_model(self) -> Any:
        """A copy of the model that the first actor's policy wraps."""
        return self._first(methodcaller("get_policy_model"))

    def get_model(self, model_id: str) -> Any:
        """A copy of a model of the first actor's collector."""
        return self._first(methodcaller("get_model", model_id))

    def getattr_policy(self, attr: str) -> Any:
        """A copy of an attribute of the first actor's policy."""
        return self._first(methodcaller("getattr_policy", attr))

    def getattr_env(self, attr: str) -> Any:
        """A copy of an attribute of the first actor's environment."""
        return self._first(methodcaller("getattr_env", attr))

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environments one after the other; returns the seed that would follow."""
        import ray

        for index in range(len(self.actors)):
            seed = ray.get(self._one(index, methodcaller("set_seed", seed, static_seed)))
        return seed

    def profile(self) -> Profile:
        """Where the time of all actors went: policy, env, stamping, queueing."""
        parts = [astuple(profile) for profile in self._each(methodcaller("profile"))]
        return Profile(*map(sum, zip(*parts, strict=True)))

    def _install_profile_hooks(self, config: ProfileConfig) -> None:
        self._each(DialogActor.install_profile, config)

    def _uninstall_profile_hooks(self, config: ProfileConfig) -> None:
        self._each(methodcaller("_uninstall_profile_hooks", config))

    def state_dict(self) -> OrderedDict[str, Any]:
        """The state of each actor's collector, between two batches, the counts and the version."""
        states = self._each(methodcaller("state_dict"))
        state: OrderedDict[str, Any] = OrderedDict(
            (f"worker{index}", state) for index, state in enumerate(states)
        )
        state.update(frames=sum(state["frames"] for state in states), iter=self._iter)
        if self._tracker is not None:
            state["policy_version"] = self.policy_version
        return state

    def load_state_dict(self, state_dict: Any, **kwargs: Any) -> None:
        """Restore the collectors, the counts and the version; dialogs start anew.

        If weights have been sent, the policies keep them and their version.

        Raises:
            KeyError, ValueError: the state has another number of actors, or does not fit one of
                them. Nothing has changed then.
        """
        import ray

        names = [f"worker{index}" for index in range(len(self.actors))]
        workers = [key for key in state_dict if str(key).startswith("worker")]
        if sorted(workers) != sorted(names):
            raise ValueError(
                f"state_dict: expected {names[0]} to {names[-1]}, got {workers}; load it into as "
                "many actors as it is of"
            )
        states, batches = [state_dict[name] for name in names], state_dict["iter"] + 1
        for method in ("check_state_dict", "load_state_dict"):
            calls = [methodcaller(method, state, **kwargs) for state in states]
            ray.get([self._one(index, call) for index, call in enumerate(calls)])
        self._batches.forget()
        self._batches.count_on([state["frames"] for state in states], batches)

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """End the actors, after their current turns. It may be called again.

        Args:
            timeout: seconds that actors may take, 10 if ``None``; then they are killed.
            close_env: whether environments are closed.
            raise_on_error: whether to raise errors of the background or of closing.

        Raises:
            Exception: what an actor could not close. All are ended all the same.
        """
        import ray
        from ray.exceptions import RayActorError

        self.closed, self._batches.iterator = True, None
        background, errors = self._batches.background, []
        background.stop()
        actors = self.actors if ray.is_initialized() else []
        try:
            ends = [actor.shutdown.remote(None, close_env) for actor in actors]
            seconds = SECONDS_TO_END if timeout is None else timeout
            ray.wait(ends, num_returns=len(ends), timeout=seconds) if ends else None
            for end in ends:
                try:
                    ray.get(end, timeout=0)
                except RayActorError as error:  # there is nothing to close
                    logger.warning("%s", error)
                except Exception as error:
                    errors.append(error)
        finally:
            for actor in actors:
                ray.kill(actor)
            self.actors = []
        background.join()
        self._batches.forget()
        if raise_on_error:
            background.check()
            for error in errors:
                raise error

    async_shutdown: Any = BaseCollector.async_shutdown  # calls shutdown()

    def __enter__(self) -> Any:
        """The collector."""
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Shut it down; an exception of the block is not hidden."""
        self.shutdown(raise_on_error=kind is None)

    def __repr__(self) -> str:
        """How many actors there are."""
        return f"{type(self).__name__}({len(self.actors)} actors)"


def _stored(weights: Any) -> Any:
    """A reference to weights in Ray's store."""
    import ray

    return ray.put(StoredWeights(weights) if isinstance(weights, TensorDictBase) else weights)


def _rollout(collector: Any) -> Any:
    return serialize(collector.rollout().clear_device_())
