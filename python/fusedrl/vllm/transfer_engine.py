"""The end of a weight channel within a worker of a vLLM engine."""

# vLLM has an environment of its own, which the linters do not see.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
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
from fusedrl.vllm.updates import BUSY

# CUDA graphs replay `forward` without calling it, so `compute_logits` is replaced too. Models that
# generate no tokens do not have the latter.
_RUNS = ("compute_logits", "forward")


@dataclass
class ChannelMessage(WeightTransferInitInfo, WeightTransferUpdateInfo):
    """A message of a trainer: the address of its channel, as plain JSON, and what to do with it.

    Attributes:
        pid: the publisher's process id, as the engine's processes see it.
        fd: the channel's file descriptor in the publisher's process.
        session: the channel's secret.
        lease: the version that all workers are to lease, with which an update begins; another one
            would get a wrong number in the engine.
        timeout: seconds to wait for it; the channel's own if ``None``.
        server: the address of a server, which outlives its trainer; ``None`` for another engine.
        stays: whether a server, which is paused next, stays paused after the update.
        load: the version that is leased, to load it.
        over: the update has ended.
        left: the trainer cannot end the update of a server, which its worker has to do.
    """

    pid: int
    fd: int
    session: str = field(repr=False)
    lease: int | None = None
    timeout: float | None = None
    server: str | None = None
    stays: bool | None = None
    load: int | None = None
    over: bool = False
    left: bool = False


