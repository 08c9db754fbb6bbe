"""The end of a weight channel within a worker of a vLLM engine."""

# vLLM has an environment of its own, which the linters do not see.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import logging
import socket as sockets
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.lora.lora_model import LoRAModel

from fusedrl.channel import WeightHandle, WeightReader
from fusedrl.channel.reader import Lease
from fusedrl.vllm.agreement import Ranks
from fusedrl.vllm.controls import BUSY
from fusedrl.vllm.kv_caches import check_caches, clear_caches
from fusedrl.vllm.lora_weights import LoraWeights
from fusedrl.vllm.model_weights import ModelWeights
from fusedrl.vllm.pause_guard import Hold, PauseGuard, check_reachable
from fusedrl.vllm.refusal import let_run, refuse_to_run

logger = logging.getLogger("fusedrl")


@dataclass
class ChannelInitInfo(WeightTransferInitInfo):
    """Which channel an engine is to read: the fields of a :class:`WeightHandle`, as plain JSON.

    Attributes:
        pid: the publisher's process id, as the engine's processes see it.
        fd: the channel's file descriptor in the publisher's process.
        session: the channel's secret.
        socket: path of a Unix socket that passes the channel, where the engine sees other pids.
        adapters: the fields of :class:`AdapterUpdate`, to load a version of a channel with
            ``adapters="only"``. They are not sent as an update of weights, at the end of which
            vLLM drops all adapters.
        hold: the fields of :class:`Hold`, for the engine of a server that a trainer is to pause.
    """

    pid: int
    fd: int
    session: str = field(repr=False)
    socket: str | None = None
    adapters: dict[str, Any] | None = None
    hold: dict[str, Any] | None = None


@dataclass
class AdapterUpdate:
    """Which version of a peft model's adapters an engine is to load.

    Attributes:
        version: the version to load; no other one is taken.
        timeout: seconds to wait for it; the channel's own if ``None``.
        number: the number by which requests name the adapters, vLLM's ``lora_int_id``.
        scalings: the factor by which each layer multiplies what its adapter adds.
        attempt: a name that no other update has, for :class:`Expectation`.
    """

    version: int
    timeout: float | None
    number: int
    scalings: dict[str, float]
    attempt: str = ""


@dataclass
class Expectation(WeightTransferInitInfo):
    """What a trainer wants to be sure of; a worker raises an error where it does not hold.

    Attributes:
        expect: ``"ended"``: no update is unfinished. ``"untouched"``: the model has not changed
            since the attempt began.
        attempt: that of :class:`ChannelUpdateInfo` or :class:`AdapterUpdate`.
    """

    expect: Literal["ended", "untouched"]
    attempt: str = ""


@dataclass
class ChannelUpdateInfo(WeightTransferUpdateInfo):
    """Which version an engine is to load.

    Attributes:
        version: the version to load; another one would get a wrong number in the engine.
        timeout: seconds to wait for it; the channel's own if ``None``.
        channel: the fields of :class:`ChannelInitInfo`, of the channel that has the version.
            ``None``: the one that the engine reads.
        attempt: a name that no other update has, for :class:`Expectation`.
    """

    version: int
    timeout: float | None = None
    channel: dict[str, Any] | None = field(default=None, repr=False)
    attempt: str = ""


