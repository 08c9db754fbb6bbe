"""Loads weights again into a model of vLLM that has some, and finds out what that did."""

# vLLM has an environment of its own, which the linters do not see.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.reload.layerwise import (
    _place_kernel_tensors,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

Weights = Iterable[tuple[str, Tensor]]


def reload(layers: nn.Module, vllm_config: VllmConfig, load: Callable[[], Any]) -> None:
    """Load weights into layers that have some already.

    Args:
        layers: a model of vLLM, or some of its layers.
        vllm_config: the configuration that the model was made with.
        load: calls ``load_weights`` of the model.

    Raises:
        Exception: that of ``load``. The layers can be loaded again.
    """
    initialize_layerwise_reload(layers)
    for layer in layers.modules():
        # On CPUs, vLLM packs experts only while a layer has no kernel yet. CUDA graphs have the
        # addresses of a GPU's kernels, which stay.
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None and get_layerwise_info(layer).restore_device.type == "cpu":
            layer.quant_method.moe_kernel = None  # pyright: ignore[reportArgumentType]
    try:
        load()
        finalize_layerwise_reload(layers, vllm_config.model_config)
    except BaseException:
        _abandon(layers)
        raise


def _abandon(layers: Any) -> None:
    """Give the layers that have begun to load their former memory again."""
    layers._do_torchao_reload = layers._original_do_torchao_reload
    for layer in layers.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
            info.reset()


def wrong_after_reload(model: nn.Module, vllm_config: VllmConfig, weights: Weights) -> list[str]:
    """What in a model differs from what a start of the engine with these weights would make.

    One layer of each kind is loaded as at a start, one after the other.

    Args:
        model: vLLM's, which these weights were loaded into. It is not changed.
        vllm_config: the configuration that the model was made with.
        weights: all of the model's, by the names of its checkpoint.

    Returns:
        The parameters that differ.
    """
    weights = list(weights)
    found = dict(_layers_in(model))
    device = next(model.parameters()).device
    fresh = skeleton(vllm_config)
    wrong = []
    for name, layer in _kinds(fresh):
        bare = _start(fresh, layer, vllm_config, weights, device)
        wrong += [f"{name}.{what}" for what in _differences(found[name], layer)]
        _free(layer, bare)
    return wrong


def wrong_if_reloaded(vllm_config: VllmConfig, shapes: dict[str, Any]) -> list[str]:
    """What a reload would leave wrong in a model on the CPU, of which nothing is changed.

    Args:
        vllm_config: the configuration of the model.
        shapes: the entries of all weights, by the names of the model's checkpoint.

    Returns:
        The parameters that would differ from those after a start.
    """
    cpu = torch.device("cpu")
    former, new = (_numbers(shapes, seed) for seed in (0, 1))
    fresh, twin = skeleton(vllm_config), skeleton(vllm_config)
    with cpu:
        record_metadata_for_reloading(twin)
    wrong = []
    for (name, one), (_, other) in zip(_kinds(fresh), _kinds(twin), strict=True):
        bare = _start(fresh, one, vllm_config, new, cpu)
        bare_twin = _start(twin, other, vllm_config, former, cpu)
        with _within(vllm_config):
            reload(nn.ModuleList([other]), vllm_config, lambda: twin.load_weights(iter(new)))
        wrong += [f"{name}.{what}" for what in _differences(other, one)]
        _free(one, bare)
        _free(other, bare_twin)
    return wrong


def _numbers(entries: dict[str, Any], seed: int) -> list[tuple[str, Tensor]]:
    """A tensor without regularities for each entry, all in the same little memory."""
    generator = torch.Generator().manual_seed(seed)
    steps = {n: [7**k for k in reversed(range(len(e.shape)))] for n, e in entries.items()}
    sizes = [
        1 + sum((size - 1) * step for size, step in zip(e.shape, steps[name], strict=True))
        for name, e in entries.items()
    ]
    numbers = torch.randn(max(sizes), generator=generator)
    kept = {dtype: numbers.to(dtype) for dtype in {e.dtype for e in entries.values()}}
    return [(n, kept[e.dtype].as_strided(e.shape, steps[n])) for n, e in entries.items()]


def _start(
    model: Any, layer: nn.Module, vllm_config: VllmConfig, weights: Weights, device: torch.device
) -> dict[str, nn.Parameter]:
    """Give one layer of a model without memory what it has once an engine has started.

    Returns:
        The parameters that it had, for :func:`_free`.
    """
    bare = dict(layer.named_parameters(recurse=False))
    with torch.no_grad(), _within(vllm_config):
        with device:
            for name, parameter in bare.items():
                layer.register_parameter(name, materialize_meta_tensor(parameter))
        model.load_weights(iter(weights))
        method: Any = getattr(layer, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            with device:
                method.process_weights_after_loading(layer)
    return bare


def _free(layer: nn.Module, bare: dict[str, nn.Parameter]) -> None:
    for name in dict(layer.named_parameters(recurse=False)):
        delattr(layer, name)
    for name, parameter in bare.items():
        layer.register_parameter(name, parameter)


def _layers_in(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers with parameters of their own, by their names without adapters."""
    for name, layer in model.named_modules():
        if next(layer.parameters(recurse=False), None) is not None:
            yield name.replace(".base_layer", ""), layer


def _kinds(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The first of all layers that vLLM's loader treats alike, as far as it treats them at all."""
    first = {}
    for name, layer in _layers_in(model):
        if is_deferred_attention_layer(layer):
            continue
        method = getattr(layer, "quant_method", None)
        sizes = [(n, p.shape, p.dtype) for n, p in layer.named_parameters(recurse=False)]
        first.setdefault((type(layer), type(method), *sizes), (name, layer))
    return list(first.values())


@torch.no_grad()
def _differences(layer: Any, right: Any) -> list[str]:
    """The parameters of a layer that have other bits, and its packed product."""
    expected = dict(right.named_parameters(recurse=False))
    found = dict(layer.named_parameters(recurse=False))
    wrong = [
        name
        for name, value in expected.items()
        if name not in found or not _same_bits(found[name], value)
    ]
    if hasattr(right, "cpu_linear"):  # which has a copy of the weight, in a form of its own
        sizes = ("embedding_dim", "input_size_per_partition", "input_size")
        width = next(getattr(right, size) for size in sizes if hasattr(right, size))
        weight = right.weight
        x = torch.randn(3, width, generator=torch.Generator().manual_seed(0)).to(weight.dtype)
        ours, theirs = (one.cpu_linear(x, one.weight, None) for one in (layer, right))
        if not _same_bits(ours, theirs):
            wrong.append("cpu_linear")
    return wrong


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Also where they are NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _within(vllm_config: VllmConfig) -> Any:
    return set_current_vllm_config(vllm_config)


def skeleton(vllm_config: VllmConfig) -> Any:
    """A model of the same classes on the meta device, which is not registered with the engine."""
    config = copy.copy(vllm_config)
    # Layers register themselves there by name, and the engine's own layers have the same names.
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    dtype = vllm_config.model_config.dtype
    with torch.device("meta"), set_default_torch_dtype(dtype), set_current_vllm_config(config):
        return initialize_model(config)
