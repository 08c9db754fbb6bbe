"""The publisher's end of a weight channel."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedrl import _host
from fusedrl.channel.checks import MAX_VERSION, SLICE_S, count, seconds
from fusedrl.channel.cuda import CudaMemory
from fusedrl.channel.follow import PUBLISHED
from fusedrl.channel.layout import Layout
from fusedrl.channel.memory import Closed, reserved
from fusedrl.channel.ranks import Ranks, ranks_of
from fusedrl.channel.reader import WeightHandle, WeightReader
from fusedrl.channel.tensors import (
    Weight,
    castable,
    fingerprint,
    is_dtensor,
    part_of_rank,
    weights_in,
    weights_of,
)


class ReaderInfo(NamedTuple):
    """A process that reads a channel: its ``pid``, and the versions that it has ``leased``.

    ``applied`` is the newest version that any of its threads has leased, ``None`` before the first.
    ``alive`` is false if it died without closing its reader; each death is reported once.
    """

    pid: int
    alive: bool
    leased: tuple[int, ...]
    applied: int | None


class Writing(_host.Write):
    """A slot that is being written: published when its block ends, discarded if the block raises.

    It is also discarded when this object is dropped. ``version`` is the number under which it will
    be published; ``views`` are tensors over it, one for each entry of the layout that is not tied.
    """

    __slots__ = ("views",)
    views: list[Tensor]

    @property
    def version(self) -> int:
        """The number under which the slot will be published; it can only be raised."""
        return super().version

    @version.setter
    def version(self, number: int) -> None:
        _host.Write.version.__set__(self, count("version", number, self.version, MAX_VERSION))


class WeightChannel:
    """Publishes versions of a model's weights to other processes on the same machine.

    :meth:`create` makes one. A reader leases one complete, numbered version without copying it.
    Neither side waits for the other while a slot is free. When a process dies, its leases are
    released, and no file is left. For a sharded model, one rank ``holds`` the slots.

    Example:
        >>> import torch
        >>> from fusedrl import WeightChannel
        >>> model = torch.nn.Linear(2, 1)
        >>> with WeightChannel.create(model) as channel:
        ...     version = channel.publish(model)
        ...     with channel.handle.open() as reader, reader.lease() as lease:
        ...         print(lease.version, bool((lease.weights["weight"] == model.weight).all()))
        1 True
    """

    def __init__(
        self,
        template: Any,
        layout: Layout,
        ranks: Ranks,
        memory: Any,
        timeout: float,
        rank_timeout: float,
    ) -> None:
        self.template = template
        self.layout = layout
        self.holds = memory is not None
        self.rank_timeout = rank_timeout
        self._timeout = timeout
        self._ranks = ranks
        self._call_name = f"publish in channel {ranks.round}"  # the same on all ranks
        self._last_version = -1  # used on a rank without slots
        self._cached_match: tuple[Any, dict[str, Weight]] = None, {}  # of the template
        self._end: Any = None
        if memory is not None:
            self._memory, self._end, session = memory
            self._handle = WeightHandle(os.getpid(), self._end.fd(), session)
            self._device = self._memory.device
            flat = map(self._memory.slot, range(self._end.slot_count()))
            self._views = list(map(layout.views, flat))
            PUBLISHED[session] = self

    @classmethod
    def create(
        cls,
        weights: Any,
        *,
        slots: int = 3,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        merge_adapters: bool = False,
        max_readers: int = 256,
        timeout: float = 60.0,
        holds: bool | None = None,
        rank_timeout: float = 20.0,
    ) -> WeightChannel:
        """Reserve the memory for a model's weights; nothing is published yet.

        All ranks of a sharded model (FSDP2, DTensor) create a channel, and publish at the same
        time. The first rank has the slots and the handle.

        Args:
            weights: a module, of which the state dict is published, or a tensordict or dict of
                tensors. Later versions need the same names and shapes; floats may have any dtype.
            slots: number of versions that fit into the memory, 2 to 64. The publisher never waits
                if there are always two more slots than leases.
            device: device of the slots, on which readers compute. ``None``: that of the weights,
                or the host for sharded weights, which would fill a GPU with whole models.
            dtype: dtype of all floating-point entries; ``None`` keeps theirs. As in ``Tensor.to``,
                values beyond the range of float16 become infinite.
            merge_adapters: whether to publish a peft model as its base model, with the adapters
                merged into the weights, as an engine or a plain model loads it.
            max_readers: largest number of concurrent readers.
            timeout: default timeout of the publisher and its readers, in seconds.
            holds: whether this rank of a sharded model has slots, such as the first rank of each
                machine; ``None``: only the first of all ranks does.
            rank_timeout: additional seconds that a rank waits for other ranks to make its call.

        Raises:
            TypeError: weights that are quantised, sparse, on meta, or sharded without DTensor.
            TimeoutError: other ranks of a sharded model did not call this; the message names them.
            RuntimeError: the memory cannot be reserved; the message has the size.
        """
        with Ranks.of(ranks_of(weights_of(weights).values())).step() as ranks:
            count("slots", slots, 2, 64)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and castable(dtype)):
                raise ValueError(
                    "dtype: expected a float of 16 bits or more such as torch.bfloat16, got "
                    f"{dtype!r}; pass such a torch.dtype, or None to keep the weights' dtypes"
                )
            count("max_readers", max_readers, 1, 4096)
            timeout = seconds("timeout", timeout)
            rank_timeout = seconds("rank_timeout", rank_timeout)
            layout = Layout.of(weights, dtype=dtype, merge_adapters=merge_adapters)
            first, *_ = layout.match(weights).values()
            where = torch.device(device or ("cpu" if ranks.ranks else first.tensor.device))
            holds = ranks.is_first if holds is None else holds
            memory = reserved(layout, where, slots, max_readers, timeout) if holds else None
            call = f"create a channel with layout {layout.hash[:12]}"
            if not any(ranks.gather(call, holds, rank_timeout)):
                raise ValueError(
                    f"holds: expected True on one of the ranks {list(ranks.ranks)}, got False on "
                    "all; leave it out to use the first rank"
                )
            return cls(weights, layout, ranks, memory, timeout, rank_timeout)

    @property
    def handle(self) -> WeightHandle:
        """The handle for readers on this machine; ``RuntimeError`` on a rank without slots."""
        self._require_slots()
        return self._handle

    @property
    def device(self) -> torch.device:
        """The device of the slots; ``RuntimeError`` on a rank without slots."""
        self._require_slots()
        return self._device

    def _require_slots(self) -> None:
        if not self.holds:
            raise RuntimeError(
                "channel: expected one with slots, got that of a rank without slots; use the rank "
                "where channel.holds is true"
            )

    @property
    def version(self) -> int | None:
        """The newest published version, ``None`` before the first."""
        last = self._end.version() if self.holds else self._last_version
        return None if last < 0 else last

    def publish(
        self, weights: Any = None, version: int | None = None, *, timeout: float | None = None
    ) -> int:
        """Copy weights into a free slot, make them the newest version, and return its number.

        On a GPU it copies on the current stream and waits for it. Sharded weights are gathered one
        tensor at a time.

        Args:
            weights: as for :meth:`create`; ``None``: those that the channel was created with.
            version: a number greater than the last one; ranks use the largest of theirs. ``None``:
                the next number, from 1 on, so that 0 can stand for a reader's initial weights.
            timeout: seconds to wait for a free slot; ``None``: the channel's timeout. Other ranks
                wait this much longer than ``rank_timeout`` for a rank that waits for a slot.

        Raises:
            ValueError: the weights have another layout (the message lists the differences), or the
                version is not greater than the last one. Nothing has changed.
            TimeoutError: readers hold all slots, or ranks are missing; the message names them.
            RuntimeError: another rank failed; nothing is published on any rank.
        """
        with self._ranks.step() as ranks:
            limit = seconds("timeout", timeout, self._timeout)
            found = self._match(weights)
            no_slot = nullcontext(SimpleNamespace(version=self._next_version(version), views=None))
            with self.writing(version, timeout=timeout) if self.holds else no_slot as slot:
                sharded = ranks.ranks and sum(is_dtensor(w.tensor) for w in found.values())
                call = f"{self._call_name} of {sharded} sharded tensors"
                slot.version = max(ranks.gather(call, slot.version, self.rank_timeout, limit))
                self.layout.write(found, slot.views)
                ranks.outcome(call, self.rank_timeout + limit)
            self._last_version = slot.version
            return slot.version

    def _match(self, weights: Any) -> dict[str, Weight]:
        """Like :meth:`Layout.match`, with a cache for the template while its tensors stay."""
        model = self.template if weights is None else weights
        if model is not self.template or self.layout.merged or not isinstance(model, nn.Module):
            return self.layout.match(model)
        weights_now = weights_in(model)
        # Memory may have been freed or replaced.
        places = [part_of_rank(weight.tensor).data_ptr() for weight in weights_now if weight.saved]
        now, (before, found) = (fingerprint(weights_now), places), self._cached_match
        if now != before:
            found = self.layout.match(model)
            # Not cached where tied names are separate tensors: their values can differ at any time.
            is_cacheable = len({id(w.tensor) for w in weights_now if w.saved}) == len(found)
            self._cached_match = now if is_cacheable else None, found
        return found

    def writing(self, version: int | None = None, *, timeout: float | None = None) -> Writing:
        """Write a slot directly, in a ``with`` block; it is published when the block ends.

        If the block raises, nothing is published. One block can be open at a time: a second one
        waits for the first, and times out if it is nested in it. A child that is forked within a
        block must not write: it would end with SIGSEGV. On a GPU, copy on the stream that is
        current when the block begins: the end of the block waits for it. Arguments and errors are
        those of :meth:`publish`.
        """
        self._require_slots()
        limit = seconds("timeout", timeout, self._timeout)
        for _ in self._polls(limit):
            writing = Writing(self._end)
            try:
                writing.version = self._next_version(version)
                if writing.slot is not None:
                    if isinstance(self._memory, CudaMemory):
                        writing.before_release = self._memory.copying()
                    writing.views = self._views[writing.slot]
                    return writing
            except BaseException:
                writing.abort()  # the error's traceback would keep the slot
                raise
        held = ["another publish or writing block that has not ended"] * self._end.writing()
        readers = self._end.readers(forget_dead=False)
        held += [f"pid {pid} holds versions {leased}" for pid, _, leased, _ in readers if leased]
        raise TimeoutError(
            f"timeout: expected a free slot within {limit} s, got none of {len(self._views)}: "
            f"{'; '.join(held) or 'readers have just released them'}; leave the writing() "
            "block, release leases, or create the channel with more slots"
        )

    def _polls(self, limit: float) -> Iterator[None]:
        """Yield now and whenever a reader makes progress, for ``limit`` seconds."""
        deadline = time.monotonic() + limit
        while True:
            progress = self._end.progress()
            yield
            if (remaining := deadline - time.monotonic()) <= 0:
                return
            self._end.wait(progress, min(remaining, SLICE_S))

    def _next_version(self, version: int | None) -> int:
        last = -1 if self.version is None else self.version
        number = count("version", max(last, 0) + 1 if version is None else version, 0, MAX_VERSION)
        if number <= last:
            raise ValueError(
                f"version: expected more than the published {last}, got {number}; versions have "
                "to increase: leave it out for the next one"
            )
        return number

    def readers(self) -> list[ReaderInfo]:
        """The processes that read this channel, including those that died since the last call.

        A death is not reported if more than ``max_readers`` readers have opened the channel since.
        """
        self._require_slots()
        return [
            ReaderInfo(pid, alive, tuple(leased), None if applied < 0 else applied)
            for pid, alive, leased, applied in self._end.readers(forget_dead=True)
        ]

    def close(self, timeout: float = 5.0) -> None:
        """Close the channel: no version follows, and readers keep the versions that they hold.

        On a GPU it waits up to ``timeout`` seconds for readers in other processes. Memory that they
        still use then is freed when this process ends.
        """
        is_closed = not self.holds or isinstance(self._end, Closed)
        if is_closed or self._handle.pid != os.getpid():
            return
        self._end.finish()
        if isinstance(self._memory, CudaMemory):
            others: set[int] = set()
            for _ in self._polls(timeout):
                readers = self._end.readers(forget_dead=False)
                others = {pid for pid, alive, *_ in readers if alive} - {os.getpid()}
                if not others:
                    break
            self._memory.close(sorted(others))
        self._memory, self._views = None, []  # drop references to the memory
        self._end.close()
        self._end = Closed(self._end.version())

    def __enter__(self) -> WeightChannel:
        """The channel."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.close()

    __reduce__ = WeightReader.__reduce__
