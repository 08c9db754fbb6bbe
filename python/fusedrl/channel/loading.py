"""Loads the weights of a layout into a module, with or without a copy."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fusedrl.channel.adapters import has_adapters
from fusedrl.channel.layout import Layout, refuse_differences
from fusedrl.channel.tensors import (
    Weight,
    check_supported,
    described,
    facts,
    has_memory,
    is_dtensor,
    same_values,
    weights_in,
)
from fusedrl.compat.torch import copy_all

# Storages that `alias` gave to modules, which nothing may write to. A WeakSet would run Python code
# when one is freed, in which an interrupt would be lost.
_LENT: set[weakref.ref[torch.UntypedStorage]] = set()


class Target:
    """A module that the weights of a layout are loaded into, version after version.

    The module may be within DistributedDataParallel or ``torch.compile``. Parameters, buffers and
    submodules may be replaced later.

    Args:
        module: a module with the layout's names and shapes. Names that the layout ties may be
            separate tensors. One tensor may have two entries of the layout: :meth:`alias` and
            :meth:`copy` then check that their values are equal.
        layout: the layout of the weights.

    Raises:
        TypeError: an entry of the module is not a plain tensor.
        ValueError: names, shapes, kinds of dtype or ties differ; the message lists all differences.

    Example:
        >>> import torch
        >>> from fusedrl.channel.layout import Layout
        >>> from fusedrl.channel.loading import Target
        >>> module = torch.nn.Linear(1, 1)
        >>> layout = Layout.of(module)
        >>> views = layout.views(torch.zeros(layout.nbytes, dtype=torch.uint8))
        >>> Target(module, layout).alias(views)
        >>> module.weight.item(), module.weight.requires_grad
        (0.0, False)
    """

    def __init__(self, module: nn.Module, layout: Layout) -> None:
        self._module = weakref.ref(module)
        self.layout = layout
        self._plan()

    @torch.no_grad()
    def alias(self, views: Sequence[Tensor], flat: Tensor | None = None) -> None:
        """Make ``views`` the memory of the parameters, which then require no gradients.

        Buffers are copied, because a forward pass may write to them. The views must not be written
        to, and must stay valid while anything computes with the parameters.

        Args:
            views: one for each entry that is stored, as :meth:`Layout.views` makes them.
            flat: the memory for the parameters, if it is not that of ``views``. Its views are made
                one at a time, as so many at once make Python look for garbage.

        Raises:
            ValueError: parameters have another dtype or device (the message lists them), or views
                have different values for one tensor, or the module was made in inference mode.
                Nothing has changed then.
        """
        self._check(views, aliases=True)
        params = self._parameters
        for param, index, _ in params:
            view = views[index]
            if param.dtype != view.dtype or param.device != view.device:
                self._refuse_alias(views)
        _LENT.difference_update([storage for storage in list(_LENT) if storage() is None])
        lent = views if flat is None else [flat]
        _LENT.update(map(weakref.ref, {tensor.untyped_storage() for tensor in lent}))
        typed = {} if flat is None else {d: flat.view(d) for d in {view.dtype for view in views}}

        def view_of(index: int) -> Tensor:
            view = views[index]
            if flat is None:
                return view
            return typed[view.dtype].as_strided(view.shape, view.stride(), view.storage_offset())

        before = [(param, param.data, param.requires_grad) for param, *_ in params]
        try:
            copy_all(
                [tensor for tensor, *_ in self._buffers], [views[i] for _, i, _ in self._buffers]
            )
            for param, index, _ in params:
                param.data = view_of(index)
                if param.requires_grad:
                    param.requires_grad_(False)
        except BaseException:  # the caller releases the new memory, so no parameter may stay there
            for param, data, requires_grad in before:
                param.data = data
                param.requires_grad_(requires_grad)
            raise

    @torch.no_grad()
    def copy(self, views: Sequence[Tensor]) -> None:
        """Copy ``views`` into the parameters and buffers, which keep memory, dtype and device.

        Parameters that :meth:`alias` has pointed to other memory get memory of their own first.

        Args:
            views: one for each entry that is stored; any device and width of float.

        Raises:
            ValueError: tensors have another shape by now, or views have different values for one
                tensor, or the module was made in inference mode and this is outside of it. Nothing
                has changed then.
        """
        self._check(views, aliases=False)
        pairs = self._parameters + self._buffers
        with torch.inference_mode(False):  # tensors allocated in that mode could not be trained
            for param in filter(_is_lent, self.parameters):
                param.data = torch.empty_like(param)
        copy_all([tensor for tensor, *_ in pairs], [views[i] for _, i, _ in pairs])

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that were loaded last."""
        return [param for param, *_ in self._parameters]

    def _check(self, views: Sequence[Tensor], aliases: bool) -> None:
        """Check all that may have changed since the last load; nothing is written before."""
        module = self._module()
        assert module is not None  # the caller, which loads into it, keeps it alive
        if self._facts != facts(weights_in(module)):
            self._plan()
        if self._inference and (aliases or not torch.is_inference_mode_enabled()):
            raise ValueError(
                f"module: {self._inference[0]}: expected a tensor that can be written, got one of "
                "inference mode; make the module outside of torch.inference_mode()"
            )
        for tensor, _, name in self._buffers if aliases else self._parameters + self._buffers:
            if not has_memory(tensor):
                check_supported(name, tensor, "module")
        view_of = self.layout.view_of
        differences = [
            f"{name}: expected the values of {first}, since the module has one tensor for both, "
            "got others"
            for name, first, tensor in self._ties
            if not same_values(views[view_of[first]], views[view_of[name]], tensor.dtype)
        ]
        refuse_differences(
            "module", differences, "publish weights that are tied, or load into a model that is not"
        )

    def _plan(self) -> None:
        """Find the tensor for each entry; if the module is refused, the former plan stays."""
        module = self._module()
        assert module is not None  # the caller, which loads into it, keeps it alive
        found = weights_in(module)
        places, ties = _places(module, found, self.layout)
        parameters: dict[int, tuple[Tensor, int, str]] = {}
        buffers: dict[int, tuple[Tensor, int, str]] = {}
        for place in places:
            chosen = parameters if place.kind == "parameter" else buffers
            index = self.layout.view_of[place.name]
            chosen.setdefault(id(place.tensor), (place.tensor, index, place.name))
        self._parameters, self._buffers = list(parameters.values()), list(buffers.values())
        self._inference = [place.name for place in places if place.tensor.is_inference()]
        self._ties, self._facts = ties, facts(found)

    def _refuse_alias(self, views: Sequence[Tensor]) -> None:
        def placed(tensor: Tensor) -> str:
            return f"{described(tensor)} on {tensor.device}"

        differences = [
            f"{name}: expected {placed(views[i])}, got {placed(param)}"
            for param, i, name in self._parameters
            if placed(param) != placed(views[i])
        ]
        refuse_differences(
            "module",
            differences,
            "make it of the channel's dtype and device, or load with mode='copy'",
        )


