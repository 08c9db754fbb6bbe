"""Loads weights with the names of a checkpoint into a vLLM model, which has other names."""

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

# The names and tensors that a checkpoint has for one weight of the trainer's model.
InCheckpoint = Callable[[str, Tensor], list[tuple[str, Tensor]]]

logger = logging.getLogger("fusedrl")


class ModelWeights:
    """Loads versions of a layout into a vLLM model.

    Attributes:
        unused: a message for each weight that this pipeline stage does not use; some stage has to.

    Raises:
        ValueError: the weights are not those of the model; the message lists the differences.
    """

    def __init__(self, model: Any, vllm_config: Any, layout: Layout) -> None:
        self._model = model
        self._config = vllm_config
        self._layout = layout
        self._names, self._in_checkpoint, self.unused = _match_checkpoint(vllm_config, layout)
        # A failed load resets this: it may leave layers that the next load treats differently.
        self._is_verified = False

    @torch.no_grad()
    def load(self, views: Sequence[Tensor]) -> None:
        """Load the version of these views; after an error it can be loaded again.

        Raises:
            RuntimeError: the model has other weights than an engine started with this version.
        """
        is_verified, self._is_verified = self._is_verified, False
        # Weights that a reload skips look right if the engine started with the same ones. So a
        # load that is not verified is preceded by one of dummy values, which no model has.
        dummies = [view.new_full((), 0.3).expand(view.shape) for view in views]
        for values in [views] if is_verified else [dummies, views]:
            weights = partial(self._checkpoint_weights, values)
            vllm.load_again(self._model, self._config, weights)
            if not is_verified and (wrong := self._mismatches(weights)):
                raise RuntimeError(
                    "engine: expected a reload to give the weights of a new engine, got other "
                    "weights; start a new engine for each version" + listed(wrong)
                )
        self._is_verified = True

    def _checkpoint_weights(self, views: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name in self._names:
            yield from self._in_checkpoint(name, views[self._layout.view_of[name]])

    def _mismatches(self, weights: vllm.Weights) -> list[str]:
        """The tensors, in one layer of each kind, that a new engine would have otherwise."""
        # With enable_lora, vLLM wraps layers in other layers.
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
                    if value is not None and not _same_bytes(actual.get(what), value)
                ]
        return wrong


def _match_checkpoint(config: Any, layout: Layout) -> tuple[list[str], InCheckpoint, list[str]]:
    """Match a layout to a model's checkpoint.

    Both of two tied names are loaded if the model accepts both, as it may have packed two copies.

    Returns:
        The names that the model needs, the form that they have in its checkpoint, and a message for
        each weight that this pipeline stage does not use.

    Raises:
        ValueError: the model does not accept all of these weights, or needs others.
    """
    stored = [entry.name for entry in layout.stored]
    if config.model_config.quantization is not None:
        logger.info("weights: names and shapes of a quantised model are not checked beforehand")
        return stored, next(_checkpoint_forms(config)), []
    entries = {entry.name: entry for entry in layout.entries}
    choices = [list(entries), stored] if len(entries) > len(stored) else [stored]
    # Each stage of a pipeline uses some of the weights.
    in_stages = config.parallel_config.pipeline_parallel_size > 1
    differences: list[str] = []
    for in_checkpoint in _checkpoint_forms(config):
        for names in choices:
            given = _converted([entries[name] for name in names], in_checkpoint)
            unused, wrong = _differences(config, given)
            if not wrong and (in_stages or not unused):
                return names, in_checkpoint, unused
            # If neither form fits, the differences of the first are reported.
            differences = differences or unused + wrong
    raise ValueError(
        f"channel: expected the weights of {config.model_config.architecture} as its checkpoint "
        "has them, got other weights; create the channel from the model that the engine runs, from "
        "a peft model with merge_adapters=True, or from a dict with the names of its checkpoint"
        + listed(differences)
    )


def _checkpoint_forms(config: Any) -> Iterator[InCheckpoint]:
    yield lambda name, tensor: [(name, tensor)]
    # transformers may not know a checkpoint of the model.
    with contextlib.suppress(ImportError, ValueError):
        yield transformers.in_checkpoint(config.model_config.hf_config)


def _converted(entries: Sequence[Entry], in_checkpoint: InCheckpoint) -> list[Entry]:
    converted = []
    for entry in entries:
        try:
            parts = in_checkpoint(entry.name, torch.empty(entry.shape, device="meta"))
        except (IndexError, RuntimeError) as error:
            raise ValueError(
                f"channel: expected a {entry.name} that transformers can convert, got "
                f"{described(entry)} and the error {error}; create the channel from the model that "
                "the engine runs"
            ) from error
        converted += [replace(entry, name=name, shape=tuple(x.shape)) for name, x in parts]
    return converted


def _differences(config: Any, entries: Sequence[Entry]) -> tuple[list[str], list[str]]:
    """What a model does not use of the weights, and what it refuses or lacks; a message each.

    They are loaded into a copy of the model. Neither the weights nor the copy use memory.
    """
    model = vllm.model_without_memory(config)
    # Expanded from one element each, since nothing can be copied from meta tensors.
    weights = {e.name: torch.zeros((), dtype=e.dtype).expand(e.shape) for e in entries}
    copies = _CopyRecorder({storage_of(tensor): name for name, tensor in weights.items()})
    last = ""

    def recorded() -> Iterator[tuple[str, Tensor]]:
        nonlocal last
        for last in weights:
            yield last, weights[last]
        last = ""  # the model may read all before it loads one

    try:
        with copies, vllm.configured(config), torch.no_grad():
            model.load_weights(recorded())
    except Exception as error:
        return [], [f"{last or 'weights'}: {type(error).__name__}: {error or 'wrong shape'}"]
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


class _CopyRecorder(DispatchMode):
    """Records which sources are used, and how many elements of each target are written."""

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


def _same_bytes(one: Tensor | None, other: Tensor) -> bool:
    """Whether tensors have equal bytes, so that NaN equals NaN."""
    if one is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
