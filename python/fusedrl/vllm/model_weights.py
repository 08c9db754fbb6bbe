"""Loads weights under the names of a checkpoint into a vLLM model, which has other names."""

# vLLM has an environment of its own, which the linters do not see.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import VllmConfig, set_current_vllm_config

from fusedrl.channel.layout import Layout
from fusedrl.channel.layout_entries import listed
from fusedrl.vllm.reloading import reload, skeleton, wrong_after_reload, wrong_if_reloaded

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
        check_loads_again(model, vllm_config, layout, self._names)
        # A load that failed may have left layers which the next one treats in another way.
        self._is_known_to_load = False

    @torch.no_grad()
    def load(self, views: Sequence[Tensor]) -> None:
        """Load one version.

        Args:
            views: one for each stored entry, as :meth:`Layout.views` makes them. They may be freed
                afterwards.

        Raises:
            RuntimeError: the model has other weights than an engine that starts with this version.
            Exception: an error of the model. Some of its layers have the version then and others
                do not, and it can be loaded again.
        """
        index = self._layout.view_of
        weights = [(name, views[index[name]]) for name in self._names]
        known, self._is_known_to_load = self._is_known_to_load, False
        reload(self._model, self._config, lambda: self._model.load_weights(iter(weights)))
        wrong = [] if known else wrong_after_reload(self._model, self._config, weights)
        if wrong:
            raise RuntimeError(
                "engine: expected the weights that it would start with, got others after vLLM had "
                "loaded them again; start a new engine for each version" + listed(wrong)
            )
        self._is_known_to_load = True


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


def check_loads_again(
    model: Any, vllm_config: VllmConfig, layout: Layout, names: list[str]
) -> None:
    """Raise ``ValueError`` for a model on a CPU that a reload would leave with wrong weights.

    On a GPU, whose memory may be full, this is found out by the first load.
    """
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        return
    entries = {entry.name: entry for entry in layout.entries}
    if wrong := wrong_if_reloaded(vllm_config, {name: entries[name] for name in names}):
        raise ValueError(
            "engine: expected weights that vLLM can load again, got some that would be others "
            "than after a start; run this model on a GPU, or start a new engine for each version"
            + listed(wrong)
        )


def _differences(vllm_config: VllmConfig, layout: Layout, names: list[str]) -> list[str]:
    """Try the weights on a copy of the model without memory, and return what does not fit.

    The copy takes the weights, which have no memory either, as the engine's own model would.
    """
    bare = skeleton(vllm_config)
    entries = {entry.name: entry for entry in layout.entries}
    # One element stands for all of a tensor. Tensors on meta could not be copied from.
    given = {n: torch.zeros((), dtype=entries[n].dtype).expand(entries[n].shape) for n in names}
    copies = _Copies({_storage(tensor): name for name, tensor in given.items()})
    try:
        with copies, set_current_vllm_config(vllm_config), torch.no_grad():
            bare.load_weights(list(given.items()))
    except Exception:
        with set_current_vllm_config(vllm_config), torch.no_grad():
            return _refused(skeleton(vllm_config), given)
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
        for name, parameter in bare.named_parameters()
        if (count := copies.filled.get(_storage(parameter), 0)) < parameter.numel()
    ]
    return unused + missing


def _refused(bare: Any, given: dict[str, Tensor]) -> list[str]:
    """The error of the model for each of the weights that it refuses."""
    refused = []
    for name, tensor in given.items():
        try:
            bare.load_weights([(name, tensor)])
        except Exception as error:
            text = str(error) or "no such entry, or of another shape"
            refused.append(f"{name}, {tuple(tensor.shape)}: {type(error).__name__}: {text}")
    return refused or ["they are refused together, though not one by one"]