class ChannelWeightTransferEngine(WeightTransferEngine[ChannelInitInfo, ChannelUpdateInfo]):
    """Load versions of a :class:`WeightChannel` into the model of a vLLM worker.

    vLLM makes one for ``WeightTransferConfig(backend="fusedrl")``. All workers lease the same
    version before any of them changes its model. An update that fails until then leaves the engine
    with the version that it has. One that fails later leaves models that refuse to run until an
    update succeeds.
    """

    init_info_cls = ChannelInitInfo
    update_info_cls = ChannelUpdateInfo
    # The channel has the weights of the model, not those of its draft.
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._reader: WeightReader | None = None
        self._weights: ModelWeights | LoraWeights | None = None
        self._session: str | None = None
        self._begun = False
        self._touched_by: str | None = None
        self._loaded: int | None = None  # None: none so far, or a part of one
        self._guard: PauseGuard | None = None

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        """The address of a channel, or an expectation of the trainer."""
        if "expect" in init_dict:
            return Expectation(**init_dict)
        return super().parse_init_info(init_dict)

    def init_transfer_engine(self, init_info: ChannelInitInfo | Expectation) -> None:
        """Become a reader of the channel, in the place of any other one.

        With ``adapters``, a version of the adapters is loaded too.

        Raises:
            RuntimeError, TimeoutError: the channel cannot be opened, the version cannot be leased,
                or an expectation is not met; the message says why.
            ValueError: the channel's weights are not those of the engine's model; the message lists
                all differences.
        """
        if isinstance(init_info, Expectation):
            self._check(init_info)
        elif init_info.hold is not None:
            self._hold(init_info, Hold(**init_info.hold))
        elif init_info.adapters is None:
            self._open(init_info, ModelWeights)
        else:
            known = init_info.session == self._session and isinstance(self._weights, LoraWeights)
            if known or self._open(init_info, LoraWeights):
                self._load_adapters(AdapterUpdate(**init_info.adapters))

    def _check(self, wanted: Expectation) -> None:
        def check() -> None:
            if wanted.expect == "ended" and self._begun:
                raise RuntimeError("update: expected none that goes on, got one; finish it")
            if wanted.expect == "untouched" and self._touched_by == wanted.attempt:
                raise RuntimeError(
                    "update: expected one that has not touched the model, got one that has; update "
                    "the weights again"
                )

        Ranks.of_this_process().all_or_none(check, _nothing)

    def _hold(self, info: ChannelInitInfo, hold: Hold) -> None:
        """Watch the trainer of a channel until its update is over; only one of them at a time."""
        ranks = Ranks.of_this_process()

        def check() -> bool:
            guard = self._guard
            if guard is not None and guard.is_watching and info.session != self._session:
                raise RuntimeError(f"{BUSY}, got one of another trainer; wait until it is over")
            if ranks.rank == 0 and not hold.over:
                check_reachable(hold.server)
            return True

        if not ranks.all_or_none(check, _nothing):
            return
        if hold.over:
            if self._guard is not None:
                self._guard.end()
        elif info.session == self._session or self._open(info, ModelWeights):
            if self._guard is not None and self._guard.hold.attempt == hold.attempt:
                self._guard.hold = hold
            elif ranks.rank == 0:
                if self._guard is not None:
                    self._guard.end()
                self._guard = self._watching(hold)

    def _watching(self, hold: Hold) -> PauseGuard:
        reader = self._reader
        assert reader is not None

        def label(before: str) -> str | None:
            if self._touched_by != hold.attempt:
                return before
            return None if self._loaded is None else str(self._loaded)

        return PauseGuard(hold, reader.is_publisher_dead, label)

    def _load_adapters(self, update: AdapterUpdate) -> None:
        weights = self._weights
        assert isinstance(weights, LoraWeights)

        def copied() -> LoRAModel:
            with self._lease(update.version, update.timeout) as lease:
                copies = weights.copied(lease.views, update.number, update.scalings)
                self._synchronize()
                return copies

        lora = Ranks.of_this_process().all_or_none(copied, _nothing)
        if lora is not None:
            self._touched_by = update.attempt
            weights.put(lora)

    def _open(self, info: ChannelInitInfo, kind: type[ModelWeights] | type[LoraWeights]) -> bool:
        """Read another channel; ``False``, on all but the last rank, if some worker cannot."""
        opened: list[WeightReader] = []

        def open_and_check() -> ModelWeights | LoraWeights:
            opened.append(_opened(info))
            try:
                check_caches(self.vllm_config)
                return kind(self.model, self.vllm_config, opened[0].layout)
            except BaseException:
                opened[0].close()
                raise

        weights = Ranks.of_this_process().all_or_none(open_and_check, lambda: opened[0].close())
        if weights is None:
            return False
        self.shutdown()
        self._reader, self._weights, self._session = opened[0], weights, info.session
        return True

    def start_weight_update(self) -> None:
        """Change nothing: :meth:`update_weights` changes the model once it has a version."""
        self._begun = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As :meth:`receive_weights`, with the fields as a dict."""
        # The method of the base class synchronises an accelerator, and fails on a CPU.
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            self._begun = False  # vLLM's worker ends an update that raises
            raise

    def receive_weights(self, update_info: ChannelUpdateInfo) -> None:
        """Lease a version, load all of it, and release it.

        Raises:
            RuntimeError: there is no channel, its publisher has ended without this version or has
                gone on to another one, or one of several workers failed.
            TimeoutError: the version was not published in time.
            ValueError: the channel does not have the weights of the engine's model.
            Exception: an error of vLLM's model while it is loaded, which then refuses to run.
        """
        if update_info.channel is not None:
            info = self.parse_init_info(update_info.channel)
            if info.session != self._session and not self._open(info, ModelWeights):
                return
        held: list[Lease] = []

        def lease() -> Lease:
            if isinstance(self._weights, LoraWeights):
                raise ValueError(
                    "channel: expected all weights of a model, got adapters alone; call "
                    "init_weight_transfer_engine with 'adapters', as EngineWeights does"
                )
            held.append(self._lease(update_info.version, update_info.timeout))
            return held[0]

        leased = Ranks.of_this_process().all_or_none(lease, lambda: held[0].release())
        if leased is None:
            return
        with leased:
            self._load(leased, update_info.attempt)

    def _load(self, lease: Lease, attempt: str) -> None:
        weights = self._weights
        assert isinstance(weights, ModelWeights)

        def load() -> bool:
            weights.load(lease.views)
            clear_caches(self.vllm_config)
            self._synchronize()
            return True

        self._touched_by, self._loaded = attempt, None
        refuse_to_run(self.model, lease.version)
        if Ranks.of_this_process().all_or_none(load, _nothing):
            let_run(self.model)
            self._loaded = lease.version

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def _lease(self, version: int, timeout: float | None) -> Lease:
        if self._reader is None:
            raise RuntimeError(
                "channel: expected one that is open, got none; call init_weight_transfer_engine "
                "with the channel's handle first"
            )
        lease = self._reader.lease(version, timeout)
        if lease.version != version:
            lease.release()
            raise RuntimeError(
                f"version: expected {version}, got a channel that has published "
                f"{lease.version} since; ask for that one"
            )
        return lease

    def finish_weight_update(self) -> None:
        """Change nothing: :meth:`update_weights` has loaded the version."""
        self._begun = False

    def shutdown(self) -> None:
        """Close the channel; the model keeps its weights."""
        if self._reader is not None:
            self._reader.close()
        self._reader = self._weights = self._session = None


def _nothing() -> None:
    """Undo an attempt that leaves nothing behind."""


def _opened(init_info: ChannelInitInfo) -> WeightReader:
    handle = WeightHandle(init_info.pid, init_info.fd, init_info.session)
    if init_info.socket is None:
        return handle.open()
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as socket:
        try:
            socket.connect(init_info.socket)
        except OSError as error:
            raise RuntimeError(
                f"socket: expected the trainer's Unix socket at {init_info.socket}, got "
                f"{error.strerror or error}; mount its folder into the engine's container"
            ) from error
        return handle.open(socket)
