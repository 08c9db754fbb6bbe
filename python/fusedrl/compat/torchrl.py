"""What we need of torchrl's private names.

Nothing of torchrl is imported before a word needs it: most are about an object that the caller has.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def serve_by_ray(transform_class: Any, service: Any) -> None:
    """What ``service_backend="ray"`` makes of a class: torchrl looks for this name on it."""
    transform_class._RayServiceClass = service


def stands_alone(transform: Any) -> bool:
    """Whether a transform is in no environment, replay buffer or Compose."""
    return vars(transform)["_container"] is None


def step(transform: Any, tensordict: Any, next_tensordict: Any) -> Any:
    """What a transform makes of a step of its environment."""
    return transform._step(tensordict, next_tensordict)


# A collector in a worker process.


def process_context() -> Any:
    """The context of multiprocessing in which torchrl starts processes."""
    from torchrl._utils import _get_mp_ctx

    return _get_mp_ctx()


def trajectory_format(value: Any, trajs_per_batch: int | None, has_buffer: bool) -> Any:
    """The form in which trajectories are yielded, after torchrl's own check of the argument."""
    from torchrl.collectors.utils import _validate_traj_format

    return _validate_traj_format(value, trajs_per_batch, has_replay_buffer=has_buffer)


def receives_by_schemes(collector: Any) -> bool:
    """Whether schemes of torchrl's bring weights to a collector."""
    return getattr(collector, "_receiver_schemes", None) is not None


def policy_with_state(collector: Any) -> Any:
    """What a collector loads the state of its policy into; ``None`` if the policy has none."""
    return getattr(collector, "_policy_w_state_dict", None)


def frames_of(collector: Any) -> Any:
    """How many frames a collector has collected; ``None`` if it does not count them."""
    return getattr(collector, "_frames", None)


def set_frames(collector: Any, frames: int) -> None:
    """Let a collector that counts its frames go on from a number of them."""
    if frames_of(collector) is not None:
        collector._frames = frames


def computing_device(transform: Any) -> Any:
    """The device to which a transform moves what its model reads; ``None`` for where it is."""
    return getattr(transform, "_io_device", None)


# Methods that make or get the distribution of all logits: a subclass that has one of its own may
# read more than is computed from hidden states.
READERS_OF_LOGITS = ("_get_cur_log_prob", "_log_weight", "_get_entropy", "_kl_to_ref")
# The method of a wrapper that gives the distribution of a masking strategy.
DISTRIBUTIONS = {name: f"_get_{name}_dist" for name in ("sft", "rlhf", "generic")}

# Collectors of dialogs.


def trajectory_numbers() -> Any:
    """What numbers the trajectories of a collector, and gives no number twice."""
    from torchrl.collectors.utils import _TrajectoryPool

    return _TrajectoryPool()


# A collector of actors.


def for_buffer(batch: Any, buffer: Any) -> Any:
    """A batch with the device that a replay buffer takes, which may be none."""
    from torchrl.collectors.utils import _maybe_normalize_replay_buffer_tensordict_device

    return _maybe_normalize_replay_buffer_tensordict_device(batch, buffer)


def env_indices(pool: Any, carried: Any) -> list[int]:
    """The index of the environment of each row of what a pool takes or returns."""
    indices = carried.get(pool._env_idx_key).tolist()
    return [_first(index) for index in (indices if isinstance(indices, list) else [indices])]


def begin_resets(pool: Any) -> None:
    """Let all environments of a pool begin to reset; its own ``reset`` waits for their end."""
    from tensordict import NonTensorData, TensorDict, lazy_stack

    sizes = enumerate(pool.env_batch_sizes)
    indices = [TensorDict({pool._env_idx_key: NonTensorData(n, s)}, s) for n, s in sizes]
    pool.async_reset_send(lazy_stack(indices))


def _first(nested: Any) -> Any:
    while isinstance(nested, list):
        nested = nested[0]
    return nested


# What runs in the threads of a pool, by kind, each with the attribute that counts it.
_UNDER_WAY = (
    ("_step_and_maybe_reset_futures", "_current_step_reset"),
    ("_reset_futures", "_current_reset"),
)


def steps_under_way(pool: Any) -> list[Future[Any]]:
    """The steps and resets of a pool of threads that were not received yet."""
    return [future for futures, _ in _UNDER_WAY for future in getattr(pool, futures, ())]


def forget_steps(pool: Any) -> bool:
    """Forget the results and errors of a pool's steps, which have ended.

    torchrl's pool of threads keeps a step that has failed, and would raise its error for ever.

    Returns:
        Whether the environments can be reset; those of a pool of processes that failed cannot.
    """
    if not hasattr(pool, _UNDER_WAY[0][0]):
        return False
    for futures, count in _UNDER_WAY:
        setattr(pool, futures, [])
        setattr(pool, count, 0)
    pool._busy.clear()
    return True


def will_take_policy(part: Any) -> bool:
    """Whether a part of an environment is a RetrieveKL that takes its collector's policy later.

    It then computes with the policy's own weights.
    """
    from torchrl.envs.llm import RetrieveKL

    return isinstance(part, RetrieveKL) and not part._initialized


# Weight updaters and schemes.


def before_processes_start(collector: Any, prepare: Callable[[], dict[str, Any]]) -> None:
    """Give a multi-process collector that is being made weight-sync schemes for its processes."""
    start = getattr(collector, "_run_processes", None)
    if start is None or hasattr(collector, "procs"):
        return

    def prepare_and_start() -> None:
        del collector._run_processes  # back to the collector's own
        collector._weight_sync_schemes = prepare()
        start()

    collector._run_processes = prepare_and_start


def number_weights(context: Any, version: int | None) -> None:
    """Tell an inference server, which would count updates, what version it computes with."""
    if mark := getattr(context, "_mark_weight_update", None):
        mark(version)


# Turns of collectors.

# A collector calls the second as its policy, and makes it of the first where it is None.
UNCOMPILED_POLICY, COMPILED_POLICY = "_wrapped_policy_uncompiled", "_wrapped_policy_maybe_compiled"


def carried_by(collector: Any) -> Any:
    """The data of a collector's next step, if it has any."""
    return getattr(collector, "_carrier", None)


# vLLM's engines.

# The call of the engine, and what makes a tensordict of its answers to tokens and to texts.
VLLM_CALLS = ("_call_generate", "_generate_from_tokens", "_generate_from_text")


def engine_kind(wrapper: Any) -> str | None:
    """Where torchrl's wrapper has its vLLM engine; ``None`` for another part of a policy."""
    return getattr(wrapper, "_model_type", None)


def ray_buffer_client(buffer: Any) -> Any:
    """The client by which other processes extend a buffer that is an actor; otherwise ``None``."""
    from torchrl.data.replay_buffers import ray_buffer

    clients = ray_buffer._RayReplayBufferClient, ray_buffer._LazyDistributedReplayClient
    if isinstance(buffer, clients):
        return buffer
    return buffer.client() if isinstance(buffer, ray_buffer.RayReplayBuffer) else None
