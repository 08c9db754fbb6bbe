"""Loads the weights of a layout into a module, with or without a copy."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import is_

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fusedrl.channel.adapter_merging import has_adapters
from fusedrl.channel.layout import Layout
from fusedrl.channel.layout_entries import described, refuse_differences
from fusedrl.channel.sources import Place, module_places
from fusedrl.channel.tensors import (
    check_supported,
    converts,
    copy,
    has_memory,
    is_dtensor,
    same_values,
)

# Storages that `alias` gave to modules, which nothing may write to. The weak references keep their
# addresses from being used again.
_LENT: dict[int, StorageWeakRef] = {}


class Target:
    """A module that the weights of a layout are loaded into, version after version.

    The module may be within DistributedDataParallel or ``torch.compile``. Parameters, buffers and
    submodules may be replaced later.

    Args:
        module: a module with the layout's names and shapes. Names that the layout ties may be
            separate tensors. One tensor may have two entries of the layout: :meth:`alias` and
            :meth:`copy` then check that their values are equal.
        layout: the layout of the weights. If it is partial, ``module`` has other names too.

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
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"module: expected a module, got {type(module).__name__}; pass the torch.nn.Module "
                "that computes with the weights"
            )
        self._module = weakref.ref(module)
        self.layout = layout
        self._plan()

    def alias(self, views: Sequence[Tensor]) -> None:
        """Make ``views`` the memory of the parameters, which then require no gradients.

        Buffers are copied, because a forward pass may write to them. The views must not be written
        to, and must stay valid while anything computes with the parameters.

        Args:
            views: one for each entry that is stored, as :meth:`Layout.views` makes them.

        Raises:
            ValueError: parameters have another dtype or device (the message lists them), or views
                have different values for one tensor. Nothing has changed then.
        """
        self._check(views)
        params = self._parameters
        self._check_shapes(self._buffers, views)
        self._check_ties(views)
        for param, index, _ in params:
            view = views[index]
            if (
                param.dtype != view.dtype
                or param.device != view.device
                or param.shape != view.shape
            ):
                self._refuse_alias(views)
        _lend(views)
        before = [(param, param.data, param.requires_grad) for param, *_ in params]
        try:
            copy([tensor for tensor, *_ in self._buffers], [views[i] for _, i, _ in self._buffers])
            for param, index, _ in params:
                param.data = views[index]
                if param.requires_grad:
                    param.requires_grad_(False)
        except BaseException:  # the caller releases the new memory, so no parameter may stay there
            for param, data, requires_grad in before:
                param.data = data
                param.requires_grad_(requires_grad)
            raise

    def copy(self, views: Sequence[Tensor]) -> None:
        """Copy ``views`` into the parameters and buffers, which keep memory, dtype and device.

        Parameters that :meth:`alias` has pointed to other memory get memory of their own first.

        Args:
            views: one for each entry that is stored; any device and width of float.

        Raises:
            ValueError: tensors have another shape by now, or views have different values for one
                tensor. Nothing has changed then.
        """
        self._check(views)
        pairs = self._parameters + self._buffers
        self._check_shapes(pairs, views)
        self._check_ties(views)
        with torch.inference_mode(False):  # tensors allocated in that mode could not be trained
            for param, _, _ in self._parameters:
                if _LENT and param.untyped_storage()._cdata in _LENT:
                    param.data = torch.empty_like(param)
        copy([tensor for tensor, *_ in pairs], [views[i] for _, i, _ in pairs])

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that were loaded last."""
        return [param for param, *_ in self._parameters]

    def _check(self, views: Sequence[Tensor]) -> None:
        if len(views) != len(self.layout.stored):
            raise ValueError(
                f"views: expected {len(self.layout.stored)} tensors, got {len(views)}; make them "
                "with layout.views"
            )
        if self._stale():
            self._plan()

    def _check_shapes(
        self, pairs: Sequence[tuple[Tensor, int, str]], views: Sequence[Tensor]
    ) -> None:
        for tensor, _, name in pairs:
            if not has_memory(tensor):
                check_supported(name, tensor, "module")
        differences = [
            f"{name}: expected {tuple(views[i].shape)}, got {tuple(tensor.shape)}"
            for tensor, i, name in pairs
            if tensor.shape != views[i].shape
        ]
        refuse_differences("module", differences, "load into a model of the published one's shapes")

    def _check_ties(self, views: Sequence[Tensor]) -> None:
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

    def _stale(self) -> bool:
        return not (
            all(home.get(key) is tensor for home, key, tensor in self._buffer_homes)
            and all(
                len(home) == len(known) and all(map(is_, home.values(), known))
                for home, known in self._homes
            )
        )

    def _plan(self) -> None:
        """Find the tensor for each entry; if the module is refused, the former plan stays."""
        module = self._module()
        assert module is not None  # the caller, which loads into it, keeps it alive
        places, self._ties = _places(module, self.layout)
        parameters: dict[int, tuple[Tensor, int, str]] = {}
        buffers: dict[int, tuple[Tensor, int, str]] = {}
        for name, place in places.items():
            chosen = parameters if place.kind == "parameter" else buffers
            chosen.setdefault(id(place.tensor), (place.tensor, self.layout.view_of[name], name))
        self._parameters, self._buffers = list(parameters.values()), list(buffers.values())
        self._buffer_homes = [
            (s.home, s.key, s.tensor) for s in places.values() if s.home and s.kind == "buffer"
        ]
        homes = [home for m in module.modules() for home in (m._modules, m._parameters)]
        self._homes = [(home, list(home.values())) for home in homes if home]

    def _refuse_alias(self, views: Sequence[Tensor]) -> None:
        def placed(tensor: Tensor) -> str:
            return f"{described(tensor.dtype, tensor.shape)} on {tensor.device}"

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
    module: nn.Module, layout: Layout
) -> tuple[dict[str, Place], list[tuple[str, str, Tensor]]]:
    """The place of every entry of ``layout`` in ``module``, and the tensors with two entries.

    Each of the latter is given as its later entry, its first entry, and the tensor.
    """
    adapted = has_adapters(module)
    if layout.adapters == "merged" and adapted:
        raise ValueError(
            "module: expected a model without adapters for weights that they are merged into, got "
            "one with; load into the base model, or publish with adapters='only'"
        )
    if layout.partial and not adapted:
        raise ValueError(
            "module: expected a peft model for weights of adapters alone, got a "
            f"{type(module).__name__} without adapters; add them with get_peft_model, or publish "
            "with adapters='merged'"
        )
    places = {place.name: place for place in module_places(module)}
    known = {*layout.view_of, *layout.transient}
    differences, ties, one_tensor = [], [], {}
    for entry in layout.entries:
        place = places.get(entry.name)
        if place is None:
            differences.append(f"{entry.name}: expected {entry.described()}, got no such entry")
            continue
        tensor = place.tensor
        check_supported(place.name, tensor, "module")
        if is_dtensor(tensor):
            raise TypeError(
                f"module: {place.name}: expected a tensor of this process, got a DTensor; load "
                "into a module that is not sharded"
            )
        if tuple(tensor.shape) != entry.shape or not converts(entry.dtype, tensor.dtype):
            got = described(tensor.dtype, tensor.shape)
            differences.append(f"{entry.name}: expected {entry.described()}, got {got}")
        # One tensor for two entries can only be loaded if the values of both are equal.
        same = place.identity()
        first = entry.name if same is None else one_tensor.setdefault(same, entry.name)
        if layout.view_of[first] != layout.view_of[entry.name]:
            ties.append((entry.name, first, tensor))
    if not layout.partial:
        filled = {id(places[name].tensor) for name in layout.view_of if name in places}
        differences += [
            f"{name}: expected no such entry, got {described(s.tensor.dtype, s.tensor.shape)}"
            for name, s in places.items()
            # A further name of a tensor that is loaded needs no entry.
            if s.persistent and name not in known and id(s.tensor) not in filled
        ]
    refuse_differences(
        "module", differences, "load into a model of the published one's architecture"
    )
    return {name: places[name] for name in layout.view_of}, ties


def _lend(views: Sequence[Tensor]) -> None:
    lent = {view.untyped_storage()._cdata: view for view in views}
    for cdata in lent.keys() - _LENT.keys():
        for gone in [c for c, storage in list(_LENT.items()) if storage.expired()]:
            _LENT.pop(gone, None)
        _LENT[cdata] = StorageWeakRef(lent[cdata].untyped_storage())
