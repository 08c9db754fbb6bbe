"""What an engine has to know of a peft model's adapters beside their weights."""

from __future__ import annotations

import hashlib
from typing import Any

from torch import nn

from fusedrl.channel import WeightChannel
from fusedrl.channel.adapter_merging import loaded
from fusedrl.channel.layout import Layout
from fusedrl.channel.layout_entries import listed

# Other initialisations change the base weights, and the engine has the base weights as they were.
_BEGINNINGS = ("gaussian", "eva", "orthogonal")


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


class PeftAdapters:
    """The adapters whose weights a channel has.

    Args:
        channel: a channel with ``adapters="only"``.

    Attributes:
        scalings: the factor by which each adapted layer multiplies what its adapter adds, by the
            layers' names in the channel.
        name: the name of these adapters in an engine.
        number: the number of these adapters in an engine, different for each channel.

    Raises:
        ValueError: the adapters are more than two matrices a layer; the message lists all problems.
    """

    def __init__(self, channel: WeightChannel) -> None:
        self._layout = channel.layout
        self._template = channel._template
        # Not the session itself, which is a secret.
        digest = hashlib.sha256(channel.handle.session.encode()).hexdigest()
        self.number = int(digest[:7], 16) + 1  # vLLM keeps them in 32 bits
        self.name = f"fusedrl-adapters-{self.number}"
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
        self.scalings = _scalings(model, self._layout)


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
    found = []
    if adapter not in part.active_adapters:
        found.append(f"{layer}: expected {adapter!r} to be active, got {part.active_adapters}")
    if adapter in part.lora_variant:
        found.append(f"{layer}: a {type(part.lora_variant[adapter]).__name__}")
    return found


def _beginnings(model: Any, adapters: set[str]) -> list[str]:
    ways = {name: getattr(model.peft_config[name], "init_lora_weights", True) for name in adapters}
    return [
        f"init_lora_weights={way!r} of {name!r} changes the weights of the base"
        for name, way in ways.items()
        if isinstance(way, str) and way.lower() not in _BEGINNINGS
    ]
