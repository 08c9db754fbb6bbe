"""A peft model's adapters: what an engine has to know of them, and how its worker takes them."""

# vLLM has an environment of its own, which the linters do not see.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fusedrl.channel import WeightChannel
from fusedrl.channel.adapter_merging import loaded
from fusedrl.channel.layout import Layout, listed
from fusedrl.compat.vllm import AdapterRoom

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

# Other initialisations change the base weights, and the engine has the base weights as they were.
_BEGINNINGS = ("gaussian", "eva", "orthogonal")
_REMEDY = "or create the channel with adapters='merged'"


@dataclass
class AdapterUpdate:
    """What a version of a peft model's adapters has beside their weights.

    Attributes:
        number: the number by which requests name the adapters, vLLM's ``lora_int_id``.
        scalings: the factor by which each layer multiplies what its adapter adds.
    """

    number: int
    scalings: dict[str, float]


class PeftAdapters:
    """The adapters whose weights a channel has.

    Args:
        channel: a channel with ``adapters="only"``.
        name: as ``lora_name`` of :class:`~fusedrl.vllm.EngineWeights`.

    Attributes:
        update: the number of these adapters, different for each name, and the scalings of the
            layers by their names in the channel.
        name: the name of these adapters in an engine.

    Raises:
        ValueError: the adapters are more than two matrices a layer; the message lists all problems.
    """

    def __init__(self, channel: WeightChannel, name: str | None) -> None:
        self._layout = channel.layout
        self._template = channel.template
        # Not the session itself, which is a secret.
        self.name = name or f"fusedrl-adapters-{_number(channel.handle.session)}"
        self.update = AdapterUpdate(_number(self.name), {})
        self.read(None)

    def read(self, weights: Any) -> None:
        """Read the scalings again.

        Args:
            weights: the weights that are published. If they are not a peft model, the scalings are
                read from the model that the channel was created from.

        Raises:
            ValueError: as for the class.
        """
        model = weights if isinstance(weights, nn.Module) else self._template
        self.update.scalings = _scalings(model, self._layout)


class LoraWeights:
    """Loads versions of the adapters of one model, whose own weights stay as they are.

    Args:
        model: vLLM's model.
        vllm_config: the configuration that the model was made with.
        layout: the layout of the adapters' weights, under peft's names.

    Attributes:
        unused: none; each adapter has to fit the model.

    Raises:
        ValueError: the engine takes no adapters, or these do not fit; the message lists all names
            and shapes that differ. Nothing is changed.
    """

    unused = ()

    def __init__(self, model: nn.Module, vllm_config: Any, layout: Layout) -> None:
        config = vllm_config.lora_config
        rank = max(e.shape[0] for e in layout.entries if layer_of(e.name)[1] == "lora_A")
        if config is None:
            raise ValueError(
                "engine: expected one that takes adapters, got one that was started without; "
                f"start it with enable_lora=True, max_lora_rank={rank}, {_REMEDY}"
            )
        if rank > config.max_lora_rank:
            raise ValueError(
                f"engine: expected one for adapters of rank {rank}, got max_lora_rank="
                f"{config.max_lora_rank}; start it with that of the adapters, {_REMEDY}"
            )
        self._room = AdapterRoom(model)
        self._dtype = config.lora_dtype
        self._views = {layer_of(e.name)[:2]: layout.view_of[e.name] for e in layout.entries}
        self._names = self._room.names_of(dict.fromkeys(layer for layer, _ in self._views))
        self._check_fit(layout)

    def _check_fit(self, layout: Layout) -> None:
        sizes, differences = self._room.sizes(), []
        for entry in layout.entries:
            layer, part, _ = layer_of(entry.name)
            inputs, outputs = sizes.get(self._names[layer], (None, None))
            what, size, got = (
                ("inputs", inputs, entry.shape[1])
                if part == "lora_A"
                else ("outputs", outputs, entry.shape[0])
            )
            if size is None:
                differences.append(f"{entry.name}: expected no such layer, got {entry.shape}")
            elif size != got:
                differences.append(f"{entry.name}: expected {size} {what}, got {got}")
        if differences:
            raise ValueError(
                "channel: expected adapters of linear layers of the engine's model, got others; "
                f"adapt the model that the engine runs, {_REMEDY}" + listed(differences)
            )

    @torch.no_grad()
    def staged(self, views: Sequence[Tensor], adapters: Any, _: bool) -> Callable[[], None]:
        """What puts a copy of one version in the place of the one before.

        Args:
            views: one for each stored entry, as :meth:`Layout.views` makes them.
            adapters: the fields of an :class:`AdapterUpdate`; ``None`` is refused.

        Raises:
            ValueError: there are scalings of other layers, or no room for more adapters.
        """
        if adapters is None:
            raise ValueError(
                "update: expected the number and the scalings of adapters, which a channel of "
                "adapters alone lacks, got none; update with EngineWeights"
            )
        update = AdapterUpdate(**adapters)
        others = self._room.adapters()
        if update.number not in others and len(others) >= self._room.capacity:
            raise ValueError(
                f"engine: expected room for these adapters, got {len(others)} others, numbers "
                f"{', '.join(map(str, others))}; start it with a larger max_cpu_loras, give "
                "these the lora_name of others that they may replace, or call remove_lora(number) "
                "of the engine for one that is not needed any more"
            )
        if update.scalings.keys() != self._names.keys():
            differing = sorted(update.scalings.keys() ^ self._names.keys())
            raise ValueError(
                f"scalings: expected one for each adapted layer, got others for {differing[:5]}; "
                "update from the model that the channel was created from"
            )

        def copied(layer: str, part: str) -> Tensor:
            return views[self._views[layer, part]].to(self._dtype, copy=True)

        matrices = {
            name: (copied(layer, "lora_A"), copied(layer, "lora_B"), update.scalings[layer])
            for layer, name in self._names.items()
        }
        return partial(self._room.put, update.number, matrices)

    def undo(self, adapters: Any) -> Callable[[], None]:
        """What puts those that the model has now, if any, in their place again."""
        number = AdapterUpdate(**adapters).number
        return partial(self._room.replace, number, self._room.adapters().get(number))


