"""The private names of torchrl that fusedrl uses.

Nothing of torchrl is imported before a function needs it: most work on an object of the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def serve_by_ray(transform_class: Any, service: Any) -> None:
    """Set what ``service_backend="ray"`` makes of a class: torchrl looks up this attribute."""
    transform_class._RayServiceClass = service


def stands_alone(transform: Any) -> bool:
    """Whether a transform belongs to no environment, replay buffer or Compose."""
    return vars(transform)["_container"] is None


def step(transform: Any, tensordict: Any, next_tensordict: Any) -> Any:
    """A transform's result for a step of its environment."""
    return transform._step(tensordict, next_tensordict)


# A collector in a worker process.


def process_context() -> Any:
    """The multiprocessing context in which torchrl starts processes."""
    from torchrl._utils import _get_mp_ctx

    return _get_mp_ctx()


def trajectory_format(value: Any, trajs_per_batch: int | None, has_buffer: bool) -> Any:
    """The format of yielded trajectories, after torchrl's check of the argument."""
    from torchrl.collectors.utils import _validate_traj_format

    return _validate_traj_format(value, trajs_per_batch, has_replay_buffer=has_buffer)


def receives_by_schemes(collector: Any) -> bool:
    """Whether a collector receives its weights through schemes of torchrl."""
    return getattr(collector, "_receiver_schemes", None) is not None


def policy_with_state(collector: Any) -> Any:
    """The module into which a collector loads its policy's state, or ``None``."""
    return getattr(collector, "_policy_w_state_dict", None)


def frames_of(collector: Any) -> Any:
    """The number of frames that a collector has collected; ``None`` if it does not count them."""
    return getattr(collector, "_frames", None)


def set_frames(collector: Any, frames: int) -> None:
    """Set the number of frames of a collector, if it counts them."""
    if frames_of(collector) is not None:
        collector._frames = frames


def computing_device(transform: Any) -> Any:
    """The device to which a transform moves its model's inputs; ``None``: to none."""
    return getattr(transform, "_io_device", None)


# Methods that compute with the distribution of all logits: a subclass that overrides one may read
# more than is computed from hidden states.
READERS_OF_LOGITS = ("_get_cur_log_prob", "_log_weight", "_get_entropy", "_kl_to_ref")
# The method of a wrapper that gives the distribution of a masking strategy.
DISTRIBUTIONS = {name: f"_get_{name}_dist" for name in ("sft", "rlhf", "generic")}

# Collectors of dialogs.


def trajectory_numbers() -> Any:
    """A counter that gives each trajectory of a collector a unique number."""
    from torchrl.collectors.utils import _TrajectoryPool

    return _TrajectoryPool()


# A collector of actors.


def for_buffer(batch: Any, buffer: Any) -> Any:
    """A batch on the device that a replay buffer expects, which may be none."""
    from torchrl.collectors.utils import _maybe_normalize_replay_buffer_tensordict_device

    return _maybe_normalize_replay_buffer_tensordict_device(batch, buffer)


def env_indices(pool: Any, carried: Any) -> list[int]:
    """The environment's index for each row that a pool accepts or returns."""
    indices = carried.get(pool._env_idx_key).tolist()
    return [_first(index) for index in (indices if isinstance(indices, list) else [indices])]


def begin_resets(pool: Any) -> None:
    """Start the resets of all environments of a pool; its ``reset`` waits for their end."""
    from tensordict import NonTensorData, TensorDict, lazy_stack

    sizes = enumerate(pool.env_batch_sizes)
    indices = [TensorDict({pool._env_idx_key: NonTensorData(n, s)}, s) for n, s in sizes]
    pool.async_reset_send(lazy_stack(indices))


def _first(nested: Any) -> Any:
    while isinstance(nested, list):
        nested = nested[0]
    return nested


# The attributes with futures of a pool of threads, each with the attribute that counts them.
_PENDING = (
    ("_step_and_maybe_reset_futures", "_current_step_reset"),
    ("_reset_futures", "_current_reset"),
)


def steps_under_way(pool: Any) -> list[Future[Any]]:
    """The steps and resets of a pool of threads whose results were not received yet."""
    return [future for futures, _ in _PENDING for future in getattr(pool, futures, ())]


def forget_steps(pool: Any) -> bool:
    """Forget the results and errors of a pool's steps, all of which have ended.

    torchrl's pool of threads keeps a failed step, and would raise its error at every call.

    Returns:
        Whether the environments can be reset, unlike those of a pool of processes that failed.
    """
    if not hasattr(pool, _PENDING[0][0]):
        return False
    for futures, count in _PENDING:
        setattr(pool, futures, [])
        setattr(pool, count, 0)
    pool._busy.clear()
    return True


def will_take_policy(part: Any) -> bool:
    """Whether a part of an environment is a RetrieveKL that will get its collector's policy.

    It then computes with the weights of the policy itself.
    """
    from torchrl.envs.llm import RetrieveKL

    return isinstance(part, RetrieveKL) and not part._initialized


# Weight updaters and schemes.


def before_processes_start(collector: Any, prepare: Callable[[], dict[str, Any]]) -> None:
    """Give a multi-process collector, while it is made, weight-sync schemes for its processes."""
    start = getattr(collector, "_run_processes", None)
    if start is None or hasattr(collector, "procs"):
        return

    def prepare_and_start() -> None:
        del collector._run_processes  # restores the method
        collector._weight_sync_schemes = prepare()
        start()

    collector._run_processes = prepare_and_start


def number_weights(context: Any, version: int | None) -> None:
    """Set the version of an inference server, which would count updates otherwise."""
    if mark := getattr(context, "_mark_weight_update", None):
        mark(version)


# Turns of collectors.

# A collector calls the second as its policy, and makes it from the first if it is None.
UNCOMPILED_POLICY, COMPILED_POLICY = "_wrapped_policy_uncompiled", "_wrapped_policy_maybe_compiled"


def carried_by(collector: Any) -> Any:
    """The data of a collector's next step, or ``None``."""
    return getattr(collector, "_carrier", None)


# vLLM's engines.

# The call of the engine, and the methods that make a tensordict of its tokens or its texts.
VLLM_CALLS = ("_call_generate", "_generate_from_tokens", "_generate_from_text")


def engine_kind(wrapper: Any) -> str | None:
    """Where the vLLM engine of torchrl's wrapper runs; ``None`` for another part of a policy."""
    return getattr(wrapper, "_model_type", None)


def ray_buffer_client(buffer: Any) -> Any:
    """The client with which other processes extend an actor's buffer, or ``None``."""
    from torchrl.data.replay_buffers import ray_buffer

    clients = ray_buffer._RayReplayBufferClient, ray_buffer._LazyDistributedReplayClient
    if isinstance(buffer, clients):
        return buffer
    return buffer.client() if isinstance(buffer, ray_buffer.RayReplayBuffer) else None
