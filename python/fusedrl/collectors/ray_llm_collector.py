"""Drop-in replacement for torchrl's ``RayLLMCollector``: collects dialogs in a Ray actor."""

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
CONTROL = "control"  # concurrency group of calls that must not wait for a batch
WEIGHTS = ("policy_or_weights", "weights", "policy", "policy_weights")  # arguments of an update


class DialogActor(LLMCollector):
    """The collector in the actor; all turns of a batch have one version."""

    def __init__(self, seed: int, **options: Any) -> None:
        # Weights are read-only views of Ray's object store.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        super().__init__(**options)
        self._versions.patience = 1e9  # a batch may take hours
        torch.manual_seed(seed)  # processes start with equal seeds; a factory may have set one

    def _collect(self) -> TensorDictBase:
        """As for :class:`LLMCollector`; weight updates wait for the end of the batch."""
        with self._versions.call():
            return super()._collect()

    def collect(self) -> tuple[Serialized | None, ...]:
        """A tuple with the next batch (``None`` if a buffer got it), or ``()`` at the end."""
        self._iterator = self._iterator or iter(self)
        for batch in self._iterator:
            return (None if batch is None else serialize(batch.copy().clear_device_()),)
        return ()

    def _maybe_fallback_update(
        self, policy_or_weights: Any = None, *, model_id: str | None = None
    ) -> None:
        # torchrl calls this without an updater or scheme; the actor does not train the policy.
        if policy_or_weights is None:
            raise ValueError(
                "policy_or_weights: expected weights, got none; pass the trained policy, its "
                "tensordict or its state dict"
            )
        super()._maybe_fallback_update(policy_or_weights, model_id=model_id)

    def increment_version(self) -> None:
        """Increment the version; the batch in progress keeps its version."""
        with self._versions.update():
            pass


def _unavailable(name: str) -> Any:
    """A method that raises, as environment, policy and updater are in the actor."""

    def refuse(self: RayLLMCollector, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{name}: expected a collector in this process, got one in an actor; call {name}"
            f".remote() or get_distant_attr.remote({name!r}) of remote_collectors[0]"
        )

    return refuse


