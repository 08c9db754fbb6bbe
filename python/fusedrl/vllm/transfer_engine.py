"""The end of a weight channel within a worker of a vLLM engine."""

# vLLM has an environment of its own, which the linters do not see.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import contextlib
import socket as sockets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from fusedrl.channel import WeightHandle, WeightReader
from fusedrl.channel.layout import listed
from fusedrl.channel.reader import Lease
from fusedrl.compat.vllm import connectors_that_keep, key_value_caches
from fusedrl.vllm.agreement import Ranks
from fusedrl.vllm.model_weights import ModelWeights
from fusedrl.vllm.pause_guard import PauseGuard, check_reachable
from fusedrl.vllm.updates import BUSY, Attempt

# CUDA graphs replay `forward` without calling it, so `compute_logits` is replaced too. Models that
# generate no tokens do not have the latter.
_RUNS = ("compute_logits", "forward")


@dataclass
class VersionUpdate:
    """Which version an engine is to load.

    Attributes:
        version: the version to load; another one would get a wrong number in the engine.
        timeout: seconds to wait for it; the channel's own if ``None``.
        attempt: the name of the :class:`Attempt`.
        keep: whether to hold the version afterwards, so that a later update can go back to it.
        verify: whether to compare every layer with what the channel has.
    """

    version: int
    timeout: float | None = None
    attempt: str = ""
    keep: bool = True
    verify: bool = False


@dataclass
class ChannelMessage(WeightTransferInitInfo, WeightTransferUpdateInfo):
    """A message of a trainer: the address of its channel, as plain JSON, and what to do with it.

    Attributes:
        pid: the publisher's process id, as the engine's processes see it.
        fd: the channel's file descriptor in the publisher's process.
        session: the channel's secret.
        socket: path of a Unix socket that passes the channel, where the engine sees other pids.
        hold: the fields of an :class:`Attempt`, for a server that a trainer is to pause.
        update: the fields of a :class:`VersionUpdate`, to load a version.
        undo: the name of an attempt; load what the model had before it.
        over: the name of an attempt; it has ended, and is not undone any more.
    """

    pid: int
    fd: int
    session: str = field(repr=False)
    socket: str | None = None
    hold: dict[str, Any] | None = None
    update: dict[str, Any] | None = None
    undo: str | None = None
    over: str | None = None


@dataclass(frozen=True)
class Held:
    """A version that a model has, leased so that it can be loaded again."""

    lease: Lease
    load: Callable[[], None]


@dataclass
class Change:
    """What an attempt has done to a model.

    Attributes:
        attempt: its name.
        undo: loads what the model had before; ``None`` if nothing holds that.
        version: that the whole model has got; ``None`` while it may have parts of two.
        held: the version, if it is to be held.
    """

    attempt: str
    undo: Callable[[], None] | None
    version: int | None = None
    held: Held | None = None


