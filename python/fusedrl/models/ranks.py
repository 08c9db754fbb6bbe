"""The ranks that share a model, and what they agree on before they run it together."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from fusedrl.channel.tensors import is_dtensor
from fusedrl.compat.torch import fsdp_meshes, in_forward_of_ddp, is_fully_sharded

logger = logging.getLogger("fusedrl")


class Apart(RuntimeError):
    """Another rank cannot compute its part from hidden states, so that no rank may."""


class Ranks(NamedTuple):
    """The ranks over which a model is spread.

    Args:
        groups: their process groups, each once.
        gathers: whether a forward pass has collectives within the module, as FSDP's has. DDP's has
            one of buffers, before the module runs.
    """

    groups: tuple[Any, ...]
    gathers: bool

    def largest(self, *values: int) -> list[int]:
        """The largest of each value over the ranks. Every rank has to call it."""
        return [int(value) for value in self._reduced(values, distributed.ReduceOp.MAX)]

    def total(self, *values: float) -> list[float]:
        """The sum of each value over the ranks. Every rank has to call it."""
        return self._reduced(values, distributed.ReduceOp.SUM)

    def _reduced(self, values: tuple[float, ...], operation: Any) -> list[float]:
        reduced = torch.tensor(values, dtype=torch.float64, device="cpu")
        for group in self.groups:
            reduced = reduced.to(_device_of(group))
            distributed.all_reduce(reduced, operation, group=group)
        return reduced.tolist()


def ranks_of(model: Any) -> Ranks | None:
    """The ranks that take part in a forward or backward pass; ``None`` for one process's model."""
    if not isinstance(model, nn.Module):
        return None
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    found = list(_groups_of(model))
    distinct = {group.group_name: group for group, _ in found}
    return Ranks(tuple(distinct.values()), any(gathers for _, gathers in found)) if found else None


def _groups_of(model: nn.Module) -> Iterator[tuple[Any, bool]]:
    """The groups, and whether a forward pass has collectives over them."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    meshes: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            yield module.process_group, False
        elif fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
            yield module.process_group, True
        elif is_fully_sharded(module):
            meshes.update((id(mesh), mesh) for mesh in fsdp_meshes(module))
        elif type(module).__module__.startswith("deepspeed"):
            yield distributed.group.WORLD, True
    for parameter in model.parameters():
        if is_dtensor(parameter):
            mesh = parameter.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
            meshes[id(mesh)] = mesh
        elif hasattr(parameter, "ds_id"):  # DeepSpeed's third stage marks what stays torch's
            yield distributed.group.WORLD, True
    for mesh in meshes.values():
        for group in mesh.get_all_groups():
            yield group, True


def _device_of(group: Any) -> torch.device:
    """A device whose tensors the group's backend takes."""
    kinds = [pair.split(":")[0] for pair in str(distributed.get_backend_config(group)).split(",")]
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.accelerator.current_device_index())