def _places(
    module: nn.Module, found: Sequence[Weight], layout: Layout
) -> tuple[list[Weight], list[tuple[str, str, Tensor]]]:
    """The weight of a module for every entry of ``layout``, and the tensors with two entries.

    Each of the latter is a later entry, its first entry, and the tensor.
    """
    if layout.merged and has_adapters(module):
        raise ValueError(
            "module: expected a model without adapters for weights that they are merged into, got "
            "one with; load into the base model, or publish without merge_adapters"
        )
    places = {place.name: place for place in found}
    _, differences = layout.compared(places, "module", layout.stored)
    differences += [
        f"{entry.name}: expected {described(entry)}, got no such entry"
        for entry in layout.entries
        if entry.tied_to is not None and entry.name not in places
    ]
    refuse_differences(
        "module", differences, "load into a model of the published one's architecture"
    )
    loaded = [places[name] for name in layout.view_of]
    ties, one_tensor = [], {}
    for place in loaded:
        if is_dtensor(place.tensor):
            raise TypeError(
                f"module: {place.name}: expected a tensor of this process, got a DTensor; load "
                "into a module that is not sharded"
            )
        # One tensor for two entries can only be loaded if the values of both are equal.
        same = place.identity()
        first = one_tensor.setdefault(same, place.name)
        if layout.view_of[first] != layout.view_of[place.name]:
            ties.append((place.name, first, place.tensor))
    return loaded, ties


def own(parameters: Sequence[Tensor]) -> None:
    """Copy parameters that lie in a channel's memory, which has to be held, into their own."""
    with torch.inference_mode(False):
        for param in filter(_is_lent, parameters):
            param.data = param.data.clone()


def _is_lent(tensor: Tensor) -> bool:
    """Whether a tensor lies in a channel's memory."""
    return bool(_LENT) and weakref.ref(tensor.untyped_storage()) in _LENT
