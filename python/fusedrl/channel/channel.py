"""The writing end of a weight channel."""

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
    facts,
    is_dtensor,
    part_of_rank,
    weights_in,
    weights_of,
)


class ReaderInfo(NamedTuple):
    """A process that reads a channel, by its own ``pid``, with the versions that it has ``leased``.

    ``applied`` is the newest that any of its threads has leased, ``None`` before the first. It is
    not ``alive`` if it died without closing its reader, which is told once.
    """

    pid: int
    alive: bool
    leased: tuple[int, ...]
    applied: int | None


class Writing(_host.Write):
    """A slot that is being written: published when its block ends, given up where that raises.

    It is given up when this is dropped, too. ``version`` is the number under which it will be
    published, ``views`` are tensors over it, one for each entry of the layout that is not tied.
    """

    __slots__ = ("views",)
    views: list[Tensor]

    @property
    def version(self) -> int:
        """The number under which it will be published; it can only be raised."""
        return super().version

    @version.setter
    def version(self, number: int) -> None:
        _host.Write.version.__set__(self, count("version", number, self.version, MAX_VERSION))


class WeightChannel:
    """Publishes versions of a model's weights to the processes of a machine.

    :meth:`create` makes one. Readers lease one complete version, without a copy, and know its
    number. Neither side waits for the other while a slot is free. A process that dies releases what
    it holds, and the memory belongs to no file. Of the ranks of a sharded model, one ``holds`` it.

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
        self, template: Any, layout: Layout, ranks: Ranks, memory: Any, timeout: float, late: float
    ) -> None:
        self.template = template
        self.layout = layout
        self.holds = memory is not None
        self.rank_timeout = late
        self._timeout = timeout
        self._ranks = ranks
        self._call = f"publish in channel {ranks.round}"  # of those that these ranks have created
        self._last = -1  # the version that a rank without slots has taken part in
        self._known: tuple[Any, dict[str, Weight]] = None, {}  # the template's weights
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

        Every rank of a model that is sharded over ranks (FSDP2, DTensor) creates a channel, and
        publishes with it at the same time. The first of them has the slots and the handle.

        Args:
            weights: a module, which stands for the entries of its state dict, or a tensordict or
                dict of tensors. What is published later has the same names and shapes, with floats
                of any dtype.
            slots: number of versions that fit into the memory, 2 to 64. The publisher never waits
                if there are two more slots than leases at any time.
            device: where the slots lie and readers compute. ``None`` takes that of the weights, and
                host memory for sharded weights: beside its shard, a GPU would hold whole models.
            dtype: of all floating entries in the channel; their own if ``None``. As in
                ``Tensor.to``, what is beyond the range of float16 becomes infinite in it.
            merge_adapters: whether a peft model is published as its base model, with the adapters
                merged into the weights, which is what an engine or a plain model loads.
            max_readers: largest number of readers at a time.
            timeout: seconds that publisher and readers wait unless a call says otherwise.
            holds: whether this rank of a sharded model has slots, such as the first rank of each
                machine; ``None`` for the first rank of all.
            rank_timeout: seconds that a rank waits, besides, for the others to make the same call.

        Raises:
            TypeError: weights without plain bytes: quantised, sparse, on meta or sharded by others.
            TimeoutError: other ranks of a sharded model do not call this; the message names them.
            RuntimeError: the memory is refused; the message says how much was wanted.
        """
        with Ranks.of(ranks_of(weights_of(weights).values())).together() as ranks:
            count("slots", slots, 2, 64)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and castable(dtype)):
                raise ValueError(
                    "dtype: expected a float of 16 bits or more such as torch.bfloat16, got "
                    f"{dtype!r}; pass such a torch.dtype, or None for the weights' own"
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
                    "all; leave it out for the first of them"
                )
            return cls(weights, layout, ranks, memory, timeout, rank_timeout)

    @property
    def handle(self) -> WeightHandle:
        """What processes of this machine open to read; ``RuntimeError`` on a rank without slots."""
        self._require_slots()
        return self._handle

    @property
    def device(self) -> torch.device:
        """Where the slots lie; ``RuntimeError`` on a rank without slots."""
        self._require_slots()
        return self._device

    def _require_slots(self) -> None:
        if not self.holds:
            raise RuntimeError(
                "channel: expected one with slots, got that of a rank without; ask the rank whose "
                "channel has holds=True"
            )

    @property
    def version(self) -> int | None:
        """The newest version that is published, ``None`` before the first."""
        last = self._end.version() if self.holds else self._last
        return None if last < 0 else last

    def publish(
        self, weights: Any = None, version: int | None = None, *, timeout: float | None = None
    ) -> int:
        """Copy weights into a free slot and make them the newest version.

        On a GPU it waits for the current stream, on which it copies, and so does a writing block.
        Sharded weights are gathered one tensor at a time.

        Args:
            weights: as for :meth:`create`; those that the channel was created with if ``None``.
            version: a number greater than the last one, which is returned; of ranks, the largest.
                ``None`` counts one more, from 1, so that 0 can stand for a reader's own weights.
            timeout: seconds to wait for a free slot; the channel's own if ``None``. Ranks wait so
                much longer than ``rank_timeout`` for one that waits for a slot.

        Raises:
            ValueError: the weights have another layout (the message lists the differences), or the
                version is not greater than the last one. Nothing has changed then.
            TimeoutError: readers hold all slots, or other ranks do not call this; who, is said.
            RuntimeError: another rank had an error; nothing is published on any rank then.
        """
        with self._ranks.together() as ranks:
            limit = seconds("timeout", timeout, self._timeout)
            found = self._match(weights)
            nowhere = nullcontext(SimpleNamespace(version=self._next(version), views=None))
            with self.writing(version, timeout=timeout) if self.holds else nowhere as slot:
                sharded = ranks.ranks and sum(is_dtensor(w.tensor) for w in found.values())
                call = f"{self._call} of {sharded} sharded tensors"
                slot.version = max(ranks.gather(call, slot.version, self.rank_timeout, limit))
                self.layout.write(found, slot.views)
                ranks.outcome(call, self.rank_timeout + limit)
            self._last = slot.version
            return slot.version

    def _match(self, weights: Any) -> dict[str, Weight]:
        """As :meth:`Layout.match`; the template's as they matched last, if they are the same."""
        model = self.template if weights is None else weights
        if model is not self.template or self.layout.merged or not isinstance(model, nn.Module):
            return self.layout.match(model)
        walked = weights_in(model)
        # Memory may be freed, or be another one.
        places = [part_of_rank(weight.tensor).data_ptr() for weight in walked if weight.saved]
        now, (before, found) = (facts(walked), places), self._known
        if now != before:
            found = self.layout.match(model)
            # Names that the layout ties may be two tensors, whose values can differ at any time.
            alone = len({id(w.tensor) for w in walked if w.saved}) == len(found)
            self._known = now if alone else None, found
        return found

    def writing(self, version: int | None = None, *, timeout: float | None = None) -> Writing:
        """Write a slot yourself, in a ``with`` block; it is published when the block ends.

        If the block raises, nothing is published. There is one block at a time: another waits for
        its end, in vain if that is the block around it. A child that is forked within a block
        cannot write: it ends with SIGSEGV if it tries. On a GPU, copy on the stream that is
        current when the block begins: its end waits for that one. Arguments and errors are those of
        :meth:`publish`.
        """
        self._require_slots()
        limit = seconds("timeout", timeout, self._timeout)
        for _ in self._looks(limit):
            writing = Writing(self._end)
            try:
                writing.version = self._next(version)
                if writing.slot is not None:
                    if isinstance(self._memory, CudaMemory):
                        writing.before_release = self._memory.copying()
                    writing.views = self._views[writing.slot]
                    return writing
            except BaseException:
                writing.abort()  # the traceback of the error would keep the slot
                raise
        held = ["another publish or writing block that has not ended"] * self._end.writing()
        readers = self._end.readers(forget_dead=False)
        held += [f"pid {pid} holds versions {leased}" for pid, _, leased, _ in readers if leased]
        raise TimeoutError(
            f"timeout: expected a free slot within {limit} s, got none of {len(self._views)}: "
            f"{'; '.join(held) or 'readers have just released them'}; publish after the block, "
            "release leases, or create the channel with more slots"
        )

    def _looks(self, limit: float) -> Iterator[None]:
        """The times to look at the readers within some seconds: now, and whenever one moves."""
        deadline = time.monotonic() + limit
        while True:
            progress = self._end.progress()
            yield
            if (remaining := deadline - time.monotonic()) <= 0:
                return
            self._end.wait(progress, min(remaining, SLICE_S))

    def _next(self, version: int | None) -> int:
        last = -1 if self.version is None else self.version
        number = count("version", max(last, 0) + 1 if version is None else version, 0, MAX_VERSION)
        if number <= last:
            raise ValueError(
                f"version: expected more than the published {last}, got {number}; versions only "
                "grow: leave it out for the next one"
            )
        return number

    def readers(self) -> list[ReaderInfo]:
        """The processes that read this channel, including those that died since the last call.

        A death is not told of if more than ``max_readers`` have opened the channel since.
        """
        self._require_slots()
        return [
            ReaderInfo(pid, alive, tuple(leased), None if applied < 0 else applied)
            for pid, alive, leased, applied in self._end.readers(forget_dead=True)
        ]

    def close(self, timeout: float = 5.0) -> None:
        """Close the channel: no version follows, and readers keep the versions that they hold.

        On a GPU it waits for at most ``timeout`` seconds for readers in other processes. Memory
        that they still use after that is not freed before this process ends.
        """
        is_closed = not self.holds or isinstance(self._end, Closed)
        if is_closed or self._handle.pid != os.getpid():
            return
        self._end.finish()
        if isinstance(self._memory, CudaMemory):
            others: set[int] = set()
            for _ in self._looks(timeout):
                readers = self._end.readers(forget_dead=False)
                others = {pid for pid, alive, *_ in readers if alive} - {os.getpid()}
                if not others:
                    break
            self._memory.close(sorted(others))
        self._memory, self._views = None, []  # nothing of this keeps the memory
        self._end.close()
        self._end = Closed(self._end.version())

    def __enter__(self) -> WeightChannel:
        """The channel."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.close()

    __reduce__ = WeightReader.__reduce__