def lora_request(name: str, number: int) -> LoRARequest:
    """What a request passes to be answered by adapters that are in an engine's memory."""
    from vllm.lora.request import LoRARequest

    # An absolute path, as vLLM would look up any other name on the model hub.
    return LoRARequest(name, number, f"/fusedrl-adapters-{number}")


def _number(name: str) -> int:
    return int(hashlib.sha256(name.encode()).hexdigest()[:7], 16) + 1  # vLLM keeps them in 32 bits


def layer_of(name: str) -> tuple[str, str, str]:
    """Split an adapter weight's name into layer, ``lora_A`` or ``lora_B``, and adapter.

    Raises:
        ValueError: it is not the name of an adapter's weight.
    """
    layer, _, rest = name.rpartition(".lora_")
    part, _, adapter = rest.removesuffix(".weight").partition(".")
    if not layer or part not in ("A", "B") or not adapter or not rest.endswith(".weight"):
        raise ValueError("expected a weight of lora_A or lora_B, got another one that is trained")
    return layer, f"lora_{part}", adapter


def _scalings(model: nn.Module, layout: Layout) -> dict[str, float]:
    problems = [
        f"{entry.name}: tied to {entry.tied_to}" for entry in layout.entries if entry.tied_to
    ]
    layers, adapters = {}, set()
    for entry, place in zip(layout.stored, layout.matched(model), strict=True):
        try:
            layer, _, adapter = layer_of(entry.name)
        except ValueError as error:
            problems.append(f"{entry.name}: {error}")
        else:
            layers[id(place.tensor)] = layer
            adapters.add(adapter)
    if len(adapters) > 1:
        problems.append(f"expected one adapter, got {', '.join(sorted(adapters))}")
    scalings = {}
    part: Any
    for part in model.modules():
        if isinstance(part, loaded("peft.tuners.lora.layer", "LoraLayer")):
            for adapter in adapters.intersection(part.lora_A):
                layer = layers[id(part.lora_A[adapter].weight)]
                scalings[layer] = float(part.scaling[adapter])
                problems += _more_than_matrices(layer, part, adapter)
        elif isinstance(part, loaded("peft.peft_model", "PeftModel")):
            problems += _beginnings(part, adapters)
    if problems:
        raise ValueError(
            "channel: expected adapters that vLLM has, two matrices for each of some linear "
            "layers, got others; create the channel with adapters='merged'" + listed(problems)
        )
    return scalings


def _more_than_matrices(layer: str, part: Any, adapter: str) -> list[str]:
    problems = []
    if adapter not in part.active_adapters:
        problems.append(f"{layer}: expected {adapter!r} to be active, got {part.active_adapters}")
    if adapter in part.lora_variant:
        problems.append(f"{layer}: a {type(part.lora_variant[adapter]).__name__}")
    return problems


def _beginnings(model: Any, adapters: set[str]) -> list[str]:
    ways = {name: getattr(model.peft_config[name], "init_lora_weights", True) for name in adapters}
    return [
        f"init_lora_weights={way!r} of {name!r} changes the weights of the base"
        for name, way in ways.items()
        if isinstance(way, str) and way.lower() not in _BEGINNINGS
    ]
