"""Loads weights under the names of a checkpoint into a vLLM model, which has other names."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusedrl.channel.layout import Entry, Layout, listed
from fusedrl.channel.tensors import described
from fusedrl.compat import transformers, vllm
from fusedrl.compat.torch import DispatchMode, storage_of, writes

# What a checkpoint has of a weight of the trainer's model, under which names.
InCheckpoint = Callable[[str, Tensor], list[tuple[str, Tensor]]]

logger = logging.getLogger("fusedrl")


class ModelWeights:
    """Loads the versions of a layout into one model of vLLM's.

    Attributes:
        unused: a message for each weight that this stage of a pipeline does not use; some stage
            has to.

    Raises:
        ValueError: the weights are not those of the model; the message lists what does not fit.
    """

    def __init__(self, model: Any, vllm_config: Any, layout: Layout) -> None:
        self._model = model
        self._config = vllm_config
        self._layout = layout
        self._names, self._in_checkpoint, self.unused = _way_in(vllm_config, layout)
        # A load that failed may have left layers which the next one treats in another way.
        self._is_known_to_load = False

    @torch.no_grad()
    def load(self, views: Sequence[Tensor]) -> None:
        """Load the version of these views; after an error of the model it can be loaded again.

        Raises:
            RuntimeError: the model has other weights than an engine that starts with this version.
        """
        known, self._is_known_to_load = self._is_known_to_load, False
        # What a load leaves as it was is right if the engine has started with these weights. So
        # others are loaded first, which no model has.
        others = [view.new_full((), 0.3).expand(view.shape) for view in views]
        for given in [views] if known else [others, views]:
            weights = partial(self._given, given)
            vllm.load_again(self._model, self._config, weights)
            if not known and (wrong := self._wrong_after(weights)):
                raise RuntimeError(
                    "engine: expected the weights that it would start with, got others after vLLM "
                    "had loaded them again; start a new engine for each version" + listed(wrong)
                )
        self._is_known_to_load = True

    def _given(self, views: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name in self._names:
            yield from self._in_checkpoint(name, views[self._layout.view_of[name]])

    def _wrong_after(self, weights: vllm.Weights) -> list[str]:
        """What a start with these weights would make otherwise, in one layer of each kind."""
        # With enable_lora, layers are within others of vLLM's.
        layers = {
            name.replace(".base_layer", ""): layer
            for name, layer in self._model.named_modules()
            if next(layer.parameters(recurse=False), None) is not None
        }
        device = next(self._model.parameters()).device
        twin, wrong = vllm.model_without_memory(self._config), []
        for name, right in vllm.layers_that_load(twin):
            with vllm.started_layer(twin, right, self._config, weights, device):
                actual: dict[str, Any] = dict(layers[name].named_parameters(recurse=False))
                actual["cpu_linear"] = vllm.packed_product(layers[name], right)
                expected: dict[str, Any] = dict(right.named_parameters(recurse=False))
                expected["cpu_linear"] = vllm.packed_product(right, right)
                wrong += [
                    f"{name}.{what}"
                    for what, value in expected.items()
                    if value is not None and not _same(actual.get(what), value)
                ]
        return wrong


def _way_in(config: Any, layout: Layout) -> tuple[list[str], InCheckpoint, list[str]]:
    """The names of a layout that a model needs, and what its checkpoint has of each.

    Tied names are among them if the model takes them, as it may have packed a copy for each. The
    third are messages, one for each weight that this stage of a pipeline does not use.

    Raises:
        ValueError: the model does not take all of these weights, or needs others.
    """
    stored = [entry.name for entry in layout.stored]
    if config.model_config.quantization is not None:
        logger.info("weights: names and shapes of a quantised model are not checked beforehand")
        return stored, next(_forms(config)), []
    entries = {entry.name: entry for entry in layout.entries}
    choices = [list(entries), stored] if len(entries) > len(stored) else [stored]
    # Each stage of a pipeline uses a part.
    in_stages = config.parallel_config.pipeline_parallel_size > 1
    differences: list[str] = []
    for in_checkpoint in _forms(config):
        for names in choices:
            given = _converted([entries[name] for name in names], in_checkpoint)
            unused, wrong = _differences(config, given)
            if not wrong and (in_stages or not unused):
                return names, in_checkpoint, unused
            # Where the model has not the other form either, those of the first are reported.
            differences = differences or unused + wrong
    raise ValueError(
        f"channel: expected the weights of {config.model_config.architecture} as its checkpoint "
        "has them, got others; create the channel from the model that the engine runs, from a peft "
        "model with merge_adapters=True, or from a dict with the names of its checkpoint"
        + listed(differences)
    )


def _forms(config: Any) -> Iterator[InCheckpoint]:
    yield lambda name, tensor: [(name, tensor)]
    # No checkpoint of the model may be known.
    with contextlib.suppress(ImportError, ValueError):
        yield transformers.in_checkpoint(config.model_config.hf_config)


def _converted(entries: Sequence[Entry], in_checkpoint: InCheckpoint) -> list[Entry]:
    converted = []
    for entry in entries:
        try:
            parts = in_checkpoint(entry.name, torch.empty(entry.shape, device="meta"))
        except (IndexError, RuntimeError) as error:
            raise ValueError(
                f"channel: expected a {entry.name} that a checkpoint has in parts, got "
                f"{described(entry)}, of which transformers says {error}; create the channel from "
                "the model that the engine runs"
            ) from error
        converted += [replace(entry, name=name, shape=tuple(x.shape)) for name, x in parts]
    return converted


def _differences(config: Any, entries: Sequence[Entry]) -> tuple[list[str], list[str]]:
    """What a model does not use of some weights, and what it refuses or lacks; a message each.

    They are tried on a copy of the model. Neither has memory.
    """
    model = vllm.model_without_memory(config)
    # One element stands for all of a tensor. Tensors on meta could not be copied from.
    weights = {e.name: torch.zeros((), dtype=e.dtype).expand(e.shape) for e in entries}
    copies = _Copies({storage_of(tensor): name for name, tensor in weights.items()})
    last = ""

    def given() -> Iterator[tuple[str, Tensor]]:
        nonlocal last
        for last in weights:
            yield last, weights[last]
        last = ""  # they may all be taken before one is loaded

    try:
        with copies, vllm.configured(config), torch.no_grad():
            model.load_weights(given())
    except Exception as error:
        return [], [f"{last or 'weights'}: {type(error).__name__}: {error or 'of another shape'}"]
    unused = [
        f"{entry.name}: expected no such entry, got {described(entry)}"
        for entry in entries
        # A model need not use the second name of a tied weight.
        if entry.name not in copies.used and entry.kind == "parameter" and entry.tied_to is None
    ]
    missing = [
        f"{name} of vLLM's model: expected {parameter.numel()} elements, got {count}"
        for name, parameter in model.named_parameters()
        if (count := copies.filled[storage_of(parameter)]) < parameter.numel()
    ]
    return unused, missing


class _Copies(DispatchMode):
    """Records which sources are used, and how many elements of each destination are filled."""

    def __init__(self, sources: dict[int, str]) -> None:
        super().__init__()
        self.names_of = {storage: {name} for storage, name in sources.items()}
        self.used: set[str] = set()
        self.filled: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [value for value in args if isinstance(value, Tensor)]
        names = set().union(*(self.names_of.get(storage_of(value), ()) for value in tensors))
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, Tensor) and names:
                self.names_of.setdefault(storage_of(made), set()).update(names)
        if writes(func) and tensors:
            self.filled[storage_of(tensors[0])] += tensors[0].numel()
            self.used |= names
        return result


def _same(one: Tensor | None, other: Tensor) -> bool:
    """Also where they are NaN."""
    if one is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