class ChannelWeightTransferEngine(WeightTransferEngine[ChannelMessage, ChannelMessage]):
    """Load versions of a :class:`WeightChannel` into the model of a vLLM worker.

    vLLM makes one for ``WeightTransferConfig(backend="fusedrl")``. A trainer's messages come to
    :meth:`init_transfer_engine`, since vLLM's own calls for an update have to be begun and ended,
    which a trainer that is killed in between does not do. All workers take each step or none does.
    The version before stays leased until the trainer says that an update is over, and is loaded
    again if the trainer says that it failed. Between the two a model that may have parts of two
    versions refuses to run.
    """

    init_info_cls = update_info_cls = ChannelMessage
    # The channel has the weights of the model, not those of its draft.
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._reader: WeightReader | None = None
        self._weights: ModelWeights | None = None
        self._is_in_parts = False  # the model has parts of two versions
        self._held: Held | None = None  # what the model has after the last update that is over
        self._change: Change | None = None  # of an update that is not over
        self._guard: PauseGuard | None = None

    def init_transfer_engine(self, init_info: ChannelMessage) -> None:
        """Do what a trainer asks for; without a further field, become a reader of its channel.

        Raises:
            RuntimeError, TimeoutError: the channel cannot be opened, the version cannot be leased,
                nothing holds the version to go back to, or another trainer updates the engine.
            ValueError: the channel's weights are not those of the engine's model; the message lists
                all differences.
            Exception: an error of vLLM's model while it is loaded, which then refuses to run.
        """
        if init_info.hold is not None:
            self._hold(init_info, Attempt(**init_info.hold))
        elif init_info.update is not None:
            self._update(init_info, VersionUpdate(**init_info.update))
        elif init_info.undo is not None:
            self._undo(init_info.undo)
        elif init_info.over is not None:
            self._end(init_info.over)
        else:
            self._open(init_info)

    def start_weight_update(self) -> None:
        """Change nothing: a version is loaded in one call."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As :meth:`receive_weights`, with the fields as a dict."""
        # The method of the base class synchronises an accelerator, and fails on a CPU.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: ChannelMessage) -> None:
        """As :meth:`init_transfer_engine`."""
        self.init_transfer_engine(update_info)

    def finish_weight_update(self) -> None:
        """Change nothing: a version is loaded in one call."""

    def shutdown(self) -> None:
        """Close the channels; the model keeps its weights."""
        readers = self._readers()
        self._reader = self._weights = self._held = self._change = None
        for reader in readers:
            reader.close()

    def _update(self, address: ChannelMessage, update: VersionUpdate) -> None:
        """Open the channel, lease a version, and load it; each on all ranks or none."""
        if self._change is not None and self._change.attempt != update.attempt:
            self._end(self._change.attempt)  # the message of its end was lost
        if not self._open(address):
            return
        reader, weights, ranks = self._reader, self._weights, Ranks.of_this_process()
        assert reader is not None and weights is not None
        with contextlib.ExitStack() as leased:

            def stage() -> tuple[Lease, Callable[[], None]]:
                lease = leased.enter_context(reader.lease(update.version, update.timeout))
                if lease.version != update.version:
                    raise RuntimeError(
                        f"version: expected {update.version}, got a channel that has published "
                        f"{lease.version} since; ask for that one"
                    )
                return lease, partial(weights.load, lease.views, update.verify)

            if (staged := ranks.all_or_none(stage)) is None:
                return
            lease, load = staged
            if (change := self._change) is None:
                change = self._change = Change(update.attempt, self._held and self._held.load)
            if not self._loaded(load, change):
                return
            change.version = update.version
            if update.keep:
                change.held = Held(lease, load)
                leased.pop_all()

    def _undo(self, attempt: str) -> None:
        """Load what the model had before an attempt, if that has touched the model."""
        change, ranks = self._change, Ranks.of_this_process()
        if change is None or change.attempt != attempt:
            return

        def former() -> Callable[[], None]:
            if change.undo is None:
                raise RuntimeError(
                    "engine: expected a version to go back to, got none: the weights that it "
                    "started with are in no channel, and keep_previous=False holds none; update it "
                    "again, or start a new one"
                )
            return change.undo

        load = ranks.all_or_none(former)
        if load is not None and self._loaded(load, change):
            self._change = None

    def _loaded(self, load: Callable[[], None], change: Change) -> bool:
        """Load weights on all ranks; whether that failed on none of them."""
        held, change.held, change.version = change.held, None, None
        self._release(held)
        _refuse_to_run(self.model)
        self._is_in_parts = True

        def attempt() -> bool:
            load()
            _clear(self.vllm_config)
            if self.device.type != "cpu":
                torch.accelerator.synchronize(self.device)
            return True

        if Ranks.of_this_process().all_or_none(attempt) is None:
            return False
        self._is_in_parts = False
        _let_run(self.model)
        return True

    def _end(self, attempt: str) -> None:
        """Hold the version that an attempt has loaded in the place of the one before."""
        if self._guard is not None and self._guard.attempt.name == attempt:
            self._guard.end()
        change = self._change
        if change is None or change.attempt != attempt:
            return
        self._change = None
        if change.version is not None:
            former, self._held = self._held, change.held
            self._release(former)

    def _release(self, held: Held | None) -> None:
        if held is not None:
            held.lease.release()
            self._close_unused(held.lease.reader)

    def _readers(self) -> set[WeightReader]:
        """Those of the channel that is read, and of versions that are held."""
        held = (self._held, self._change and self._change.held)
        return {self._reader, *(one.lease.reader for one in held if one)} - {None}

    def _close_unused(self, reader: WeightReader | None) -> None:
        if reader is not None and reader not in self._readers():
            reader.close()

    def _open(self, address: ChannelMessage) -> bool:
        """Read a channel; ``False``, on all but the last rank, if some worker cannot."""
        if self._reader is not None and address.session == self._reader.session:
            return True
        ranks = Ranks.of_this_process()
        with contextlib.ExitStack() as opened:

            def check() -> tuple[WeightReader, ModelWeights]:
                reader = opened.enter_context(_opened(address))
                check_connectors(self.vllm_config)
                return reader, ModelWeights(self.model, self.vllm_config, reader.layout)

            if (fitting := ranks.all_or_none(check)) is None:
                return False
            reader, weights = fitting
            unused = set.intersection(*map(set, ranks.gathered(weights.unused)))
            if ranks.all_or_none(lambda: check_used(unused)) is None:
                return False
            opened.pop_all()
            former, self._reader, self._weights = self._reader, reader, weights
            self._close_unused(former)
            return True

    def _hold(self, address: ChannelMessage, attempt: Attempt) -> None:
        """Watch the trainer of a channel until its update is over; only one of them at a time."""
        ranks, guard = Ranks.of_this_process(), self._guard

        def check() -> bool:
            if guard is not None and guard.is_watching and guard.session != address.session:
                raise RuntimeError(f"{BUSY}, got one of another trainer; wait until it is over")
            if ranks.rank == 0:
                check_reachable(attempt.server)
            return True

        if not ranks.all_or_none(check):
            return
        if guard is not None:
            guard.end()
        if self._open(address) and ranks.rank == 0:
            assert self._reader is not None
            is_dead = self._reader.is_publisher_dead
            self._guard = PauseGuard(attempt, address, is_dead, self._version_of)

    def _version_of(self, attempt: str) -> int | None:
        """The version that the whole model has by an attempt, if it has."""
        change = self._change
        return change.version if change is not None and change.attempt == attempt else None


