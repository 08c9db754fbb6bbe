"""The ranks that share a model, and what they agree on before they run it together."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet
from zlib import crc32

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from fusedrl.channel.ranks import interrupted_later
from fusedrl.channel.tensors import is_dtensor
from fusedrl.compat.torch import fsdp_meshes, in_forward_of_ddp, is_fully_sharded

logger = logging.getLogger("fusedrl")

SILENCE = timedelta(seconds=20)  # after which a rank says that it waits for others


class Apart(RuntimeError):
    """Another rank cannot compute its part from hidden states, so that no rank may."""


class Ranks(NamedTuple):
    """The groups of ranks over which a model is spread, by name; none for one process's model.

    A forward pass that ``gathers`` has collectives within the module, as FSDP's has. DDP's has one
    of buffers, before the module runs.
    """

    groups: dict[str, Any]
    gathers: bool = True

    def reduced(self, operation: Any, *values: float) -> list[float]:
        """The largest of each value over the ranks, or the sum. Every rank has to call it."""
        reduced = torch.tensor(values, dtype=torch.float64, device="cpu")
        for group in self.groups.values():
            reduced = reduced.to(_device_of(group))
            work: Any = distributed.all_reduce(reduced, operation, group=group, async_op=True)
            _wait(work, reduced.device)
        return reduced.tolist()


def _wait(work: Any, device: torch.device) -> None:
    """Wait for other ranks, and say so after a while where that does not end the wait."""
    if device.type == "cpu":
        try:
            work.wait(SILENCE)
            return
        except RuntimeError:
            if not work.is_completed():
                logger.warning(
                    "rank %d: it has waited %d s for other ranks to make the same call of a model; "
                    "for a call of one rank alone, pass the module inside of DDP",
                    *(distributed.get_rank(), SILENCE.total_seconds()),
                )
    work.wait()


def ranks_of(model: Any) -> Ranks:
    """The ranks that take part in a forward or backward pass."""
    spread = distributed.is_available() and distributed.is_initialized()
    found = list(_groups_of(model)) if spread and isinstance(model, nn.Module) else []
    groups = {group.group_name: group for group, _ in found}
    return Ranks(groups, any(gathers for _, gathers in found))


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


class _Call:
    """A call that ranks make together: each of them gets to its end, or all have an error.

    Every agreement says which one it is, and of which call, so that a rank cannot take another one
    for its own. Nothing follows an error.
    """

    def __init__(self, kind: str, model: nn.Module, groups: dict[str, Any]) -> None:
        self.ranks, self.over = Ranks(groups), False
        self._kind = f"{kind} with{'' if torch.is_grad_enabled() else 'out'} gradients"
        self._met, self._model = 0, model
        self._number = _numbers[model] = _numbers.get(model, 0) + 1

    def meet(self, *values: int, failing: int = 0) -> list[int]:
        """The largest of four values over the ranks, or the error of a rank that is not here."""
        self._met += 1
        this = crc32(f"{self._kind}, {self._number}, {self._met}".encode())
        with interrupted_later():  # or a rank would not know whether the others have its numbers
            self.over = True
            numbers = failing, self._number, this, -this, *(*values, 0, 0, 0, 0)[:4]
            largest = map(int, self.ranks.reduced(distributed.ReduceOp.MAX, *numbers))
            failing, number, most, least, *found = largest
            _numbers[self._model] = number  # ranks are in step again, whatever was
            self.over = bool(failing) or most != -least
        if failing:
            raise RuntimeError(
                f"model: expected a call that every rank can make, got an error on rank "
                f"{failing - 1}; see the error of that rank"
            )
        if self.over:
            raise RuntimeError(
                f"model: expected the same calls in the same order on every rank, got {self._kind} "
                f"as call {self._number} of this rank, and another one on another rank; make it on "
                "all, or pass the module inside of DDP to a call of one rank"
            )
        return found

    def fail(self) -> None:
        """Tell the other ranks that this one has had an error, if they wait for it."""
        if not self.over:
            with suppress(RuntimeError):  # this rank's own error is the one to raise
                self.meet(failing=distributed.get_rank() + 1)


# How many calls of a model its ranks have begun.
_numbers: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
_running: ContextVar[_Call | None] = ContextVar("_running", default=None)


class Step(NamedTuple):
    """What the ranks of a model tell each other in a call, which is ``None`` for one process."""

    call: _Call | None = None
    ranks: Ranks = Ranks({})

    def largest(self, *values: int, apart: bool = False) -> list[int]:
        """The largest of each of up to three values over the ranks.

        A rank that computes its part ``apart`` from this module is :class:`Apart` for others.
        """
        if self.call is None:
            return list(values)
        any_apart, *largest = self.call.meet(apart, *values)
        if any_apart and not apart:
            raise Apart(
                "model: expected data that every rank scores in one way, got such that another "
                "rank's wrapper scores by itself; give all ranks the same wrapper"
            )
        return largest[: len(values)]

    @contextmanager
    def collective(self) -> Iterator[None]:
        """A block in which others may be in a collective, so that they cannot be told of an error.

        There are none within a forward pass of DDP.
        """
        try:
            yield
        except BaseException:
            if self.call is not None and self.ranks.gathers:
                self.call.over = True
            raise

    def total(self, *values: float) -> list[float]:
        """The sum of each value over the ranks."""
        if self.call is None:
            return list(values)
        with interrupted_later():
            self.call.meet()
            return self.ranks.reduced(distributed.ReduceOp.SUM, *values)


ALONE = Step()  # of one process's model


@contextmanager
def together(kind: str, *models: Any) -> Iterator[Step]:
    """A call that the ranks of some models make together: a part of the caller's, or a new one.

    An error of a rank in the block is an error of all, unless others are in a collective of the
    model's by then. The ranks agree at the end of the outermost block that none has had one, so
    that whatever may fail belongs into it. The step is that of the first model that they share.
    """
    asked = [getattr(model, "adapted", model) for model in models]
    spread = [(model, ranks) for model in asked if (ranks := ranks_of(model)).groups]
    if not spread:
        for model in models if torch.is_grad_enabled() else ():
            _warn_of_ddp(model)
        yield ALONE
        return
    first, ranks = spread[0]
    groups = {name: group for _, theirs in spread for name, group in theirs.groups.items()}
    outer = _running.get()
    if outer is not None and groups.keys() <= outer.ranks.groups.keys():
        yield Step(outer, ranks)
        return
    call = _Call(kind, first, groups)
    token = _running.set(call)
    try:
        yield Step(call, ranks)
        if not call.over:
            call.meet()
    except BaseException:
        call.fail()
        raise
    finally:
        _running.reset(token)


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
