"""The private names of libraries that ``fusedrl.compat`` and subclasses of a library's rely on.

What a module of ``fusedrl.compat`` imports as it is loaded is not among them.
"""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

# By library and by their owner, "module" or "module:Class".
NEEDED: dict[str, dict[str, str]] = {
    "accelerate": {"accelerate.hooks:add_hook_to_module": "_hf_hook"},
    "tensordict": {
        "tensordict:NonTensorData": "_tensordict",
        "tensordict:TensorDict": "_new_unsafe _get_str",
    },
    "torch": {
        "torch.autograd.forward_ad": "_current_level",
        "torch._C": "_len_torch_dispatch_stack _is_tracing DisableTorchFunctionSubclass",
        "torch._ops:OpOverload": "_tags _schema",
        "torch.ops:aten": "_assert_async",
        "torch.nested._internal.nested_tensor:NestedTensor": "_ragged_idx _lengths _values",
        "torch:Tensor": "_nested_tensor_size",
        "torch": "_nested_view_from_buffer _foreach_copy_",
        "torch.nn:Module": (
            "_modules _parameters _buffers _non_persistent_buffers_set _compiled_call_impl "
            "_forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks"
        ),
        "torch.nn.modules.module": (
            "_global_forward_hooks _global_forward_pre_hooks _global_backward_hooks "
            "_global_backward_pre_hooks"
        ),
        "torch:UntypedStorage": "_cdata",
        "torch._dynamo.eval_frame:OptimizedModule": "_orig_mod",
        "torch._dynamo.eval_frame": "innermost_fn",
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper:ActivationWrapper": (
            "_checkpoint_wrapped_module"
        ),
        # Hooks of these modules stay in force around a part of a model.
        "torch.distributed.tensor._api": "distribute_module",
        "torch.distributed.fsdp._fully_shard._fsdp_state": "FSDPState",
        "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState": "_fsdp_param_group",
        "torch.distributed.fsdp:FSDPModule": "_get_fsdp_state",
        "torch.nn.parallel:DistributedDataParallel": "_active_ddp_module",
        "torch.distributed.distributed_c10d": "_get_default_store",
    },
    "torchrl": {
        "torchrl.envs.transforms:Transform": ("_call _step _reset _container"),
        "torchrl.envs.llm.transforms.policy_version:PolicyVersion": (
            "_increment_version _current_version"
        ),
        "torchrl.envs.llm:RetrieveKL": "_initialized _init_deferred",
        "torchrl.envs.llm:RetrieveLogProb": "_io_device",
        "torchrl.envs.llm:KLRewardTransform": "_io_device",
        # isinstance counts the local side as the transform in its actor.
        "torchrl._utils:_RayServiceMetaClass": "_service_cls _RayServiceClass",
        "torchrl._utils": "_get_mp_ctx _RayServiceMetaClass",
        "torchrl.collectors:MultiCollector": (
            "_frames _iter _iterator _weight_sync_schemes _install_profile_hooks "
            "_uninstall_profile_hooks _saved_post_collect_hook _set_worker_attr _shutdown_main "
            "_iter_by_trajectories _flush_trajectory_assembly _normalize_worker_calls "
            "_get_devices _run_processes"
        ),
        # torchrl's assembly of trajectories says by _ignore_rb that batches do not go into the
        # buffer.
        "torchrl.collectors:Collector": (
            "_ignore_rb _receiver_schemes _policy_w_state_dict _frames "
            "_setup_policy_version_tracking _make_carrier "
            "_maybe_make_final_rollout _maybe_fallback_update _receive_weights_scheme _postproc "
            "_increment_frames _iter _carrier _weight_updater "
            "_iterator _wrapped_policy_uncompiled _wrapped_policy_maybe_compiled"
        ),
        "torchrl.collectors.utils": (
            "_validate_traj_format _TrajectoryPool _maybe_normalize_replay_buffer_tensordict_device"
        ),
        "torchrl.objectives.llm:GRPOLoss": (
            "_aggregate_loss_value _reduce_loss _get_cur_log_prob _log_weight _get_entropy "
            "_kl_to_ref"
        ),
        "torchrl.modules.llm:TransformersWrapper": "_get_sft_dist _get_rlhf_dist _get_generic_dist",
        "torchrl.modules.llm:vLLMWrapper": (
            "_call_generate _generate_from_tokens _generate_from_text _model_type"
        ),
        "torchrl.envs:AsyncEnvPool": "_env_idx_key",
        "torchrl.envs.async_envs:ThreadingAsyncEnvPool": (
            "_busy _step_and_maybe_reset_futures _current_step_reset _reset_futures _current_reset"
        ),
        "torchrl.collectors.weight_update:WeightUpdaterBase": (
            "_push_weights _get_server_weights _maybe_map_weights _skip_update "
            "_sync_weights_with_worker"
        ),
        "torchrl.weight_update:WeightSyncScheme": (
            "_init_on_sender_impl _init_on_receiver_impl "
            "_setup_connection_and_weights_on_sender_impl "
            "_setup_connection_and_weights_on_receiver_impl _initialized_on_receiver"
        ),
        "torchrl.modules.inference_server:InferenceServer": "_mark_weight_update",
        "torchrl.data.replay_buffers.ray_buffer": (
            "_RayReplayBufferClient _LazyDistributedReplayClient"
        ),
    },
    "transformers": {
        "transformers:PretrainedConfig": "_attn_implementation",
        "transformers:PreTrainedModel": "_gradient_checkpointing_func",
        "transformers.core_model_loading": "revert_weight_conversion",
    },
    "trl": {
        "trl.trainer.utils": "_use_triton",
        "trl.trainer.grpo_trainer:GRPOTrainer": "_get_per_token_logps_and_entropies",
        "trl.trainer.rloo_trainer:RLOOTrainer": "_get_per_token_logps_and_entropies",
        "trl.trainer.dpo_trainer:DPOTrainer": "_compute_loss",
    },
    "vllm": {
        "vllm.v1.engine.core_client": "InprocClient",
        "vllm.v1.engine.core_client:MPClient": "resources _finalizer",
        "vllm.v1.engine.core_client:BackgroundResources": "engine_dead",
        "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory": "_registry",
        "vllm.distributed.parallel_state": "get_world_group",
        "vllm.config:CompilationConfig": "static_forward_context static_all_moe_layers",
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1": "reset_cache",
        "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector:MultiConnector": (
            "_get_connector_classes_and_configs"
        ),
        "vllm.model_executor.model_loader.utils": "initialize_model",
        "vllm.model_executor.layers.attention": "is_deferred_attention_layer",
        "vllm.model_executor.model_loader.reload": "record_metadata_for_reloading",
        "vllm.model_executor.model_loader.reload.meta": "materialize_meta_tensor",
        "vllm.model_executor.model_loader.reload.layerwise": (
            "initialize_layerwise_reload finalize_layerwise_reload get_layerwise_info "
            "_place_kernel_tensors"
        ),
    },
}


def missing_of(library: str) -> list[str]:
    """The names that the installed library lacks."""
    return [
        f"{owner}.{name}"
        for owner, names in NEEDED[library].items()
        for name in names.split()
        if not _has(owner, name)
    ]


def _has(owner: str, name: str) -> bool:
    """Whether a module or a class has a name, or the source of a class or a function speaks of it.

    Only its source says what the instances of a class have.
    """
    module, _, part = owner.partition(":")
    found: Any = importlib.import_module(module)
    found = getattr(found, part) if part else found
    if hasattr(found, name):
        return True
    bases = found.__mro__[:-1] if isinstance(found, type) else [found] if callable(found) else []
    return any(re.search(rf"\b{name}\b", inspect.getsource(base)) for base in bases)