class ChannelWeightTransferEngine(WeightTransferEngine[ChannelMessage, ChannelMessage]):
    """Load versions of a :class:`WeightChannel` into the model of a vLLM worker.

    vLLM makes one for ``WeightTransferConfig(backend="fusedrl")``. A trainer's messages come to
    :meth:`init_transfer_engine`, since vLLM's own calls for an update have to be begun and ended,
    which a trainer that is killed in between does not do. All workers take each step or none does.
    The lease is held until all of them have loaded its version, so that a load that failed can be
    repeated whether or not the trainer lives. From its beginning until then the models refuse to
    run.
    """

    init_info_cls = update_info_cls = ChannelMessage
    # The channel has the weights of the model, not those of its draft.
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._reader: WeightReader | None = None
        self._weights: ModelWeights | None = None
        self._lease: Lease | None = None  # of a version that is to be loaded
        self._loaded: int | None = None  # the version of the reader's that all workers have
        self._guard: PauseGuard | None = None

    def init_transfer_engine(self, init_info: ChannelMessage) -> None:
        """Do what a trainer asks for; without a further field, become a reader of its channel.

        Raises:
            RuntimeError, TimeoutError: the channel cannot be opened, the version cannot be leased,
                or another trainer updates the engine.
            ValueError: the channel's weights are not those of the engine's model; the message lists
                all differences.
            Exception: an error of vLLM's model while it is loaded, which then refuses to run.
        """
        if init_info.lease is not None:
            self._take_lease(init_info, init_info.lease)
        elif init_info.load is not None:
            self._load(init_info.session, init_info.load)
        elif init_info.over:
            self._end(init_info.session)
        elif init_info.stays is None and not init_info.left:
            self._open(init_info)
        elif self._guard is not None and init_info.left:
            self._guard.left = True
        elif self._guard is not None:
            self._guard.stays = init_info.stays

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
        reader, self._reader, self._weights, self._lease = self._reader, None, None, None
        if reader is not None:
            reader.close()

    def _take_lease(self, address: ChannelMessage, version: int) -> None:
        """Open the channel, and lease a version; each on all ranks or none."""
        ranks, guard = Ranks.of_this_process(), self._guard

        def check() -> bool:
            mine = guard is None or (guard.session == address.session and not guard.left)
            if guard is not None and guard.is_watching and not mine:
                raise RuntimeError(f"{BUSY}, got one of another trainer; wait until it is over")
            if address.server is not None and ranks.rank == 0:
                check_reachable(address.server)
            return True

        if not ranks.all_or_none(check):
            return
        if guard is not None:
            guard.end()
        if not self._open(address):
            return
        self._release()
        reader = self._reader
        assert reader is not None
        with contextlib.ExitStack() as leased:

            def lease() -> Lease:
                lease = leased.enter_context(reader.lease(version, address.timeout))
                if lease.version != version:
                    raise RuntimeError(
                        f"version: expected {version}, got a channel that has published "
                        f"{lease.version} since; ask for that one"
                    )
                return lease

            if (taken := ranks.all_or_none(lease)) is None:
                return
            leased.pop_all()
        self._lease = taken
        if address.server is not None and ranks.rank == 0:
            fields = {name: getattr(address, name) for name in ("pid", "fd", "session")}
            self._guard = PauseGuard(address.server, fields, version)

    def _is_read(self, session: str) -> bool:
        return self._reader is not None and self._reader.session == session

    def _load(self, session: str, version: int) -> None:
        """Load the version that is leased, on all ranks; again if that has failed before."""
        is_read = self._is_read(session)
        if is_read and self._lease is None and self._loaded == version:
            return  # the trainer has not got the answer
        weights, lease = self._weights, self._lease

        def load() -> bool:
            if not is_read or weights is None or lease is None or lease.version != version:
                raise RuntimeError(
                    f"version: expected one that is leased, got {version}; update the engine again"
                )
            self._loaded = None
            _refuse_to_run(self.model, f"another worker has not loaded version {version}")
            try:
                weights.load(lease.views)
                clear_caches(self.vllm_config)
                if self.device.type != "cpu":
                    torch.accelerator.synchronize(self.device)
            except Exception as error:
                _refuse_to_run(self.model, f"version {version}: {type(error).__name__}: {error}")
                raise
            return True

        if Ranks.of_this_process().all_or_none(load):
            self._loaded = version
            self._release()
            _let_run(self.model)

    def _end(self, session: str) -> None:
        if self._is_read(session):
            self._release()
            if self._guard is not None:
                self._guard.end()

    def _release(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    def _open(self, address: ChannelMessage) -> bool:
        """Read a channel; ``False``, on all but the last rank, if some worker cannot."""
        if self._is_read(address.session):
            return True
        ranks = Ranks.of_this_process()
        with contextlib.ExitStack() as opened:

            def check() -> tuple[WeightReader, ModelWeights]:
                reader = opened.enter_context(
                    WeightHandle(address.pid, address.fd, address.session).open()
                )
                check_connectors(self.vllm_config)
                return reader, ModelWeights(self.model, self.vllm_config, reader.layout)

            if (fitting := ranks.all_or_none(check)) is None:
                return False
            reader, weights = fitting
            unused = set.intersection(*map(set, ranks.gathered(weights.unused)))
            if ranks.all_or_none(lambda: check_used(unused)) is None:
                return False
            opened.pop_all()
        self.shutdown()
        self._reader, self._weights, self._loaded = reader, weights, None
        return True


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
def clear_caches(vllm_config: Any) -> None:
    """Zero the caches of keys and values, as those of weights that overflow may be NaN.

    vLLM gives their blocks to other requests as they are, and masks what is behind the end of a
    request by a factor of zero, which does not hide NaN.
    """
    caches = list(key_value_caches(vllm_config))
    for memory in {cache.untyped_storage().data_ptr(): cache for cache in caches}.values():
        data = memory.new_empty(0, dtype=torch.uint8).set_(memory.untyped_storage())
        # A connector may have told a network card where the memory's pages are.
        if vllm_config.kv_transfer_config is not None or not _pages_given_back(data):
            data.zero_()


def _pages_given_back(data: Tensor) -> bool:
    """Zero private memory of a CPU in the time that its used part takes; ``False`` if it cannot.

    Linux makes new pages of zeros where memory is touched whose pages were given back.
    """
    begin = -data.data_ptr() % mmap.PAGESIZE
    count = (data.numel() - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    is_private = data.device.type == "cpu" and not data.is_shared()
    if not is_private or count <= 0 or sys.platform != "linux":
        return False
    data[:begin].zero_()
    data[begin + count :].zero_()
    pages = ctypes.c_void_p(data.data_ptr() + begin), ctypes.c_size_t(count)
    return ctypes.CDLL(None).madvise(*pages, mmap.MADV_DONTNEED) == 0


def _refuse_to_run(model: nn.Module, reason: str) -> None:
    """Make every run of a model fail, whereupon vLLM ends the engine."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            "model: expected the weights of one version, got parts of two, as loading failed "
            f"({reason}); update the weights again before the engine generates"
        )

    for method in _RUNS:
        if hasattr(model, method):
            setattr(model, method, refuse)


def _let_run(model: nn.Module) -> None:
    """Undo :func:`_refuse_to_run`."""
    for method in _RUNS:
        vars(model).pop(method, None)
