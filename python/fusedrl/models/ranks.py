"""The ranks that share a model, and how they agree on each call before they run it."""

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

SILENCE = timedelta(seconds=20)  # after which a rank logs that it is waiting


class OtherRankFallsBack(RuntimeError):
    """Another rank falls back to the wrapper's code, so that all ranks have to."""


class Ranks(NamedTuple):
    """The process groups that share a model, by name; empty for a model of one process.

    ``gathers`` tells whether the forward pass of the module has collectives, as with FSDP. DDP only
    broadcasts buffers, before the module runs.
    """

    groups: dict[str, Any]
    gathers: bool = True

    def reduced(self, operation: Any, *values: float) -> list[float]:
        """Each value reduced over the ranks, all of which have to call it."""
        reduced = torch.tensor(values, dtype=torch.float64, device="cpu")
        for group in self.groups.values():
            reduced = reduced.to(_device_of(group))
            work: Any = distributed.all_reduce(reduced, operation, group=group, async_op=True)
            _wait(work, reduced.device)
        return reduced.tolist()


def _wait(work: Any, device: torch.device) -> None:
    """Wait for other ranks; on the CPU, log a warning if it takes long."""
    if device.type == "cpu":
        try:
            work.wait(SILENCE)
            return
        except RuntimeError:
            if not work.is_completed():
                logger.warning(
                    "rank %d: waited %d s for the other ranks to make the same call with a model; "
                    "for a call on one rank only, pass the module inside DDP",
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
    """The process groups, and whether a forward pass has collectives over each."""
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
        elif hasattr(parameter, "ds_id"):  # set by DeepSpeed ZeRO-3
            yield distributed.group.WORLD, True
    for mesh in meshes.values():
        for group in mesh.get_all_groups():
            yield group, True


def _device_of(group: Any) -> torch.device:
    """A device that the group's backend supports."""
    kinds = [pair.split(":")[0] for pair in str(distributed.get_backend_config(group)).split(",")]
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.accelerator.current_device_index())


class _Call:
    """A call that all ranks make: it ends without an error on all of them, or raises on all.

    Every exchange carries the number of the call and of the exchange, so that ranks detect if they
    are at different points. After an error there are no further exchanges.
    """

    def __init__(self, kind: str, model: nn.Module, groups: dict[str, Any]) -> None:
        self.ranks, self.over = Ranks(groups), False
        self._kind = f"{kind} with{'' if torch.is_grad_enabled() else 'out'} gradients"
        self._exchanges, self._model = 0, model
        self._number = _call_counts[model] = _call_counts.get(model, 0) + 1

    def meet(self, *values: int, failing: int = 0) -> list[int]:
        """The largest of up to four values over the ranks; raises if a rank is at another point."""
        self._exchanges += 1
        this = crc32(f"{self._kind}, {self._number}, {self._exchanges}".encode())
        with interrupted_later():  # an interrupt in between would leave the ranks out of step
            self.over = True
            numbers = failing, self._number, this, -this, *(*values, 0, 0, 0, 0)[:4]
            largest = map(int, self.ranks.reduced(distributed.ReduceOp.MAX, *numbers))
            failing, number, most, least, *found = largest
            _call_counts[self._model] = number  # ranks are in step again, also after an error
            self.over = bool(failing) or most != -least
        if failing:
            raise RuntimeError(
                f"model: expected the call to succeed on every rank, got an error on rank "
                f"{failing - 1}; see the error of that rank"
            )
        if self.over:
            raise RuntimeError(
                f"model: expected the same calls in the same order on every rank, got {self._kind} "
                f"as call {self._number} on this rank, and another call on another rank; make it "
                "on all, or pass the module inside DDP for a call on one rank only"
            )
        return found

    def fail(self) -> None:
        """Report an error of this rank to the other ranks, unless they have left the call."""
        if not self.over:
            with suppress(RuntimeError):  # the caller raises the original error
                self.meet(failing=distributed.get_rank() + 1)


# The number of calls with each model so far.
_call_counts: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
_running: ContextVar[_Call | None] = ContextVar("_running", default=None)


class Step(NamedTuple):
    """The exchanges between the ranks of a model in a call; no-ops for a model of one process."""

    call: _Call | None = None
    ranks: Ranks = Ranks({})

    def largest(self, *values: int, apart: bool = False) -> list[int]:
        """The largest of each of up to three values over the ranks.

        If a rank is ``apart``, as it falls back, the others raise :class:`OtherRankFallsBack`.
        """
        if self.call is None:
            return list(values)
        any_apart, *largest = self.call.meet(apart, *values)
        if any_apart and not apart:
            raise OtherRankFallsBack(
                "model: expected data that all ranks score in the same way, got data for which "
                "another rank falls back to its wrapper; use the same wrapper on all ranks"
            )
        return largest[: len(values)]

    @contextmanager
    def collective(self) -> Iterator[None]:
        """A block with collectives of the model, in which errors cannot be reported to other ranks.

        A forward pass of DDP has none.
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


ALONE = Step()  # for a model of one process


@contextmanager
def together(kind: str, *models: Any) -> Iterator[Step]:
    """A call that all ranks of the models make; nested blocks are part of the outermost call.

    An error of one rank in the block is raised on all, unless they are in a collective of the model
    already. The ranks agree at the end of the outermost block that none has failed, so everything
    that may fail belongs inside. The step is that of the first model that ranks share.
    """
    adapted = [getattr(model, "adapted", model) for model in models]
    spread = [(model, ranks) for model in adapted if (ranks := ranks_of(model)).groups]
    if not spread:
        for model in models if torch.is_grad_enabled() else ():
            _warn_of_ddp(model)
        yield ALONE
        return
    first, ranks = spread[0]
    groups = {name: group for _, each in spread for name, group in each.groups.items()}
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


_checked: WeakSet[nn.Module] = WeakSet()


def _warn_of_ddp(model: Any) -> None:
    """Log once for a module inside DDP that DDP does not see this call."""
    if not (distributed.is_available() and distributed.is_initialized()) or in_forward_of_ddp():
        return
    if not isinstance(model, nn.Module) or model in _checked:
        return
    _checked.add(model)
    # A module has no reference to its wrapper.
    wrappers = [x for x in gc.get_objects() if issubclass(type(x), DistributedDataParallel)]
    if any(part is model for wrapper in wrappers for part in wrapper.modules()):
        logger.warning(
            "%s: it is the module inside a DistributedDataParallel, which does not see this call, "
            "so gradients are not averaged over the ranks; pass the DistributedDataParallel",
            type(model).__name__,
        )
