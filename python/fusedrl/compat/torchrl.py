"""What we need of torchrl's private names.

Nothing of torchrl is imported before a word needs it: most are about an object that the caller has.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

from fusedrl.compat.library import Library

TORCHRL = Library("torchrl", tried="0.14.1")

TORCHRL.names(
    "torchrl.envs.transforms:Transform",
    ("_call", "_step", "_reset"),
    "torchrl calls these of our transforms",
)
TORCHRL.names(
    "torchrl.envs.llm:RetrieveKL",
    ("_initialized", "_init_deferred"),
    "ours says so at once, since torchrl's would look for a collector when specs are read",
)
# What a transform in a Ray actor does beside its environment.
DONE_LOCALLY = TORCHRL.names(
    "torchrl.envs.transforms:Transform",
    ("_inv_call", "_apply_transform", "_inv_apply_transform", "_reset_env_preprocess"),
    "torchrl would send each call of these to the actor, which has nothing to do for it",
)
TORCHRL.names(
    "torchrl.envs.transforms.ray_service:RayTransform",
    ("_ray", "_num_cpus", "_num_gpus", "_actor_name", "_device", "_actor", "_create_actor"),
    "ours starts the actor, and torchrl's code reads these",
)
TORCHRL.names(
    "torchrl._utils:_RayServiceMetaClass",
    ("_service_cls",),
    "isinstance counts the local side as the transform in its actor",
)


@TORCHRL.needs("torchrl.envs.transforms:Transform._container")
def stands_alone(transform: Any) -> bool:
    """Whether a transform is in no environment, replay buffer or Compose."""
    return vars(transform)["_container"] is None


@TORCHRL.needs("torchrl.envs.transforms:Transform._step")
def step(transform: Any, tensordict: Any, next_tensordict: Any) -> Any:
    """What a transform makes of a step of its environment."""
    return transform._step(tensordict, next_tensordict)


# A collector in a worker process.

# What torchrl's base class of collectors reads and calls of ours.
TORCHRL.names(
    "torchrl.collectors:MultiCollector",
    (
        *("_frames", "_iter", "_iterator", "_weight_sync_schemes"),
        *("_legacy_weight_updater", "_install_profile_hooks", "_uninstall_profile_hooks"),
        *("_post_collect_hook", "_set_worker_attr", "_iter_by_trajectories"),
        *("_flush_trajectory_assembly", "_normalize_worker_calls", "_get_devices"),
    ),
    "ours is one of them, with a worker of its own",
)
TORCHRL.names(
    "torchrl.collectors:Collector",
    ("_ignore_rb",),
    "torchrl's assembly of trajectories says by it that batches do not go into the buffer",
)


@TORCHRL.needs("torchrl._utils:_get_mp_ctx")
def process_context() -> Any:
    """The context of multiprocessing in which torchrl starts processes."""
    from torchrl._utils import _get_mp_ctx

    return _get_mp_ctx()


@TORCHRL.needs("torchrl.collectors._base:_ProfilerHook")
def worker_profiler(config: Any) -> Any:
    """The hook that profiles our worker after each batch, and stops by itself."""
    from torchrl.collectors._base import _ProfilerHook

    return _ProfilerHook(config, worker_idx=0)


@TORCHRL.needs("torchrl.collectors.utils:_validate_traj_format")
def trajectory_format(value: Any, trajs_per_batch: int | None, has_buffer: bool) -> Any:
    """The form in which trajectories are yielded, after torchrl's own check of the argument."""
    from torchrl.collectors.utils import _validate_traj_format

    return _validate_traj_format(value, trajs_per_batch, has_replay_buffer=has_buffer)


@TORCHRL.needs("torchrl.collectors:Collector._receiver_schemes")
def receives_by_schemes(collector: Any) -> bool:
    """Whether schemes of torchrl's bring weights to a collector."""
    return getattr(collector, "_receiver_schemes", None) is not None


@TORCHRL.needs("torchrl.collectors:Collector._policy_w_state_dict")
def policy_with_state(collector: Any) -> Any:
    """What a collector loads the state of its policy into; ``None`` if the policy has none."""
    return getattr(collector, "_policy_w_state_dict", None)


@TORCHRL.needs("torchrl.collectors:Collector._frames")
def frames_of(collector: Any) -> Any:
    """How many frames a collector has collected; ``None`` if it does not count them."""
    return getattr(collector, "_frames", None)


@TORCHRL.needs("torchrl.envs.transforms:Transform._step")
def steps_as(transform: Any, base: type) -> bool:
    """Whether a transform's step is that of a base class."""
    return type(transform)._step is base._step  # pyright: ignore[reportAttributeAccessIssue]


@TORCHRL.needs("torchrl.envs.llm:RetrieveKL._init_params")
def take_kept_arguments(transform: Any) -> Any:
    """The arguments that a pickled RetrieveKL of torchrl has kept until it knows its collector."""
    return vars(transform).pop("_init_params", None)


