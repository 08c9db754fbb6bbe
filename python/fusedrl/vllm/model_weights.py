"""Loads weights under the names of a checkpoint into a vLLM model, which has other names."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fusedrl.channel.layout import Entry, Layout, listed
from fusedrl.compat import vllm
from fusedrl.compat.torch import DispatchMode, storage_of, writes

logger = logging.getLogger("fusedrl")

_CPU = torch.device("cpu")


class ModelWeights:
    """Loads the versions of a layout into one model.

    Args:
        model: vLLM's model, which fuses parameters of several layers of a checkpoint into one, and
            has some in another form.
        vllm_config: the configuration that the model was made with.
        layout: the layout of the weights.

    Raises:
        ValueError: the weights are not those of the model, or vLLM would load them wrongly; the
            message lists what does not fit. The model is not changed.
    """

    def __init__(self, model: Any, vllm_config: Any, layout: Layout) -> None:
        if layout.adapters == "only":
            raise ValueError(
                "channel: expected all weights of a model, got those of its adapters alone; update "
                "with EngineWeights, or create the channel with adapters='merged'"
            )
        self._model = model
        self._config = vllm_config
        self._layout = layout
        self._names = names_for(vllm_config, layout)
        self.check_loads_again()
        # A load that failed may have left layers which the next one treats in another way.
        self._is_known_to_load = False

    def check_loads_again(self) -> None:
        """Raise ``ValueError`` for a model on a CPU that a load would leave with wrong weights.

        On a GPU, whose memory may be full, this is found out by the first load.
        """
        if any(parameter.device != _CPU for parameter in self._model.parameters()):
            return
        entries = {entry.name: entry for entry in self._layout.entries}
        former, new = (_numbers([entries[name] for name in self._names], seed) for seed in (0, 1))
        twin = vllm.model_without_memory(self._config)

        @contextmanager
        def rehearsed(name: str) -> Iterator[nn.Module]:
            """A layer that has other weights first, and then these."""
            layer = twin.get_submodule(name)
            with vllm.started_layer(twin, layer, self._config, former, _CPU):
                load = nn.ModuleList([layer])
                vllm.load_again(load, self._config, lambda: twin.load_weights(iter(new)))
                yield layer

        if wrong := _wrong_layers(rehearsed, self._config, new, _CPU):
            raise ValueError(
                "engine: expected weights that vLLM can load again, got some that would be others "
                "than after a start; run this model on a GPU, or start a new engine for each "
                "version" + listed(wrong)
            )

    def staged(self, views: Sequence[Tensor], adapters: Any) -> Callable[[], None]:
        """What loads one version, whose views may be freed afterwards."""
        return lambda: self.load(views)

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
        vllm.load_again(self._model, self._config, lambda: self._model.load_weights(iter(weights)))
        vllm.drop_adapters(self._model)
        wrong = [] if known else self._wrong_after(weights)
        if wrong:
            raise RuntimeError(
                "engine: expected the weights that it would start with, got others after vLLM had "
                "loaded them again; start a new engine for each version" + listed(wrong)
            )
        self._is_known_to_load = True

    def _wrong_after(self, weights: vllm.Weights) -> list[str]:
        """What in the model differs from what a start with these weights would make."""
        # Layers with adapters are within others of vLLM's.
        layers = {
            name.replace(".base_layer", ""): layer
            for name, layer in self._model.named_modules()
            if next(layer.parameters(recurse=False), None) is not None
        }

        @contextmanager
        def loaded(name: str) -> Iterator[nn.Module]:
            yield layers[name]

        device = next(self._model.parameters()).device
        return _wrong_layers(loaded, self._config, weights, device)


def names_for(vllm_config: Any, layout: Layout) -> list[str]:
    """The names of a layout under which a model of this configuration gets its weights.

    Tied names are among them if the model takes them, as it may have packed a copy for each.

    Raises:
        ValueError: the model does not take all of these weights, or needs others.
    """
    stored, every = [e.name for e in layout.stored], [e.name for e in layout.entries]
    if vllm_config.model_config.quantization is not None:
        logger.info("weights: names and shapes of a quantised model are not checked beforehand")
        return stored
    entries = {entry.name: entry for entry in layout.entries}
    differences: list[str] = []
    for names in [every, stored] if len(every) > len(stored) else [stored]:
        differences = _differences(vllm_config, [entries[name] for name in names])
        if not differences:
            return names
    raise ValueError(
        f"channel: expected the weights of {vllm_config.model_config.architecture} as its "
        "checkpoint has them, got others; create the channel from the model that the engine "
        "runs, or from a dict with the names of its checkpoint" + listed(differences)
    )


def _differences(vllm_config: Any, entries: Sequence[Entry]) -> list[str]:
    """Try the weights on a copy of the model without memory, and return what does not fit.

    The copy takes the weights, which have no memory either, as the engine's own model would.
    """
    model = vllm.model_without_memory(vllm_config)
    # One element stands for all of a tensor. Tensors on meta could not be copied from.
    weights = {e.name: torch.zeros((), dtype=e.dtype).expand(e.shape) for e in entries}
    copies = _Copies({storage_of(tensor): name for name, tensor in weights.items()})
    try:
        with copies, vllm.configured(vllm_config), torch.no_grad():
            model.load_weights(list(weights.items()))
    except Exception:
        return _refused(vllm_config, weights)
    unused = [
        f"{entry.name}: expected no such entry, got {entry.described()}"
        for entry in entries
        # A model need not use the second name of a tied weight.
        if entry.name not in copies.used and entry.kind == "parameter" and entry.tied_to is None
    ]
    missing = [
        f"{name} of vLLM's model: expected {parameter.numel()} elements, got {count}"
        for name, parameter in model.named_parameters()
        if (count := copies.filled[storage_of(parameter)]) < parameter.numel()
    ]
    return unused + missing


def _refused(vllm_config: Any, weights: dict[str, Tensor]) -> list[str]:
    """The error of a model for each of the weights that it refuses."""
    model, refused = vllm.model_without_memory(vllm_config), []
    with vllm.configured(vllm_config), torch.no_grad():
        for name, tensor in weights.items():
            try:
                model.load_weights([(name, tensor)])
            except Exception as error:
                text = str(error) or "no such entry, or of another shape"
                refused.append(f"{name}, {tuple(tensor.shape)}: {type(error).__name__}: {text}")
    return refused or ["they are refused together, though not one by one"]


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


def _wrong_layers(
    loaded: Callable[[str], AbstractContextManager[nn.Module]],
    vllm_config: Any,
    weights: vllm.Weights,
    device: torch.device,
) -> list[str]:
    """The parameters that a load left with other bits than a start of the engine would.

    Args:
        loaded: a layer that was loaded again, by its name; called for one layer of each kind.
        vllm_config: the configuration of the model.
        weights: all that were loaded, by the names of the model's checkpoint.
        device: where the layers are.
    """
    model, wrong = vllm.model_without_memory(vllm_config), []
    for name, right in vllm.kinds_of_layers(model):
        with (
            torch.no_grad(),
            vllm.started_layer(model, right, vllm_config, weights, device),
            loaded(name) as layer,
        ):
            actual: dict[str, Any] = dict(layer.named_parameters(recurse=False))
            actual["cpu_linear"] = vllm.packed_product(layer, right)
            expected: dict[str, Any] = dict(right.named_parameters(recurse=False))
            expected["cpu_linear"] = vllm.packed_product(right, right)
            wrong += [
                f"{name}.{what}"
                for what, value in expected.items()
                if value is not None and not _same_bits(actual.get(what), value)
            ]
    return wrong


def _same_bits(one: Tensor | None, other: Tensor) -> bool:
    """Also where they are NaN."""
    if one is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _numbers(entries: Sequence[Entry], seed: int) -> list[tuple[str, Tensor]]:
    """A tensor without regularities for each entry, all in the same little memory."""
    steps = {e.name: [7**k for k in reversed(range(len(e.shape)))] for e in entries}
    size = 1 + max(
        sum((n - 1) * step for n, step in zip(e.shape, steps[e.name], strict=True)) for e in entries
    )
    numbers = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    stored = {dtype: numbers.to(dtype) for dtype in {e.dtype for e in entries}}
    return [(e.name, stored[e.dtype].as_strided(e.shape, steps[e.name])) for e in entries]
