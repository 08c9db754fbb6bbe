"""Loads weights under the names of a checkpoint into a vLLM model, which has other names."""

# vLLM has an environment of its own, which the linters do not see.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader.reload.layerwise import (
    _place_kernel_tensors,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from fusedrl.channel.layout import Layout
from fusedrl.channel.layout_entries import listed

logger = logging.getLogger("fusedrl")


class ModelWeights:
    """Loads the versions of a layout into one model.

    Args:
        model: vLLM's model, which fuses parameters of several layers of a checkpoint into one, and
            has some in another form.
        vllm_config: the configuration that the model was made with.
        layout: the layout of the weights.

    Raises:
        ValueError: the weights are not those of the model; the message lists all names and shapes
            that do not fit. The model is not changed.
    """

    def __init__(self, model: Any, vllm_config: VllmConfig, layout: Layout) -> None:
        if layout.adapters == "only":
            raise ValueError(
                "channel: expected all weights of a model, got those of its adapters alone; update "
                "with EngineWeights, or create the channel with adapters='merged'"
            )
        self._model = model
        self._config = vllm_config
        self._layout = layout
        self._names = names_for(vllm_config, layout)
        check_loads_again(model, vllm_config)

    @torch.no_grad()
    def load(self, views: Sequence[Tensor]) -> None:
        """Load one version.

        Args:
            views: one for each stored entry, as :meth:`Layout.views` makes them. They may be freed
                afterwards.

        Raises:
            Exception: an error of the model. Some of its layers have the version then and others
                do not, and it can be loaded again.
        """
        index = self._layout.view_of
        initialize_layerwise_reload(self._model)
        try:
            self._model.load_weights((name, views[index[name]]) for name in self._names)
            finalize_layerwise_reload(self._model, self._config.model_config)
        except BaseException:
            _abandon_reload(self._model)
            raise


def _abandon_reload(model: Any) -> None:
    """Give the layers that have begun to load their former memory again."""
    model._do_torchao_reload = model._original_do_torchao_reload
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
            info.reset()


class _Copies(TorchDispatchMode):
    """Records which sources are used, and how many elements of each destination are filled."""

    def __init__(self, sources: dict[int, str]) -> None:
        super().__init__()
        self.names_of = {storage: {name} for storage, name in sources.items()}
        self.used: set[str] = set()
        self.filled: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [value for value in args if isinstance(value, Tensor)]
        names = set().union(*(self.names_of.get(_storage(value), ()) for value in tensors))
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, Tensor) and names:
                self.names_of.setdefault(_storage(made), set()).update(names)
        if func._schema.is_mutable and tensors:
            target = tensors[0]
            self.filled[_storage(target)] = self.filled.get(_storage(target), 0) + target.numel()
            self.used |= names
        return result


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def names_for(vllm_config: VllmConfig, layout: Layout) -> list[str]:
    """The names of a layout that a model of this configuration is given when it loads.

    Tied names are among them if the model takes them, as it may have packed a copy for each.

    Raises:
        ValueError: the model does not take all of these weights, or needs others.
    """
    stored, every = [e.name for e in layout.stored], [e.name for e in layout.entries]
    if vllm_config.model_config.quantization is not None:
        logger.info("weights: names and shapes of a quantised model are not checked beforehand")
        return stored
    differences: list[str] = []
    for names in [every, stored] if len(every) > len(stored) else [stored]:
        differences = _differences(vllm_config, layout, names)
        if not differences:
            return names
    raise ValueError(
        f"channel: expected the weights of {vllm_config.model_config.architecture} as its "
        "checkpoint has them, got others; create the channel from the model that the engine "
        "runs, or from a dict with the names of its checkpoint" + listed(differences)
    )


def check_loads_again(model: Any, vllm_config: VllmConfig) -> None:
    """Raise ``ValueError`` for a model that vLLM's reload would leave half loaded.

    On CPUs, vLLM packs experts into other shapes, and a reload would copy unpacked ones over them.
    """
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        return
    unpacked = dict(_skeleton(vllm_config).named_parameters())
    for name, parameter in model.named_parameters():
        before = unpacked[name].shape if name in unpacked else parameter.shape
        if parameter.numel() and parameter.shape != before:
            raise ValueError(
                f"engine: expected weights that vLLM can load again, got {name}, which it has "
                f"packed from {tuple(before)} into {tuple(parameter.shape)} for this CPU; run "
                "this model on a GPU"
            )


def _differences(vllm_config: VllmConfig, layout: Layout, names: list[str]) -> list[str]:
    """Try the weights on a copy of the model without memory, and return what does not fit.

    The copy takes the weights, which have no memory either, as the engine's own model would.
    """
    skeleton = _skeleton(vllm_config)
    entries = {entry.name: entry for entry in layout.entries}
    # One element stands for all of a tensor. Tensors on meta could not be copied from.
    given = {n: torch.zeros((), dtype=entries[n].dtype).expand(entries[n].shape) for n in names}
    copies = _Copies({_storage(tensor): name for name, tensor in given.items()})
    try:
        with copies, set_current_vllm_config(vllm_config), torch.no_grad():
            skeleton.load_weights(list(given.items()))
    except Exception:
        with set_current_vllm_config(vllm_config), torch.no_grad():
            return _refused(_skeleton(vllm_config), given)
    unused = [
        f"{name}: expected no such entry, got {entries[name].described()}"
        for name in names
        if name not in copies.used
        and entries[name].kind == "parameter"
        # A model need not use the second name of a tied weight.
        and entries[name].tied_to is None
    ]
    missing = [
        f"{name} of vLLM's model: expected {parameter.numel()} elements, got {count}"
        for name, parameter in skeleton.named_parameters()
        if (count := copies.filled.get(_storage(parameter), 0)) < parameter.numel()
    ]
    return unused + missing


def _refused(skeleton: Any, given: dict[str, Tensor]) -> list[str]:
    """The error of the model for each of the weights that it refuses."""
    refused = []
    for name, tensor in given.items():
        try:
            skeleton.load_weights([(name, tensor)])
        except Exception as error:
            text = str(error) or "no such entry, or of another shape"
            refused.append(f"{name}, {tuple(tensor.shape)}: {type(error).__name__}: {text}")
    return refused or ["they are refused together, though not one by one"]


def _skeleton(vllm_config: VllmConfig) -> Any:
    """A model of the same classes on the meta device, which is not registered with the engine."""
    config = copy.copy(vllm_config)
    # Layers register themselves there by name, and the engine's own layers have the same names.
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    dtype = vllm_config.model_config.dtype
    with torch.device("meta"), set_default_torch_dtype(dtype), set_current_vllm_config(config):
        return initialize_model(config)