@TORCHRL.needs(
    "torchrl.envs.llm:RetrieveLogProb._io_device", "torchrl.envs.llm:KLRewardTransform._io_device"
)
def computing_device(transform: Any) -> Any:
    """The device to which a transform moves what its model reads; ``None`` for where it is."""
    return getattr(transform, "_io_device", None)


(POLICY_OBJECTIVE,) = TORCHRL.names(
    "torchrl.objectives.llm:GRPOLoss",
    ("_compute_policy_objective",),
    "the term of the advantages, of which fused gradients exist for torchrl's own alone",
)
# What else of torchrl's class the weights of tokens follow.
WEIGHT_FORMULAS = TORCHRL.names(
    "torchrl.objectives.llm:GRPOLoss",
    (
        "_aggregate_loss_value",
        "_reduce_loss",
        "_expand_loss_mask",
        "_loss_mask_keys",
        "_clip_bounds",
    ),
    "gradients are fused where these are torchrl's own",
)
# Methods that make or get the distribution of all logits.
READERS_OF_LOGITS = TORCHRL.names(
    "torchrl.objectives.llm:GRPOLoss",
    ("_get_cur_log_prob", "_log_weight", "_get_entropy", "_kl_to_ref"),
    "a subclass that has one of its own may read more than is computed from hidden states",
)


@TORCHRL.needs("torchrl.objectives.llm:GRPOLoss._aggregate_loss_value")
def mean_of(loss: Any, values: Any, mask: Any, tensordict: Any) -> Any:
    """The mean over tokens as a loss takes it."""
    return loss._aggregate_loss_value(values, mask, tensordict=tensordict)


_STRATEGIES = TORCHRL.names(
    "torchrl.modules.llm:TransformersWrapper",
    ("_get_sft_dist", "_get_rlhf_dist", "_get_generic_dist"),
    "they say which tokens a masking strategy counts",
)
# The method of a wrapper that gives the distribution of a masking strategy.
DISTRIBUTIONS = dict(zip(("sft", "rlhf", "generic"), _STRATEGIES, strict=True))

# Collectors of dialogs.

TORCHRL.names(
    "torchrl.collectors:Collector",
    (
        *("_setup_weight_sync", "_setup_policy_version_tracking", "_make_carrier"),
        *("_maybe_make_final_rollout", "_maybe_fallback_update", "_receive_weights_scheme"),
        *("_postproc", "_frames", "_traj_pool"),
    ),
    "torchrl's constructor and methods call and read these of ours",
)
TORCHRL.names(
    "torchrl.collectors:Collector",
    (
        *("_increment_frames", "_iter", "_carrier", "_weight_updater", "_policy_w_state_dict"),
        *("_receiver_schemes", "_iteration_started", "_iterator"),
    ),
    "ours counts, updates and iterates as torchrl's methods expect it",
)


@TORCHRL.needs("torchrl.collectors.utils:_TrajectoryPool")
def trajectory_numbers() -> Any:
    """What numbers the trajectories of a collector, and gives no number twice."""
    from torchrl.collectors.utils import _TrajectoryPool

    return _TrajectoryPool()


# A collector of actors.


@TORCHRL.needs("torchrl.collectors.utils:_maybe_normalize_replay_buffer_tensordict_device")
def for_buffer(batch: Any, buffer: Any) -> Any:
    """A batch with the device that a replay buffer takes, which may be none."""
    from torchrl.collectors.utils import _maybe_normalize_replay_buffer_tensordict_device

    return _maybe_normalize_replay_buffer_tensordict_device(batch, buffer)


@TORCHRL.needs("torchrl.envs:AsyncEnvPool._env_idx_key")
def env_indices(pool: Any, carried: Any) -> list[int]:
    """The index of the environment of each row of what a pool takes or returns."""
    indices = carried.get(pool._env_idx_key).tolist()
    return [_first(index) for index in (indices if isinstance(indices, list) else [indices])]


def _first(nested: Any) -> Any:
    while isinstance(nested, list):
        nested = nested[0]
    return nested


# What runs in the threads of a pool, by kind, each with the attribute that counts it.
_THREADS = "torchrl.envs.async_envs:ThreadingAsyncEnvPool"
_UNDER_WAY = (
    ("_step_and_maybe_reset_futures", "_current_step_reset"),
    ("_reset_futures", "_current_reset"),
)


@TORCHRL.needs(
    f"{_THREADS}._busy", *(f"{_THREADS}.{name}" for names in _UNDER_WAY for name in names)
)
def forget_steps(pool: Any) -> bool:
    """Wait for a pool's running steps, and forget their results and errors.

    torchrl's pool of threads keeps a step that has failed, and would raise its error for ever.

    Returns:
        Whether the environments can be reset; those of a pool of processes that failed cannot.
    """
    if not hasattr(pool, _UNDER_WAY[0][0]):
        return False
    for futures, count in _UNDER_WAY:
        wait(getattr(pool, futures))
        setattr(pool, futures, [])
        setattr(pool, count, 0)
    pool._busy.clear()
    return True


