"""torchrl's ``RayLLMCollector``: dialogs that are collected in an actor of a Ray cluster."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from tensordict import TensorDictBase
from torchrl.collectors import BaseCollector
from torchrl.collectors.llm.ray_collector import RayLLMCollector as _RayLLMCollector

from fusedrl.collectors.llm_collector import LLMCollector
from fusedrl.collectors.options import DialogOptions, check_total
from fusedrl.collectors.stream import SHUT_DOWN, Batches
from fusedrl.compat.torchrl import ray_buffer_client
from fusedrl.transport import Serialized, deserialize, serialize
from fusedrl.weights.ray_store import stored

SECONDS_TO_END = 10.0
BESIDE = "beside"  # the thread of the actor that does not wait for a batch
WEIGHTS = ("policy_or_weights", "weights", "policy", "policy_weights")  # arguments of an update


class DialogActor(LLMCollector):
    """A collector in a process of its own; all turns that a batch runs have one version."""

    def __init__(self, seed: int, **options: Any) -> None:
        # Weights are views of Ray's store, which nobody writes.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        super().__init__(**options)
        self._versions.patience = 1e9  # a batch may take hours
        torch.manual_seed(seed)  # all processes start with the same; a factory may have set one

    def _collect(self) -> TensorDictBase:
        """As for :class:`LLMCollector`; an update waits for the end of the batch."""
        with self._versions.call():
            return super()._collect()

    def collect(self) -> tuple[Serialized | None, ...]:
        """One batch, ``None`` if a replay buffer has it; no batch if all turns have run."""
        self._iterator = self._iterator or iter(self)
        for batch in self._iterator:
            return (None if batch is None else serialize(batch.copy().clear_device_()),)
        return ()

    def _maybe_fallback_update(
        self, policy_or_weights: Any = None, *, model_id: str | None = None
    ) -> None:
        # torchrl calls this without an updater and a scheme. Nobody trains the policy here.
        if policy_or_weights is None:
            raise ValueError(
                "policy_or_weights: expected weights, got none; pass the trained policy, its "
                "tensordict or its state dict"
            )
        super()._maybe_fallback_update(policy_or_weights, model_id=model_id)

    def increment_version(self) -> None:
        """Count a version; a batch that is being collected keeps its own."""
        with self._versions.update():
            pass


def _refusing(name: str) -> Any:
    """A method that needs environment, policy or updater, which are in the actor."""

    def refuse(self: RayLLMCollector, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{name}: expected a collector of this process, got one in an actor, remote_collectors"
            f"[0]; ask that by .{name}.remote() or .get_distant_attr.remote({name!r})"
        )

    return refuse


class RayLLMCollector(_RayLLMCollector):
    """Collects dialogs in an actor of a Ray cluster, which is an :class:`LLMCollector`.

    It takes the place of torchrl's class, and ``isinstance`` accepts it as one. Environment and
    policy live in the actor. An update puts the weights into Ray's object store, from which the
    actor copies them into its policy, and counts one version. It comes after the batch that was
    asked for before it, so that all turns which a batch runs have one version.

    Args:
        env: an environment, or a function that makes one in the actor.
        replay_buffer: a ``RayReplayBuffer``, which the actor extends; the iterator yields ``None``.
        ray_init_config: arguments of ``ray.init``, which is called unless Ray runs.
        remote_config: Ray's options for the actor: ``resources``, ``scheduling_strategy``, ...
        sync_iter: with ``True`` the actor collects while you wait for a batch. With ``False`` it
            collects the next batch while you use the last one.
        num_cpus: number of CPUs of the actor, unless ``remote_config`` names it.
        num_gpus: number of GPUs of the actor, unless ``remote_config`` names it.

    Further arguments are those of :class:`fusedrl.LLMCollector`, which are sent to the actor: its
    output has the progress, and its log says what ``max_staleness`` drops.

    Raises:
        TypeError, ValueError: as for :class:`LLMCollector`, or a buffer of this process.
        ImportError: Ray is not installed.
        ray.exceptions.RayActorError: later, with its reason: the actor could not make its
            collector, or is dead. What the collector raises is raised here, with its traceback.

    Example:
        >>> from fusedrl import RayLLMCollector
        >>> def collect(make_env, make_policy, trained):
        ...     sizes = {"dialog_turns_per_batch": 64, "num_gpus": 1}
        ...     collector = RayLLMCollector(make_env, policy_factory=make_policy, **sizes)
        ...     for batch in collector:
        ...         yield batch
        ...         collector.update_policy_weights_(trained)
        ...     collector.shutdown()
    """

    closed = True  # until the actor is asked for
    total_dialog_turns: Any = None
    dialog_turns_per_batch: Any = None

    def __init__(
        self,
        env: Any,
        *,
        replay_buffer: Any = None,
        ray_init_config: dict[str, Any] | None = None,
        remote_config: dict[str, Any] | None = None,
        sync_iter: bool = True,
        num_cpus: float | None = None,
        num_gpus: float | None = None,
        **arguments: Any,
    ) -> None:
        options = DialogOptions(env, replay_buffer=_client_of(replay_buffer), **arguments)
        _start_ray(ray_init_config)
        self.sync_iter, self.replay_buffer = sync_iter, options.replay_buffer
        # What torchrl's __len__ computes with; list() asks for a length.
        self.total_frames: Any = check_total("total_dialog_turns", options.total_dialog_turns)
        self.requested_frames_per_batch = options.dialog_turns_per_batch or 1
        self.total_dialog_turns = self.total_frames
        self.dialog_turns_per_batch = self.requested_frames_per_batch
        self._pending: Any = None  # the reference to a batch that was not handed out yet
        seed = int(torch.randint(2**62, ()))
        of_ray: dict[str, Any] = {} if remote_config is None else dict(remote_config)
        # One thread takes batches and updates in the order in which they are asked for.
        of_ray["max_concurrency"] = 1
        of_ray["concurrency_groups"] = {**of_ray.get("concurrency_groups", {}), BESIDE: 1}
        for name, given in (("num_cpus", num_cpus), ("num_gpus", num_gpus)):
            if given is not None:
                of_ray.setdefault(name, given)
        actor = DialogActor.as_remote(of_ray)
        # As RayRemoteWeightUpdater takes them.
        self.remote_collectors = [actor.remote(seed, **vars(options))]
        self.closed = False

    @property
    def _collector(self) -> Any:  # what torchrl's class asks
        if self.closed:
            raise RuntimeError(SHUT_DOWN)
        return self.remote_collectors[0]

    state_dict, load_state_dict, reset, set_seed, getattr_policy, getattr_env = map(
        _refusing,
        ("state_dict", "load_state_dict", "reset", "set_seed", "getattr_policy", "getattr_env"),
    )
    weight_updater: Any = _RayLLMCollector.weight_updater.getter(_refusing("weight_updater"))

    def __del__(self) -> None:
        """Nothing: an actor ends with its last handle, which another process may have."""

    def _take(self, ahead: bool) -> tuple[TensorDictBase | None, ...]:
        """One batch, or none at the end; ``ahead`` lets the actor collect another one."""
        import ray

        if self._pending is None:
            self._pending = self._collector.collect.remote()
        try:
            taken = ray.get(self._pending)
        except Exception:  # after Ctrl-C the batch is still to come
            self._pending = None
            raise
        self._pending = self._collector.collect.remote() if ahead and taken else None
        return tuple(None if batch is None else deserialize(batch) for batch in taken)

    def __iter__(self) -> Iterator[Any]:
        """Batches, as :meth:`iterator` yields them; Ctrl-C does not end them."""
        return Batches(self.iterator)

    def iterator(self) -> Iterator[Any]:
        """Batches until all turns have run; ``None`` each where a buffer gets them."""
        while taken := self._take(ahead=not self.sync_iter):
            yield taken[0]

    def next(self) -> Any:
        """The next batch; ``None`` at the end, and if a replay buffer gets it."""
        return next(iter(self._take(ahead=False)), None)

    def _beside(self, method: Any, **arguments: Any) -> Any:
        """Call a method of the actor that does not wait for a batch; a reference to the result."""
        return method.options(concurrency_group=BESIDE).remote(**arguments)

    def is_running(self) -> bool:
        """Whether the actor fills its buffer after :meth:`start`."""
        import ray

        return ray.get(self._beside(self._collector.is_running))

    @property
    def policy_version(self) -> int | None:
        """The version of the actor's next turn; ``None`` if versions are not tracked."""
        import ray

        return ray.get(self._beside(self._collector.get_policy_version))

    def update_policy_weights_(self, policy_or_weights: Any = None, **options: Any) -> None:
        """Update the policy's weights between two batches, and count one version.

        Args:
            policy_or_weights: a tensordict, a module or a state dict. Only a weight updater does
                without.
            options: further arguments of :meth:`LLMCollector.update_policy_weights_`.

        Raises:
            ValueError: there are no weights, several ranks have parts of them, or they do not fit.
                Nothing has changed then.
            ray.exceptions.RayActorError: the actor is dead.
        """
        import ray

        options["policy_or_weights"] = policy_or_weights
        sent = {name: stored(options[name]) for name in WEIGHTS if options.get(name) is not None}
        ray.get(self._collector.update_policy_weights_.remote(**(options | sent)))

    def shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """End the actor after its current turn, or kill it after ``timeout=10`` seconds."""
        import ray
        from ray.exceptions import RayActorError

        if self.closed or not ray.is_initialized():
            return
        actor, self._pending, self.closed = self._collector, None, True
        try:
            end = self._beside(actor.shutdown, close_env=close_env)
            ended, _ = ray.wait([end], timeout=SECONDS_TO_END if timeout is None else timeout)
            for answer in ended:
                ray.get(answer)
        except RayActorError:
            pass  # it has ended already
        finally:
            ray.kill(actor)

    async_shutdown: Any = BaseCollector.async_shutdown  # calls shutdown()


def _client_of(buffer: Any) -> Any:
    """What the actor extends in the place of a buffer, if there is one."""
    client = ray_buffer_client(buffer)
    if buffer is not None and client is None:
        raise TypeError(
            f"replay_buffer: expected a RayReplayBuffer, got a {type(buffer).__name__}, of which "
            "the actor would fill a copy; make a RayReplayBuffer, or extend this one with the "
            "batches that you iterate over"
        )
    return client


def _start_ray(config: dict[str, Any] | None) -> None:
    import ray

    if not ray.is_initialized():
        from torchrl.collectors.distributed.ray import DEFAULT_RAY_INIT_CONFIG

        ray.init(**(DEFAULT_RAY_INIT_CONFIG if config is None else config))
