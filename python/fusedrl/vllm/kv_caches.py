"""Keys and values that an engine keeps from the weights of a former version."""

# vLLM has an environment of its own, which the linters do not see.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector


def check_caches(vllm_config: VllmConfig) -> None:
    """Raise ``ValueError`` for an engine with a connector that keeps what it has stored.

    vLLM takes a connector that has no way to drop keys and values for one that has dropped them.
    """
    if vllm_config.kv_transfer_config is None:
        return
    kinds = list(_connectors(vllm_config))
    if keeping := [k.__name__ for k in kinds if k.reset_cache is KVConnectorBase_V1.reset_cache]:
        raise ValueError(
            "engine: expected a KV connector that drops what it has stored (reset_cache), got "
            f"{', '.join(keeping)}, which would serve keys and values of former weights; start the "
            "engine without it"
        )


def _connectors(vllm_config: VllmConfig) -> Iterator[type[KVConnectorBase_V1]]:
    assert vllm_config.kv_transfer_config is not None
    kind: Any = KVConnectorFactory.get_connector_class(vllm_config.kv_transfer_config)
    if issubclass(kind, MultiConnector):
        for _, part in kind._get_connector_classes_and_configs(vllm_config):
            yield from _connectors(part)
    else:
        yield kind


@torch.no_grad()
def clear_caches(vllm_config: VllmConfig) -> None:
    """Zero the caches of keys and values in which something is not finite.

    vLLM gives their blocks to other requests as they are, and masks what is behind the end of a
    request by a factor of zero, which does not hide NaN.
    """
    for layer in vllm_config.compilation_config.static_forward_context.values():
        cache: Any = getattr(layer, "kv_cache", None)
        for tensor in cache if isinstance(cache, list | tuple) else [cache]:
            # Sums, as booleans would take memory. Single bytes cannot be added.
            if isinstance(tensor, Tensor) and tensor.numel() and not _is_finite(tensor):
                tensor.zero_()


def _is_finite(tensor: Tensor) -> bool:
    return tensor.itemsize > 1 and bool(tensor.sum(dtype=torch.float32).isfinite())