@TORCHRL.needs(f"{_THREADS}._step_and_maybe_reset_futures")
def steps_have_ended(pool: Any, seconds: float) -> bool:
    """Wait for the running steps of a pool of threads; whether all of them end in time."""
    return not wait(list(pool._step_and_maybe_reset_futures), seconds).not_done


@TORCHRL.needs("torchrl.envs.llm:RetrieveKL._initialized")
def will_take_policy(part: Any) -> bool:
    """Whether a part of an environment is a RetrieveKL that takes its collector's policy later.

    It then computes with the policy's own weights.
    """
    from torchrl.envs.llm import RetrieveKL

    return isinstance(part, RetrieveKL) and not part._initialized


# Weight updaters and schemes.

TORCHRL.names(
    "torchrl.collectors.weight_update:WeightUpdaterBase",
    (
        *("_push_weights", "_get_server_weights", "_maybe_map_weights"),
        *("_skip_update", "_sync_weights_with_worker"),
    ),
    "torchrl calls these overrides of our updaters",
)
(REGISTERED_COLLECTORS,) = TORCHRL.names(
    "torchrl.collectors.weight_update:WeightUpdaterBase",
    ("_collector_wrs",),
    "an updater keeps weak references to its collectors there, which do not pickle",
)
TORCHRL.names(
    "torchrl.weight_update:WeightSyncScheme",
    (
        "_init_on_sender_impl",
        "_init_on_receiver_impl",
        "_setup_connection_and_weights_on_sender_impl",
        "_setup_connection_and_weights_on_receiver_impl",
        "_initialized_on_receiver",
    ),
    "torchrl calls these overrides of our scheme",
)


@TORCHRL.needs("torchrl.weight_update.utils:_resolve_attr")
def model_at(owner: Any, path: str) -> Any:
    """What an attribute path such as ``"env.transform[0].model"`` leads to, as torchrl reads it."""
    from torchrl.weight_update.utils import _resolve_attr

    return _resolve_attr(owner, path)


@TORCHRL.needs("torchrl.collectors:MultiCollector._run_processes")
def before_processes_start(collector: Any, prepare: Callable[[], None]) -> None:
    """Call a function when a multi-process collector that is being made starts its processes."""
    start = getattr(collector, "_run_processes", None)
    if start is None or hasattr(collector, "procs"):
        return

    def prepare_and_start() -> None:
        del collector._run_processes  # back to the collector's own
        prepare()
        start()

    collector._run_processes = prepare_and_start


@TORCHRL.needs("torchrl.collectors:MultiCollector._weight_sync_schemes")
def set_schemes(collector: Any, schemes: dict[str, Any]) -> None:
    """Set the weight-sync schemes of a multi-process collector before its processes start."""
    collector._weight_sync_schemes = schemes


# Turns of collectors.

UNCOMPILED_POLICY, COMPILED_POLICY = TORCHRL.names(
    "torchrl.collectors:Collector",
    ("_wrapped_policy_uncompiled", "_wrapped_policy_maybe_compiled"),
    "a collector calls the second as its policy, and makes it of the first where it is None",
)


@TORCHRL.needs("torchrl.collectors:Collector._carrier")
def carried_by(collector: Any) -> Any:
    """The data of a collector's next step, if it has any."""
    return getattr(collector, "_carrier", None)


# vLLM's engines.

# The call of the engine, and what makes a tensordict of its answers to tokens and to texts.
VLLM_CALLS = TORCHRL.names(
    "torchrl.modules.llm:vLLMWrapper",
    ("_call_generate", "_generate_from_tokens", "_generate_from_text"),
    "the versions of tokens are added to what a wrapper answers",
)


@TORCHRL.needs("torchrl.modules.llm:vLLMWrapper._model_type")
def engine_kind(wrapper: Any) -> str | None:
    """Where torchrl's wrapper has its vLLM engine; ``None`` for another part of a policy."""
    return getattr(wrapper, "_model_type", None)


@TORCHRL.needs(
    "torchrl.data.replay_buffers.ray_buffer:_RayReplayBufferClient",
    "torchrl.data.replay_buffers.ray_buffer:_LazyDistributedReplayClient",
)
def ray_buffer_client(buffer: Any) -> Any:
    """The client by which other processes extend a buffer that is an actor; otherwise ``None``."""
    from torchrl.data.replay_buffers import ray_buffer

    clients = ray_buffer._RayReplayBufferClient, ray_buffer._LazyDistributedReplayClient
    if isinstance(buffer, clients):
        return buffer
    return buffer.client() if isinstance(buffer, ray_buffer.RayReplayBuffer) else None
