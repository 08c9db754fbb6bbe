"""The end of a weight channel within a worker of a vLLM engine."""

# vLLM has an environment of its own, which the linters do not see.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import contextlib
import socket as sockets
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from fusedrl.channel import WeightHandle, WeightReader
from fusedrl.compat.vllm import connectors_that_keep, key_value_caches
from fusedrl.vllm.agreement import Ranks
from fusedrl.vllm.lora_adapters import LoraWeights
from fusedrl.vllm.model_weights import ModelWeights
from fusedrl.vllm.pause_guard import Hold, PauseGuard, check_reachable
from fusedrl.vllm.updates import BUSY

# CUDA graphs replay `forward` without calling it, so `compute_logits` is replaced too. Models that
# generate no tokens do not have the latter.
_RUNS = ("compute_logits", "forward")


@dataclass
class VersionUpdate:
    """Which version an engine is to load.

    Attributes:
        version: the version to load; another one would get a wrong number in the engine.
        timeout: seconds to wait for it; the channel's own if ``None``.
        attempt: a name that no other update has.
        adapters: the fields of an ``AdapterUpdate``, for a channel with ``adapters="only"``.
    """

    version: int
    timeout: float | None = None
    attempt: str = ""
    adapters: dict[str, Any] | None = None


@dataclass
class ChannelMessage(WeightTransferInitInfo, WeightTransferUpdateInfo):
    """A message of a trainer: the address of its channel, as plain JSON, and what to do with it.

    Attributes:
        pid: the publisher's process id, as the engine's processes see it.
        fd: the channel's file descriptor in the publisher's process.
        session: the channel's secret.
        socket: path of a Unix socket that passes the channel, where the engine sees other pids.
        update: the fields of :class:`VersionUpdate`, to load a version.
        untouched_by: an attempt; it is an error if it has touched the model.
        hold: the fields of :class:`Hold`, for the engine of a server that a trainer is to pause.
    """

    pid: int
    fd: int
    session: str = field(repr=False)
    socket: str | None = None
    update: dict[str, Any] | None = None
    untouched_by: str | None = None
    hold: dict[str, Any] | None = None