class RayLLMCollector(_RayLLMCollector):
    """Collects dialogs with an :class:`LLMCollector` in a Ray actor.

    A subclass of torchrl's class that accepts the same arguments. Environment and policy live in
    the actor. A weight update puts the weights into Ray's object store, from which the actor copies
    them, and counts one version. It runs after the batches that were requested before it, so that
    all turns run for a batch have one version.

    Args:
        env: an environment, or a function that makes one in the actor.
        replay_buffer: a ``RayReplayBuffer`` that the actor extends; the iterator yields ``None``.
        ray_init_config: arguments of ``ray.init``, which is called unless Ray is initialized.
        remote_config: Ray's options for the actor: ``resources``, ``scheduling_strategy``, ...
        sync_iter: ``True`` collects a batch when you ask for it; ``False`` collects the next batch
            while you use the last one.
        num_cpus: number of CPUs of the actor, unless in ``remote_config``.
        num_gpus: number of GPUs of the actor, unless in ``remote_config``.

    Further arguments are those of :class:`fusedrl.LLMCollector` and are sent to the actor; its
    output has the log lines of ``verbose`` and ``max_staleness``.

    Raises:
        TypeError, ValueError: as for :class:`LLMCollector`, or a buffer in this process.
        ImportError: Ray is not installed.
        ray.exceptions.RayActorError: on the first call that reaches the actor: it could not make
            its collector, or is dead. Exceptions of the collector are raised with its traceback.

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

    closed = True  # until the actor is requested
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
        # Read by torchrl's __len__, which list() calls.
        self.total_frames: Any = check_total("total_dialog_turns", options.total_dialog_turns)
        self.requested_frames_per_batch = options.dialog_turns_per_batch or 1
        self.total_dialog_turns = self.total_frames
        self.dialog_turns_per_batch = self.requested_frames_per_batch
        self._pending: Any = None  # reference to the next batch
        seed = int(torch.randint(2**62, ()))
        of_ray: dict[str, Any] = {} if remote_config is None else dict(remote_config)
        # One thread runs collect() and updates in the order of the calls.
        of_ray["max_concurrency"] = 1
        of_ray["concurrency_groups"] = {**of_ray.get("concurrency_groups", {}), CONTROL: 1}
        for name, given in (("num_cpus", num_cpus), ("num_gpus", num_gpus)):
            if given is not None:
                of_ray.setdefault(name, given)
        actor = DialogActor.as_remote(of_ray)
        # The name that RayRemoteWeightUpdater reads.
        self.remote_collectors = [actor.remote(seed, **vars(options))]
        self.closed = False

    @property
    def _collector(self) -> Any:  # read by torchrl's class
        if self.closed:
            raise RuntimeError(SHUT_DOWN)
        return self.remote_collectors[0]

    state_dict, load_state_dict, reset, set_seed, getattr_policy, getattr_env = map(
        _unavailable,
        ("state_dict", "load_state_dict", "reset", "set_seed", "getattr_policy", "getattr_env"),
    )
    weight_updater: Any = _RayLLMCollector.weight_updater.getter(_unavailable("weight_updater"))

    def __del__(self) -> None:
        """Do nothing: Ray ends the actor with its last handle, maybe in another process."""

    def _next_batch(self, ahead: bool) -> tuple[TensorDictBase | None, ...]:
        """The next batch, or ``()`` at the end; ``ahead`` requests the following one."""
        import ray

        if self._pending is None:
            self._pending = self._collector.collect.remote()
        try:
            taken = ray.get(self._pending)
        except Exception:  # not after Ctrl-C: the batch will still arrive
            self._pending = None
            raise
        self._pending = self._collector.collect.remote() if ahead and taken else None
        return tuple(None if batch is None else deserialize(batch) for batch in taken)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over batches; Ctrl-C does not end the iteration."""
        return Batches(self.iterator)

    def iterator(self) -> Iterator[Any]:
        """Yield batches until ``total_dialog_turns``, or ``None`` for each one sent to a buffer."""
        while taken := self._next_batch(ahead=not self.sync_iter):
            yield taken[0]

    def next(self) -> Any:
        """The next batch; ``None`` at the end, or if a replay buffer gets it."""
        return next(iter(self._next_batch(ahead=False)), None)

    def _call_control(self, method: Any, **arguments: Any) -> Any:
        """Call a method of the actor without waiting for a batch; returns an object reference."""
        return method.options(concurrency_group=CONTROL).remote(**arguments)

    def is_running(self) -> bool:
        """Whether :meth:`start` was called and the actor still fills the buffer."""
        import ray

        return ray.get(self._call_control(self._collector.is_running))

    @property
    def policy_version(self) -> int | None:
        """The version of the actor's next turn; ``None`` if versions are not tracked."""
        import ray

        return ray.get(self._call_control(self._collector.get_policy_version))

    def update_policy_weights_(self, policy_or_weights: Any = None, **options: Any) -> None:
        """Update the policy's weights between two batches, and count one version.

        Args:
            policy_or_weights: tensordict, module or state dict; optional with a weight updater.
            options: further arguments of :meth:`LLMCollector.update_policy_weights_`.

        Raises:
            ValueError: the weights are missing, sharded over ranks, or do not match; no weight is
                changed.
            ray.exceptions.RayActorError: the actor is dead.
        """
        import ray

        options["policy_or_weights"] = policy_or_weights
        sent = {name: stored(options[name]) for name in WEIGHTS if options.get(name) is not None}
        ray.get(self._collector.update_policy_weights_.remote(**(options | sent)))

    def shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """End the actor after its current turn; kill it after ``timeout`` seconds (default 10)."""
        import ray
        from ray.exceptions import RayActorError

        if self.closed or not ray.is_initialized():
            return
        actor, self._pending, self.closed = self._collector, None, True
        try:
            end = self._call_control(actor.shutdown, close_env=close_env)
            ended, _ = ray.wait([end], timeout=SECONDS_TO_END if timeout is None else timeout)
            for answer in ended:
                ray.get(answer)
        except RayActorError:
            pass  # already dead
        finally:
            ray.kill(actor)

    async_shutdown: Any = BaseCollector.async_shutdown  # calls shutdown()


def _client_of(buffer: Any) -> Any:
    """The client of a ``RayReplayBuffer`` that the actor extends."""
    client = ray_buffer_client(buffer)
    if buffer is not None and client is None:
        raise TypeError(
            f"replay_buffer: expected a RayReplayBuffer, got a {type(buffer).__name__}, which the "
            "actor would copy; make a RayReplayBuffer, or extend this buffer with the batches in "
            "your loop"
        )
    return client


def _start_ray(config: dict[str, Any] | None) -> None:
    import ray

    if not ray.is_initialized():
        from torchrl.collectors.distributed.ray import DEFAULT_RAY_INIT_CONFIG

        ray.init(**(DEFAULT_RAY_INIT_CONFIG if config is None else config))