def _opened(address: ChannelMessage) -> WeightReader:
    handle = WeightHandle(address.pid, address.fd, address.session)
    if address.socket is None:
        return handle.open()
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as socket:
        try:
            socket.connect(address.socket)
        except OSError as error:
            raise RuntimeError(
                f"socket: expected the trainer's Unix socket at {address.socket}, got "
                f"{error.strerror or error}; mount its folder into the engine's container"
            ) from error
        return handle.open(socket)


def check_used(unused: set[str]) -> bool:
    """Raise ``ValueError`` for weights that no stage of a pipeline uses."""
    if unused:
        raise ValueError(
            "channel: expected weights that the engine's model has, got others; create the channel "
            "from the model that the engine runs" + listed(sorted(unused))
        )
    return True


def check_connectors(vllm_config: Any) -> None:
    """Raise ``ValueError`` for an engine with a connector that keeps what it has stored."""
    if keeping := connectors_that_keep(vllm_config):
        raise ValueError(
            "engine: expected a KV connector that drops what it has stored (reset_cache), got "
            f"{', '.join(keeping)}, which would serve keys and values of former weights; start the "
            "engine without it"
        )


@torch.no_grad()
def _clear(vllm_config: Any) -> None:
    """Zero the caches of keys and values in which something is not finite.

    vLLM gives their blocks to other requests as they are, and masks what is behind the end of a
    request by a factor of zero, which does not hide NaN.
    """
    for cache in key_value_caches(vllm_config):
        # Sums, as booleans would take memory. In a wider dtype than the cache's they take a CPU far
        # longer, and one that overflows does no harm. Single bytes cannot be added.
        if cache.itemsize == 1 or not cache.sum().isfinite():
            cache.zero_()


def _refuse_to_run(model: nn.Module) -> None:
    """Make every run of a model fail, whereupon vLLM ends the engine."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            "model: expected the weights of one version, got parts of two, as loading failed; "
            "update the weights again before the engine generates"
        )

    for method in _RUNS:
        if hasattr(model, method):
            setattr(model, method, refuse)


def _let_run(model: nn.Module) -> None:
    """Undo :func:`_refuse_to_run`."""
    for method in _RUNS:
        vars(model).pop(method, None)