class ChannelWeightTransferEngine(WeightTransferEngine[ChannelMessage, ChannelMessage]):
    """Load versions of a :class:`WeightChannel` into the model of a vLLM worker.

    vLLM makes one for ``WeightTransferConfig(backend="fusedrl")``. A trainer's messages come to
    :meth:`init_transfer_engine`, since vLLM's own calls for an update have to be begun and ended,
    which a trainer that is killed in between does not do. All workers lease the same version before
    any of them changes its model. An update that fails until then leaves the engine with the
    version that it has. One that fails later leaves models that refuse to run until an update
    succeeds.
    """

    init_info_cls = update_info_cls = ChannelMessage
    # The channel has the weights of the model, not those of its draft.
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._reader: WeightReader | None = None
        self._weights: ModelWeights | LoraWeights | None = None
        self._session: str | None = None
        self._touched_by: str | None = None
        self._loaded: int | None = None  # None: none so far, or a part of one
        self._guard: PauseGuard | None = None

    def init_transfer_engine(self, init_info: ChannelMessage) -> None:
        """Do what a trainer asks for; without a further field, become a reader of its channel.

        Raises:
            RuntimeError, TimeoutError: the channel cannot be opened, the version cannot be leased,
                the attempt has touched the model, or another trainer updates the engine.
            ValueError: the channel's weights are not those of the engine's model; the message lists
                all differences.
            Exception: an error of vLLM's model while it is loaded, which then refuses to run.
        """
        if init_info.untouched_by is not None:
            self._check_untouched(init_info.untouched_by)
        elif init_info.hold is not None:
            self._hold(init_info, Hold(**init_info.hold))
        elif init_info.update is not None:
            self._update(init_info, VersionUpdate(**init_info.update))
        else:
            self._open(init_info, ModelWeights)

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
        """Close the channel; the model keeps its weights."""
        if self._reader is not None:
            self._reader.close()
        self._reader = self._weights = self._session = None

    def _check_untouched(self, attempt: str) -> None:
        def check() -> None:
            if self._touched_by == attempt:
                raise RuntimeError(
                    "update: expected one that has not touched the model, got one that has; update "
                    "the weights again"
                )

        Ranks.of_this_process().all_or_none(check)

    def _update(self, address: ChannelMessage, update: VersionUpdate) -> None:
        """Open the channel, lease a version, load it, and release it; each on all ranks or none."""
        kind = ModelWeights if update.adapters is None else LoraWeights
        if not self._open(address, kind):
            return
        ranks = Ranks.of_this_process()
        with contextlib.ExitStack() as held:

            def stage() -> Any:
                assert self._reader is not None and self._weights is not None
                lease = held.enter_context(self._reader.lease(update.version, update.timeout))
                if lease.version != update.version:
                    raise RuntimeError(
                        f"version: expected {update.version}, got a channel that has published "
                        f"{lease.version} since; ask for that one"
                    )
                return self._weights.staged(lease.views, update.adapters)

            if (load := ranks.all_or_none(stage)) is None:
                return
            self._touched_by, self._loaded = update.attempt, None
            _refuse_to_run(self.model, update.version)
            if ranks.all_or_none(lambda: self._load(load)):
                _let_run(self.model)
                self._loaded = update.version

    def _load(self, load: Any) -> bool:
        load()
        _clear(self.vllm_config)
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return True

    def _open(self, address: ChannelMessage, kind: type[ModelWeights] | type[LoraWeights]) -> bool:
        """Read a channel; ``False``, on all but the last rank, if some worker cannot."""
        if address.session == self._session and isinstance(self._weights, kind):
            return True
        with contextlib.ExitStack() as opened:

            def check() -> tuple[WeightReader, ModelWeights | LoraWeights]:
                reader = opened.enter_context(_opened(address))
                check_connectors(self.vllm_config)
                return reader, kind(self.model, self.vllm_config, reader.layout)

            if (fitting := Ranks.of_this_process().all_or_none(check)) is None:
                return False
            self.shutdown()
            (self._reader, self._weights), self._session = fitting, address.session
            opened.pop_all()
            return True

    def _hold(self, address: ChannelMessage, hold: Hold) -> None:
        """Watch the trainer of a channel until its update is over; only one of them at a time."""
        ranks, guard = Ranks.of_this_process(), self._guard

        def check() -> bool:
            if guard is not None and guard.is_watching and address.session != self._session:
                raise RuntimeError(f"{BUSY}, got one of another trainer; wait until it is over")
            if ranks.rank == 0 and not hold.over:
                check_reachable(hold.server)
            return True

        if not ranks.all_or_none(check):
            return
        if guard is not None:
            guard.end()
        if not hold.over and self._open(address, ModelWeights) and ranks.rank == 0:
            assert self._reader is not None
            self._guard = PauseGuard(hold, self._reader.is_publisher_dead, self._label_after)

    def _label_after(self, hold: Hold) -> str | None:
        """The label of the whole version that the model has; ``None`` if it has parts of two."""
        if self._touched_by != hold.attempt:
            return hold.label
        return None if self._loaded is None else str(self._loaded)


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


def _refuse_to_run(model: nn.Module, version: int) -> None:
    """Make every run of a model fail, whereupon vLLM ends the engine."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"model: expected the weights of one version, got a part of version {version} and a "
            "part of another, as loading it failed; update the weights again before the engine "
            "generates"
        )

    for method in _RUNS:
        if hasattr(model, method):
            setattr(model, method, refuse)


def _let_run(model: nn.Module) -> None:
    """Undo :func:`_refuse_to_run`."""
    for method in _RUNS:
        vars(model).pop(method, None)
