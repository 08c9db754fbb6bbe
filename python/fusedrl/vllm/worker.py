"""The end of a weight channel within a worker of a vLLM engine."""

# vLLM has an environment of its own, which the linters do not see.
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

# CUDA graphs replay `forward` without calling it, so `compute_logits` is replaced too. Models that
# generate no tokens do not have the latter.
_RUNS = ("compute_logits", "forward")


class ChannelWeightTransferEngine(WeightTransferEngine[Any, Any]):
    """Load versions of a :class:`WeightChannel` into the model of a vLLM worker.

    vLLM makes one for ``WeightTransferConfig(backend="fusedrl")``. A trainer's messages come to
    :meth:`init_transfer_engine`, since vLLM's own calls for an update have to be begun and ended,
    which a trainer that is killed in between does not do. All workers take each step or none does.
    The lease is held until the update is over, so that a load can be repeated whether or not the
    trainer lives.
    """

    # Any dict, as what vLLM refuses on its own is refused by each worker alone.
    init_info_cls = update_info_cls = dict
    # The channel has the weights of the model, not those of its draft.
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._reader: WeightReader | None = None
        self._weights: ModelWeights | None = None
        self._lease: Lease | None = None  # of the update that is running
        self._over = threading.Event()  # whether a server's update is; its guard's
        self._over.set()

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Do what a trainer asks for, in plain JSON; only become a reader if that is all it says.

        Args:
            init_info: ``address`` has the fields of the channel's handle, with its secret.
                ``lease`` begins an update: the ``version`` that all workers are to lease, the
                seconds (``timeout``) that they wait for it, the address of a ``server``, which
                outlives its trainer, and whether it ``stays`` paused after the update. ``load``
                is the version that is leased, to load it, and ``over`` ends the update.
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
        """Read a channel whose weights are those of the model, unless another one is loaded."""
        with contextlib.ExitStack() as opened:

            def fitting() -> tuple[WeightReader, ModelWeights]:
                if not self._over.is_set():
                    raise RuntimeError(f"{BUSY}, got one of another trainer; wait until it is over")
                reader = opened.enter_context(handle.open())
                if keeping := connectors_that_keep(self.vllm_config):
                    raise ValueError(
                        "engine: expected a KV connector that drops what it has stored "
                        f"(reset_cache), got {', '.join(keeping)}, which would serve keys and "
                        "values of former weights; start the engine without it"
                    )
                return reader, ModelWeights(self.model, self.vllm_config, reader.layout)

            reader, weights = workers.all_or_none(fitting)
            unused = set.intersection(*map(set, workers.gathered(weights.unused)))
            remedy = "create it from the model that the engine runs"
            workers.all_or_none(lambda: refuse_differences("channel", sorted(unused), remedy))
            opened.pop_all()
        self.shutdown()
        self._reader, self._weights = reader, weights

    def _take_lease(self, workers: Workers, address: dict[str, Any], asked: dict[str, Any]) -> None:
        self._end()

        def lease() -> None:
            assert self._reader is not None
            version, server = asked["version"], asked["server"]
            if server is not None and workers.rank == 0:
                Server(server).check_health()  # for the guard; before, it has no right to call
            self._lease = self._reader.lease(version, asked["timeout"])
            if self._lease.version != version:
                raise RuntimeError(
                    f"version: expected {version}, got a channel that has published "
                    f"{self._lease.version} since; publish less often"
                )

        workers.all_or_none(lease)
        if asked["server"] is not None and workers.rank == 0:
            self._over = guard(asked["server"], address, asked["version"], asked["stays"])

    def _load(self, workers: Workers, version: int, is_read: bool) -> None:
        """Load the version that is leased, on all workers; again if that has failed before."""
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
        for method in _RUNS:
            vars(self.model).pop(method, None)


class FailedElsewhere(Exception):
    """A step of all workers failed; the last of them raises why."""


class Workers:
    """The workers of one engine, of which this is number ``rank``, take each step together.

    vLLM stops reading answers at the first worker that failed, and would take those that are left
    for answers to its next call. So only the last worker raises an error to it.
    """

    def __init__(self, size: int, rank: int, group: Any) -> None:
        self.size, self.rank, self._group = size, rank, group

    def gathered(self, value: Any) -> list[Any]:
        """The values of all workers, which have to call this together."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(values, value, group=self._group)
        return values

    def all_or_none(self, attempt: Callable[[], Any]) -> Any:
        """What ``attempt`` returns, or an error of all if it fails on one of the workers."""
        if self.size == 1:
            return attempt()
        value, failure = None, None
        try:
            value = attempt()
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        failures = self.gathered(failure)
        said = "; ".join(f"worker {rank}: {text}" for rank, text in enumerate(failures) if text)
        if said:
            raise RuntimeError(said) if self.rank == self.size - 1 else FailedElsewhere(said)
        return value


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


def _refuse_to_run(model: nn.Module, version: int) -> None:
    """Make every run of a model fail, whereupon vLLM ends the engine."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"model: expected weights of one version, got parts of two, as version {version} was "
            "not loaded by all workers (see above); update them again before the engine generates"
        )

    for method in _RUNS:
        if hasattr(model, method):
            setattr(model, method, refuse)