class Step:
    """What the ranks of a model agree on for one call. One process alone agrees with itself.

    From the beginning of a call until :meth:`close`, an error on a rank is an error on all, unless
    others are in a collective of the model's by then.

    Args:
        ranks: of the model; ``None`` for a model of this process.
    """

    def __init__(self, ranks: Ranks | None) -> None:
        self._ranks = ranks
        self._settled = ranks is None

    @property
    def alone(self) -> bool:
        """Whether the model is that of this process."""
        return self._ranks is None

    def begin(self) -> None:
        """A further call follows, on which the ranks have not agreed yet."""
        self._settled = self._ranks is None

    def agree(
        self, *, apart: bool = False, tries: bool = False, passes: int = 0
    ) -> tuple[bool, int]:
        """Whether any rank has to try the model, and the most forward passes of a rank.

        If any does, all of them try it, and agree once more. After the passes they :meth:`close`.

        Args:
            apart: this rank computes its part without this module.
            tries: this rank does not know yet what the model allows.
            passes: how many forward passes this rank makes, as far as it knows.

        Raises:
            RuntimeError: another rank has had an error.
            Apart: another rank computes without this module.
        """
        if self._ranks is None:
            return tries, passes
        any_apart, any_tries, most = self._meet(apart, tries, passes)
        self._settled = bool(any_apart)
        if any_apart and not apart:
            raise Apart(
                "model: expected data that every rank scores in one way, got such that another "
                "rank's wrapper scores by itself; give all ranks the same wrapper"
            )
        return bool(any_tries), most

    def close(self) -> None:
        """Every rank has made its forward passes, of which the backward pass may follow.

        Raises:
            RuntimeError: another rank has had an error.
        """
        if self._ranks is not None:
            self._meet(0, 0, 0)

    def fail(self) -> None:
        """Tell the ranks that wait for this one that it has had an error."""
        if not self._settled and self._ranks is not None:
            with suppress(RuntimeError):  # this rank's own error is the one to raise
                self._meet(0, 0, 0, failing=distributed.get_rank() + 1)

    def _meet(self, *values: int, failing: int = 0) -> list[int]:
        """The largest of each value over the ranks, if none of them has had an error."""
        assert self._ranks is not None
        with self.collective(always=True):
            failing, *largest = self._ranks.largest(failing, *values)
        self._settled = True  # whatever comes of it comes to all
        if failing:
            raise RuntimeError(
                f"model: expected a call that every rank can make, got an error on rank "
                f"{failing - 1}; see the error of that rank"
            )
        return largest

    @contextmanager
    def collective(self, always: bool = False) -> Iterator[None]:
        """A block in which others may be in a collective, so that they cannot be told of an error.

        Args:
            always: whatever is around the model.
        """
        try:
            yield
        except Exception:
            if self._ranks is not None and (always or self._ranks.gathers):
                self._settled = True
            raise

    def total(self, *values: float) -> list[float]:
        """The sum of each value over the ranks."""
        return list(values) if self._ranks is None else self._ranks.total(*values)

    def largest(self, *values: int) -> list[int]:
        """The largest of each value over the ranks."""
        return list(values) if self._ranks is None else self._ranks.largest(*values)


_steps: ContextVar[tuple[tuple[Any, Step], ...]] = ContextVar("_steps", default=())


@contextmanager
def together(model: Any) -> Iterator[Step]:
    """A call of a model that its ranks make together: the step of a caller, or a new one.

    Args:
        model: to call, a module around it, or :class:`fusedrl.models.WithoutAdapters`.
    """
    model = getattr(model, "adapted", model)
    of_callers = _steps.get()
    step = next((step for known, step in of_callers if known is model), None)
    if step is not None:
        step.begin()
        yield step
        return
    step = Step(ranks_of(model))
    if step.alone and torch.is_grad_enabled():
        _warn_of_ddp(model)
    token = _steps.set((*of_callers, (model, step)))
    try:
        yield step
    except Exception:
        step.fail()
        raise
    finally:
        _steps.reset(token)


_looked_at: WeakSet[nn.Module] = WeakSet()


def _warn_of_ddp(model: Any) -> None:
    """Say once of a module inside of DDP that DDP does not see what is computed with it."""
    if not (distributed.is_available() and distributed.is_initialized()) or in_forward_of_ddp():
        return
    if not isinstance(model, nn.Module) or model in _looked_at:
        return
    _looked_at.add(model)
    # Nothing leads from a module to what is around it.
    wrappers = [x for x in gc.get_objects() if issubclass(type(x), DistributedDataParallel)]
    if any(part is model for wrapper in wrappers for part in wrapper.modules()):
        logger.warning(
            "%s: it is the module of a DistributedDataParallel, which does not see this call, so "
            "that its gradients are not averaged over the ranks; pass the DistributedDataParallel",
            type(model).__name__,
        )
