"""The names of vLLM beyond its documented interface that fusedrl uses.

vLLM is imported only in functions: a trainer that uses a server need not have it installed.
"""

# vLLM is not installed where the linters run.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# Returns a new iterator over all weights of a model, by the names of its checkpoint.
Weights = Callable[[], Iterator[tuple[str, Tensor]]]


def runs_in_this_process(llm: Any) -> bool:
    """Whether a ``vllm.LLM`` computes in this process, so that a call of it always returns."""
    from vllm.v1.engine.core_client import InprocClient

    return isinstance(llm.llm_engine.engine_core, InprocClient)


def offline_engine_has_ended(llm: Any) -> bool:
    """Whether the process of a ``vllm.LLM``'s engine has ended: calls would never return."""
    client = llm.llm_engine.engine_core
    return client.resources.engine_dead or not client._finalizer.alive


def register_backend(name: str, module: str, function: str) -> None:
    """Register a weight-transfer backend if it is not; ``ImportError`` before vLLM 0.31."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(name, module, function)


def workers_of_this_engine() -> tuple[int, int, Any]:
    """The number of workers of this process's engine, this one's rank, and their CPU group."""
    from vllm.distributed.parallel_state import get_world_group

    world = get_world_group()
    return world.world_size, world.rank_in_group, world.cpu_group


def key_value_caches(vllm_config: Any) -> Iterator[Tensor]:
    """The KV caches of this worker's layers."""
    for layer in vllm_config.compilation_config.static_forward_context.values():
        cache: Any = getattr(layer, "kv_cache", None)
        for tensor in cache if isinstance(cache, list | tuple) else [cache]:
            if isinstance(tensor, Tensor) and tensor.numel():
                yield tensor


def connectors_that_keep(vllm_config: Any) -> list[str]:
    """The KV connectors of an engine that cannot drop what they have stored.

    vLLM treats such a connector as if it had dropped it.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    if vllm_config.kv_transfer_config is None:
        return []
    kinds = _connectors(vllm_config)
    return [k.__name__ for k in kinds if k.reset_cache is KVConnectorBase_V1.reset_cache]


def _connectors(vllm_config: Any) -> Iterator[Any]:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    kind: Any = KVConnectorFactory.get_connector_class(vllm_config.kv_transfer_config)
    if issubclass(kind, MultiConnector):
        for _, part in kind._get_connector_classes_and_configs(vllm_config):
            yield from _connectors(part)
    else:
        yield kind


def configured(vllm_config: Any) -> Any:
    """A block in which vLLM's layers find their configuration, as while a model is loaded."""
    from vllm.config import set_current_vllm_config

    return set_current_vllm_config(vllm_config)


def model_without_memory(vllm_config: Any) -> Any:
    """A model of the same classes on the meta device, not registered with the engine."""
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = copy.copy(vllm_config)
    # Layers register themselves there by name, with the same names as the engine's layers.
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    dtype = vllm_config.model_config.dtype
    with torch.device("meta"), set_default_torch_dtype(dtype), configured(config):
        return initialize_model(config)


def layers_that_load(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers that vLLM's loader processes, one of each kind that it processes alike."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    first = {}
    for name, layer in model.named_modules():
        own = [(n, p.shape, p.dtype) for n, p in layer.named_parameters(recurse=False)]
        if own and not is_deferred_attention_layer(layer):
            method = getattr(layer, "quant_method", None)
            kind = (type(layer), type(method), *own)
            first.setdefault(kind, (name, layer))
    return list(first.values())


@contextmanager
def started_layer(
    model: Any, layer: Any, vllm_config: Any, weights: Weights, device: torch.device
) -> Iterator[None]:
    """Give a layer of a model on meta the memory that it has after an engine has started.

    Args:
        model: from :func:`model_without_memory`.
        layer: a layer of this model, which has memory until the block ends.
        vllm_config: the configuration of the model.
        weights: all weights of the model.
        device: the device of the layer's memory.
    """
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor

    bare = list(layer.parameters(recurse=False))
    # A layer may share a parameter with another one, by whose name it is loaded: a router's bias.
    places = [
        (module, name, index)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        for index, own in enumerate(bare)
        if parameter is own
    ]
    try:
        with torch.no_grad(), configured(vllm_config):
            with device:
                record_metadata_for_reloading(layer)
                made = list(map(materialize_meta_tensor, bare))
            for module, name, index in places:
                module.register_parameter(name, made[index])
            model.load_weights(weights())
            method: Any = getattr(layer, "quant_method", None)
            if isinstance(method, QuantizeMethodBase):
                with device:
                    method.process_weights_after_loading(layer)
        yield
    finally:
        for name in dict(layer.named_parameters(recurse=False)):
            delattr(layer, name)
        for module, name, index in places:
            module.register_parameter(name, bare[index])


def load_again(model: Any, vllm_config: Any, weights: Weights) -> None:
    """Load weights into a model that has weights already.

    Raises:
        Exception: from ``model.load_weights``. The model can be loaded again.
    """
    from vllm.model_executor.model_loader.reload.layerwise import (
        _place_kernel_tensors,
        finalize_layerwise_reload,
        get_layerwise_info,
        initialize_layerwise_reload,
    )

    with configured(vllm_config):
        initialize_layerwise_reload(model)
        for layer in model.modules():
            # On CPUs, vLLM packs experts only while a layer has no kernel. On GPUs, CUDA graphs
            # have the addresses of the kernels, which stay.
            kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
            if kernel is not None and get_layerwise_info(layer).restore_device.type == "cpu":
                layer.quant_method.moe_kernel = None
        try:
            model.load_weights(weights())
            finalize_layerwise_reload(model, vllm_config.model_config)
        except BaseException:
            # Give layers whose reload has begun their previous memory.
            model._do_torchao_reload = model._original_do_torchao_reload
            for layer in model.modules():
                info = get_layerwise_info(layer)
                if info.can_load():
                    if info.kernel_tensors is not None:
                        _place_kernel_tensors(layer, info)
                    info.reset()
            raise


def packed_product(layer: Any, like: Any) -> Tensor | None:
    """A product of a linear layer with weights that a CPU has packed, which are not a parameter.

    Args:
        layer: the layer that computes it.
        like: the layer that shows whether there are packed weights, and their width.
    """
    if not hasattr(like, "cpu_linear"):
        return None
    sizes = ("embedding_dim", "input_size_per_partition", "input_size")
    width = next(getattr(like, size) for size in sizes if hasattr(like, size))
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(0)).to(like.weight.dtype)
    return layer.cpu_linear(x, layer.weight, None)
