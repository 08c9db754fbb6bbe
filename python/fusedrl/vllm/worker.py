"""The weight channel's end in a worker of a vLLM engine."""

# vLLM is not installed where the linters run.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from fusedrl.channel import WeightHandle, WeightReader
from fusedrl.channel.layout import refuse_differences
from fusedrl.channel.reader import Lease
from fusedrl.compat.vllm import connectors_that_keep, key_value_caches, workers_of_this_engine
from fusedrl.vllm.engines import Server
from fusedrl.vllm.guard import guard
from fusedrl.vllm.model_weights import ModelWeights
from fusedrl.vllm.update import BUSY

# CUDA graphs replay `forward` without calling it, so `compute_logits` is replaced too. Pooling
# models have only `forward`.
_RUN_METHODS = ("compute_logits", "forward")


class ChannelWeightTransferEngine(WeightTransferEngine[Any, Any]):
    """Loads versions of a :class:`WeightChannel` into the model of a vLLM worker.

    vLLM makes one for ``WeightTransferConfig(backend="fusedrl")``. All messages of a trainer go to
    :meth:`init_transfer_engine`: vLLM's own update has a begin and an end, and a trainer that is
    killed would not end it. Each step is done by all workers or by none. The lease is held until
    the update is over, so that a load can be repeated even after the trainer has died.
    """

    # Any dict: vLLM's own check would fail in each worker separately.
    init_info_cls = update_info_cls = dict
    # The channel has the weights of the model, not of its draft model.
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._reader: WeightReader | None = None
        self._weights: ModelWeights | None = None
        self._lease: Lease | None = None  # of the update that is running
        self._over = threading.Event()  # set unless a server's update is running
        self._over.set()

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Handle a trainer's message, in plain JSON; with an address alone, only open the channel.

        Args:
            init_info: ``address`` has the fields of the channel's handle, with its secret.
                ``lease`` begins an update: the ``version`` to lease, the ``timeout`` in seconds,
                the address of a ``server``, which outlives its trainer, and whether it ``stays``
                paused afterwards. ``load`` is the leased version, which is loaded. ``over`` ends
                the update.
        """
        workers = Workers(*workers_of_this_engine())
        with contextlib.suppress(FailedElsewhere):
            handle = workers.all_or_none(lambda: WeightHandle(**init_info["address"]))
            is_read = self._reader is not None and self._reader.session == handle.session
            if "load" in init_info:
                self._load(workers, init_info["load"], is_read)
            elif "over" not in init_info:
                if not is_read:
                    self._open(workers, handle)
                if "lease" in init_info:
                    self._take_lease(workers, init_info["address"], init_info["lease"])
            elif is_read:
                self._end()

    receive_weights = init_transfer_engine

    def start_weight_update(self) -> None:
        """Change nothing: a version is loaded in one call."""

    finish_weight_update = start_weight_update

    def shutdown(self) -> None:
        """Close the channel; the model keeps its weights."""
        reader, self._reader, self._weights, self._lease = self._reader, None, None, None
        if reader is not None:
            reader.close()

    def _end(self) -> None:
        """End an update, if one is running."""
        if self._lease is not None:
            self._lease.release()  # an error may keep it
            self._lease = None
        self._over.set()

    def _open(self, workers: Workers, handle: WeightHandle) -> None:
        """Open a channel with the weights of the model, unless another update is running."""
        with contextlib.ExitStack() as opened:

            def fitting() -> tuple[WeightReader, ModelWeights]:
                if not self._over.is_set():
                    raise RuntimeError(f"{BUSY}, got one of another trainer; wait until it is over")
                reader = opened.enter_context(handle.open())
                if keeping := connectors_that_keep(self.vllm_config):
                    raise ValueError(
                        "engine: expected a KV connector that drops what it has stored "
                        f"(reset_cache), got {', '.join(keeping)}, which would serve keys and "
                        "values of old weights; start the engine without it"
                    )
                return reader, ModelWeights(self.model, self.vllm_config, reader.layout)

            reader, weights = workers.all_or_none(fitting)
            unused = set.intersection(*map(set, workers.gathered(weights.unused)))
            remedy = "create it from the model that the engine runs"
            workers.all_or_none(lambda: refuse_differences("channel", sorted(unused), remedy))
            opened.pop_all()
        self.shutdown()
        self._reader, self._weights = reader, weights

    def _take_lease(self, workers: Workers, address: dict[str, Any], terms: dict[str, Any]) -> None:
        self._end()

        def lease() -> None:
            assert self._reader is not None
            version, server = terms["version"], terms["server"]
            if server is not None and workers.rank == 0:
                Server(server).check_health()  # the guard will need it
            self._lease = self._reader.lease(version, terms["timeout"])
            if self._lease.version != version:
                raise RuntimeError(
                    f"version: expected {version}, got a channel that has published "
                    f"{self._lease.version} since; publish less often"
                )

        workers.all_or_none(lease)
        if terms["server"] is not None and workers.rank == 0:
            self._over = guard(terms["server"], address, terms["version"], terms["stays"])

    def _load(self, workers: Workers, version: int, is_read: bool) -> None:
        """Load the leased version on all workers; may be repeated after a failure."""
        weights, lease = self._weights, self._lease

        def load() -> None:
            if not is_read or weights is None or lease is None or lease.version != version:
                raise RuntimeError(
                    f"version: expected one that is leased, got {version}; update the engine again"
                )
            _refuse_to_run(self.model, version)
            weights.load(lease.views)
            clear_caches(self.vllm_config)
            if self.device.type != "cpu":
                torch.accelerator.synchronize(self.device)

        workers.all_or_none(load)
        for method in _RUN_METHODS:
            vars(self.model).pop(method, None)


class FailedElsewhere(Exception):
    """A step failed on some worker; the last worker raises the reason."""


class Workers:
    """The workers of one engine, of which this is number ``rank``, for collective steps.

    vLLM stops reading answers at the first worker that failed, and would mistake the remaining
    answers for those of its next call. So only the last worker raises.
    """

    def __init__(self, size: int, rank: int, group: Any) -> None:
        self.size, self.rank, self._group = size, rank, group

    def gathered(self, value: Any) -> list[Any]:
        """The values of all workers; a collective call."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(values, value, group=self._group)
        return values

    def all_or_none(self, attempt: Callable[[], Any]) -> Any:
        """Return what ``attempt`` does, or raise on all workers if it fails on one; collective."""
        if self.size == 1:
            return attempt()
        value, failure = None, None
        try:
            value = attempt()
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        failures = self.gathered(failure)
        message = "; ".join(f"worker {rank}: {text}" for rank, text in enumerate(failures) if text)
        if message:
            raise RuntimeError(message) if self.rank == self.size - 1 else FailedElsewhere(message)
        return value


@torch.no_grad()
def clear_caches(vllm_config: Any) -> None:
    """Zero the KV cache: it may have NaN from weights that overflow.

    vLLM reuses blocks as they are, and masks positions behind the end of a request by a factor of
    zero, which does not hide NaN.
    """
    caches = list(key_value_caches(vllm_config))
    for memory in {cache.untyped_storage().data_ptr(): cache for cache in caches}.values():
        data = memory.new_empty(0, dtype=torch.uint8).set_(memory.untyped_storage())
        # A connector may have registered the pages with a network card.
        if vllm_config.kv_transfer_config is not None or not _zero_by_madvise(data):
            data.zero_()


def _zero_by_madvise(data: Tensor) -> bool:
    """Zero private CPU memory in the time that its used part takes; ``False`` if it cannot.

    Linux maps new pages of zeros where memory is used after MADV_DONTNEED.
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


def _refuse_to_run(model: nn.Module, version: int) -> None:
    """Make every run of a model fail, whereupon vLLM ends the engine."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"model: expected weights of one version, got parts of two, as version {version} was "
            "not loaded by all workers (see the log); update the engine again before it generates"
        )

    for method in _RUN_METHODS:
        if hasattr(model, method):
            setattr(model, method, refuse)
