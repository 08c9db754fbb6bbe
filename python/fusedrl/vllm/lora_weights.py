"""Loads a peft model's adapters into the LoRA manager of a vLLM model."""

# vLLM has an environment of its own, which the linters do not see.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear

from fusedrl.channel.layout import Layout
from fusedrl.channel.layout_entries import listed
from fusedrl.vllm.peft_models import layer_of

_REMEDY = "or create the channel with adapters='merged'"


class LoraWeights:
    """Loads versions of the adapters of one model, whose own weights stay as they are.

    Args:
        model: vLLM's model.
        vllm_config: the configuration that the model was made with.
        layout: the layout of the adapters' weights, under peft's names.

    Raises:
        ValueError: the engine takes no adapters, or these do not fit; the message lists all names
            and shapes that differ. Nothing is changed.
    """

    def __init__(self, model: nn.Module, vllm_config: VllmConfig, layout: Layout) -> None:
        if layout.adapters != "only":
            raise ValueError(
                "channel: expected adapters alone, got all weights of a model; create the channel "
                "with adapters='only'"
            )
        config = vllm_config.lora_config
        ranks = [e.shape[0] for e in layout.entries if layer_of(e.name)[1] == "lora_A"]
        if config is None:
            raise ValueError(
                "engine: expected one that takes adapters, got one that was started without; "
                f"start it with enable_lora=True, max_lora_rank={max(ranks)}, {_REMEDY}"
            )
        if max(ranks) > config.max_lora_rank:
            raise ValueError(
                f"engine: expected one for adapters of rank {max(ranks)}, got max_lora_rank="
                f"{config.max_lora_rank}; start it with that of the adapters, {_REMEDY}"
            )
        # vLLM's manager of adapters sets this attribute of the model.
        self._manager: Any = model.lora_manager
        self._dtype = config.lora_dtype
        self._layers = self._fitting(layout)

    def _fitting(self, layout: Layout) -> dict[str, dict[str, tuple[str, int]]]:
        """For each layer of peft's, the name in vLLM and the view of both of its matrices."""
        mapper = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        mapper = None if mapper is None else mapper.get_rename_mapper()
        sizes = dict(_sizes(self._manager))
        layers: dict[str, dict[str, tuple[str, int]]] = {}
        differences = []
        for entry in layout.entries:
            layer, part, _ = layer_of(entry.name)
            name, _ = parse_fine_tuned_lora_name(f"{layer}.{part}.weight", mapper)
            layers.setdefault(layer, {})[part] = (name, layout.view_of[entry.name])
            size, at = ("input", 1) if part == "lora_A" else ("output", 0)
            if name not in sizes:
                differences.append(f"{entry.name}: expected no such layer, got {entry.shape}")
            elif entry.shape[at] != sizes[name][size]:
                differences.append(
                    f"{entry.name}: expected {sizes[name][size]} {size}s, got {entry.shape[at]}"
                )
        if differences:
            raise ValueError(
                "channel: expected adapters of linear layers of the engine's model, got others; "
                f"adapt the model that the engine runs, {_REMEDY}" + listed(differences)
            )
        return layers

    @torch.no_grad()
    def copied(
        self, views: Sequence[Tensor], number: int, scalings: Mapping[str, float]
    ) -> LoRAModel:
        """A copy of one version of the adapters.

        Args:
            views: one for each stored entry, as :meth:`Layout.views` makes them.
            number: the number by which requests name the adapters.
            scalings: the scaling of each layer, by peft's name.

        Raises:
            ValueError: ``scalings`` has other layers, or there is no room for more adapters.
        """
        held = self._manager.list_adapters()
        if number not in held and len(held) >= self._manager.capacity:
            raise ValueError(
                f"engine: expected room for these adapters, got {len(held)} others, numbers "
                f"{', '.join(map(str, held))}; start it with a larger max_cpu_loras, or call its "
                "remove_lora(number) for one that is not needed any more"
            )
        if scalings.keys() != self._layers.keys():
            differing = sorted(scalings.keys() ^ self._layers.keys())
            raise ValueError(
                f"scalings: expected one for each adapted layer, got others for {differing[:5]}; "
                "update from the model that the channel was created from"
            )
        loras = {}
        for layer, parts in self._layers.items():
            name, _ = parts["lora_A"]
            # vLLM keeps these tensors and scales them in place, so they are copied.
            a, b = (
                views[parts[part][1]].to(self._dtype, copy=True) for part in ("lora_A", "lora_B")
            )
            loras[name] = LoRALayerWeights(name, a.shape[0], 0, a, b, scaling=scalings[layer])
        return LoRAModel(number, max(lora.rank for lora in loras.values()), loras)

    def put(self, lora: LoRAModel) -> None:
        """Replace the adapters of this number for all requests that name them."""
        manager = self._manager
        manager.remove_adapter(lora.id)
        manager.add_adapter(lora)
        manager.activate_adapter(lora.id)
        # Requests for other adapters may move these out of the GPU's slots, and they come back from
        # the CPU's cache. There they are pinned, because no file has them. The public pin_adapter()
        # would also pin the slot on the GPU.
        manager._pin_lora_in_cpu_cache(lora.id)


def _sizes(manager: Any) -> Iterator[tuple[str, dict[str, int]]]:
    """Inputs and outputs of the linear layers that a manager adapts, by the checkpoint's names."""
    for name, wrapper in manager.modules.items():
        base: Any = getattr(wrapper, "base_layer", None)
        if not isinstance(base, LinearBase):
            continue
        packed = manager.packed_modules.get(name, [name])
        outputs = _outputs(base) if len(packed) > 1 else [base.output_size]
        if len(packed) == len(outputs):
            for part, output in zip(packed, outputs, strict=True):
                yield part, {"input": base.input_size, "output": output}


def _outputs(base: Any) -> list[int]:
    """The numbers of outputs of a layer's parts, over all ranks."""
    if isinstance(base, QKVParallelLinear):
        heads = [base.total_num_heads, base.total_num_kv_heads, base.total_num_kv_heads]
        widths = [base.head_size, base.head_size, base.v_head_size]
        return [count * width for count, width in zip(heads, widths, strict=True)]
    return list(base.output_sizes)
