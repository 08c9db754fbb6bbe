"""The weight channel as a weight-sync scheme of torchrl's collectors."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Mapping
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.collectors import Collector
from torchrl.weight_update import TransportBackend, WeightSyncScheme
from torchrl.weight_update.utils import _resolve_attr
from torchrl.weight_update.weight_sync_schemes import register_weight_sync_backend

from fusedrl.channel import WeightChannel, WeightHandle, WeightReader
from fusedrl.channel.following import Follower
from fusedrl.channel.sources import module_slots
from fusedrl.weights.arguments import check_timeout
from fusedrl.weights.attachment import Attachment, is_compiled
from fusedrl.weights.own_copies import Copied, materialise, unsaved_buffers

logger = logging.getLogger("fusedrl")

_OF_THIS_PROCESS = ("_channel", "_reader", "_local", "_follower", "_attachment", "_copied")


@register_weight_sync_backend("channel")
class ChannelWeightSyncScheme(WeightSyncScheme):
    """Weights of a collector's model through a :class:`WeightChannel`.

    ``collector.update_policy_weights_(weights)`` publishes one version. Each policy call takes the
    newest version as it begins and computes with all of it, in the thread that calls; with
    ``track_policy_version`` the frame is tagged with the version of that call, which is the
    channel's: 1 for the weights that a collector starts with.

    An update returns when the version is published, without waiting for workers: every policy call
    that begins afterwards uses it, or a later one. A dead worker is logged, with its pid.

    A collector in the trainer's own process computes with a copy of its policy, so that in-place
    training does not reach it between updates.

    Args:
        strategy: as for torchrl's schemes. ``"state_dict"`` merges a peft model's adapters; weights
            given to an update may have either form.
        dtype: of floating weights in the channel; their own if ``None``.
        slots: versions that the channel has room for, as for :meth:`WeightChannel.create`. Calls
            that run at a time hold at most one each.
        mode: ``"alias"``: the model's parameters are views of the channel, and frozen; ``"copy"``:
            they are written in place, in their own dtype and on their own device. ``None``: alias
            where dtypes and devices fit and the collector compiles nothing, else copy.
        device: where the channel lies: that of the weights if ``None``.
        adapters: of a peft model, as for :meth:`WeightChannel.create`.
        wait: an update returns when no policy call computes with an older version any more.
        timeout: seconds that any wait may take.
        checksum: as for :meth:`WeightChannel.create`.

    Raises:
        ValueError: weights that do not fit; chosen workers, where a channel serves all of them.
        RuntimeError: with ``wait``, a worker is dead; the message has its pid.
        TimeoutError: workers hold all slots, or, with ``wait``, a worker computes with an older
            version for too long; the message has its pid.

    Example:
        >>> import torch
        >>> from fusedrl import ChannelWeightSyncScheme
        >>> trained, policy = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        >>> scheme = ChannelWeightSyncScheme()  # MultiSyncCollector(weight_sync_schemes={"policy": scheme})
        >>> scheme.init_on_sender(model_id="policy", model=trained)
        >>> scheme.connect()
        >>> scheme.version
        1
        >>> scheme.shutdown()
    """

    _channel: WeightChannel | None
    _reader: WeightReader | None
    _local: Any  # the model that torchrl named before there was a collector
    _follower: Follower | None
    _attachment: Attachment | None
    _copied: Copied | None

    def __init__(
        self,
        strategy: Literal["tensordict", "state_dict"] = "tensordict",
        *,
        dtype: torch.dtype | None = None,
        slots: int = 3,
        mode: Literal["alias", "copy"] | None = None,
        device: torch.device | str | None = None,
        adapters: Literal["only", "merged"] | None = None,
        wait: bool = False,
        timeout: float = 60.0,
        checksum: bool = False,
    ) -> None:
        check_timeout(timeout)
        if mode not in (None, "alias", "copy"):
            raise ValueError(f"mode: expected 'alias', 'copy' or None, got {mode!r}")
        super().__init__(strategy)
        self.mode, self.wait, self.timeout = mode, wait, timeout
        self._options = {
            "dtype": dtype,
            "slots": slots,
            "device": device,
            "adapters": adapters,
            "timeout": timeout,
            "checksum": checksum,
        }
        self._handle: WeightHandle | None = None
        self._buffers: dict[str, Tensor] = {}
        self.__dict__.update(dict.fromkeys(_OF_THIS_PROCESS))

    def __getstate__(self) -> dict[str, Any]:
        """What a worker gets: the channel's handle, and nothing that belongs to this process."""
        return {**super().__getstate__(), **dict.fromkeys(_OF_THIS_PROCESS)}

    @property
    def channel(self) -> WeightChannel:
        """The trainer's end: its readers, ``publish`` with a version of your own.

        Raises:
            RuntimeError: this is a worker's end, or shut down.
        """
        if self._channel is None:
            raise RuntimeError(
                "scheme: expected the trainer's end of an open channel, got none; give the scheme "
                "to a collector first, or call init_on_sender, and nothing after shutdown()"
            )
        return self._channel

    @property
    def version(self) -> int | None:
        """The newest published version; ``None`` before the first, and after :meth:`shutdown`."""
        end = self._channel or self._reader
        return None if end is None else end.version

    # What follows is called by torchrl.

    def _init_on_sender_impl(
        self,
        model_id: str | None = None,
        context: Any = None,
        *,
        model: Any = None,
        weights: Any = None,
        params_map: Any = None,
        device_map_fn: Any = None,
        **_: Any,
    ) -> None:
        if params_map is not None or device_map_fn is not None:
            raise ValueError(
                "params_map, device_map_fn: expected None, got weights for each worker; a channel "
                "has one set for all: give each worker a scheme and a channel of its own"
            )
        self.model_id = model_id or "policy"
        self.context = context
        source = model if model is not None else weights
        if source is None:
            source = _find(context, self.model_id)
        source = source if isinstance(source, Mapping) else _module_of(source)
        options = dict(self._options)
        if self.strategy_str == "state_dict" and hasattr(source, "merge_and_unload"):
            options["adapters"] = options["adapters"] or "merged"
        self._channel = WeightChannel.create(source, **options)
        self._handle = self._channel.handle
        if context is not None:
            weakref.finalize(context, self._channel.close).atexit = False
        if isinstance(source, nn.Module) and not isinstance(source, Mapping):
            self._buffers = unsaved_buffers(source)

    def _setup_connection_and_weights_on_sender_impl(
        self, *, worker_idx: int | None = None, weights: Any | None = None
    ) -> None:
        self._publish(weights, None)
        if isinstance(self.context, Collector):
            self._reader = self.channel.handle.open()
            self._copied = Copied(self.context, self.model_id or "policy", self._reader.layout)
            self._attach(self.context)

    def send(
        self, weights: Any = None, worker_ids: Any = None, *, version: int | None = None
    ) -> int:
        """Publish one version.

        Args:
            weights: a tensordict, module or state dict; the model's own if ``None``.
            worker_ids: ``None``, or all workers.
            version: its number, greater than the last one; one more if ``None``.

        Returns:
            The version.

        Raises:
            ValueError, RuntimeError, TimeoutError: as for the class.
        """
        self._check_workers(worker_ids)
        published = self._publish(weights, version)
        readers = self.channel.readers()
        dead = ", ".join(str(reader.pid) for reader in readers if not reader.alive)
        if dead and self.wait:
            raise RuntimeError(
                f"worker_ids: expected living workers, got dead: pid {dead}; their own output says "
                f"why they ended: the others have version {published}, make another collector"
            )
        if dead:
            logger.warning(
                "worker_ids: expected living workers, got dead: pid %s; the others get version %d",
                dead,
                published,
            )
        deadline = time.monotonic() + self.timeout
        while self.wait and (late := [r for r in readers if min(r.leased, default=published) < published]):
            if time.monotonic() > deadline:
                raise TimeoutError(...)
            time.sleep(0.005)
            readers = self.channel.readers()
        return published

    def _publish(self, weights: Any, version: int | None) -> int:
        if weights is not None and not isinstance(weights, Mapping):
            weights = _module_of(weights)
        published = self.channel.publish(weights, version)
        assert published is not None
        tracker: Any = getattr(self.context, "policy_version_tracker", None)
        if self._is_policy() and getattr(tracker, "version_type", None) in (int, "int"):
            tracker.version = published
        return published

    def _is_policy(self) -> bool:
        return (self.model_id or "policy").split(".")[0] == "policy"

    def _check_workers(self, worker_ids: Any) -> None:
        if worker_ids is None:
            return
        chosen = worker_ids if isinstance(worker_ids, list | tuple | set) else [worker_ids]
        everyone = range(getattr(self.context, "num_workers", 1))
        if set(chosen) != set(everyone):
            raise ValueError(
                f"worker_ids: expected None or all of {list(everyone)}, got {worker_ids!r}; a "
                "channel's version reaches every worker: give workers that differ their own schemes"
            )

    @property
    def context(self) -> Any:
        """The collector, if it still exists."""
        return super().context

    @context.setter
    def context(self, context: Any) -> None:
        WeightSyncScheme.context.fset(self, context)  # pyright: ignore[reportOptionalCall]
        if context is not None and self.synchronized_on_receiver:
            self._attach(context)

    def _init_on_receiver_impl(
        self,
        model_id: str,
        context: Any = None,
        *,
        model: Any = None,
        worker_idx: int | None = None,
        **_: Any,
    ) -> None:
        if self._handle is None:
            raise RuntimeError(
                "scheme: expected one that the trainer has initialised, got one without a channel; "
                "call init_on_sender before it is sent to workers"
            )
        self.model_id = model_id
        self.worker_idx = worker_idx
        self._local = model
        self.context = context

    def _setup_connection_and_weights_on_receiver_impl(
        self, *, worker_idx: int | None = None
    ) -> None:
        assert self._handle is not None
        self._reader = self._handle.open()
        if self.context is not None:
            self._attach(self.context)
        elif self._local is not None:
            self._follow(_module_of(self._local), None)

    def _attach(self, collector: Any) -> None:
        self._local = _find(collector, self.model_id or "policy")
        self.model = self._local
        follower = self._follow(_module_of(self._local), collector)
        if self._attachment is None:
            self._attachment = Attachment(collector, follower, self._is_policy())

    def _follow(self, module: nn.Module, collector: Any) -> Follower:
        reader, before = self._reader, self._follower
        assert reader is not None
        materialise(module, reader.layout, self._buffers, reader.device)
        mode = self.mode or _mode_for(module, reader, collector)
        if before is not None:
            if before.module is module and before.mode == mode:
                return before
            before.close(detach=before.module is module)
        self._follower = Follower(reader, module, mode)
        self._follower.load()
        return self._follower

    def receive(self, timeout: float | None = None) -> TensorDictBase | None:
        """Load the newest version, where no collector's calls do.

        Args:
            timeout: seconds to wait for a version that is not loaded yet; ``None`` not to wait.

        Returns:
            The model's weights if they are new, else ``None``.
        """
        follower = self._follower
        if follower is None or self._attachment is not None:
            return None
        before = follower.version
        if timeout is not None and before is not None:
            with contextlib.suppress(TimeoutError):
                follower.reader.wait_for(before + 1, timeout)
        if follower.load() == before:
            return None
        return TensorDict.from_module(follower.module).data

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Refused: weights come from the channel.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "weights: expected them through the channel, got some at a worker's end; publish them "
            "with update_policy_weights_, or send() at the trainer's end"
        )

    def create_transport(self, **_: Any) -> TransportBackend:
        """Refused: the channel is the transport.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("scheme: expected no transports, got a request for one")

    def shutdown(self) -> None:
        """Close this end of the channel; may be called again.

        A collector that goes on keeps the newest version. The trainer's end frees the memory, once
        the workers' ends are closed too.
        """
        if self._attachment is not None:
            self._attachment.remove()
        if self._copied is not None:
            self._copied.put_back()
        if self._follower is not None:
            self._follower.close(detach=self._copied is None)
        for end in (self._reader, self._channel):
            if end is not None:
                end.close()
        self.__dict__.update(dict.fromkeys(_OF_THIS_PROCESS))
        super().shutdown()


def _find(collector: Any, model_id: str) -> Any:
    get = getattr(collector, "get_model", None)
    try:
        return _resolve_attr(collector, model_id) if get is None else get(model_id)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"weight_sync_schemes: expected {model_id!r} to name a model of the collector in this "
            f"process, got {error}; for a model that only workers have, call "
            "scheme.init_on_sender(model_id=..., model=...) before the collector is made"
        ) from error


def _module_of(model: Any) -> nn.Module:
    module = model if isinstance(model, nn.Module) else getattr(model, "module", None)
    if isinstance(module, nn.Module):
        return module
    raise TypeError(
        f"model: expected a module, or what has one as .module, got {type(model).__name__}; name "
        "the module in it, such as 'policy.actor', in weight_sync_schemes="
    )


def _mode_for(
    module: nn.Module, reader: WeightReader, collector: Any
) -> Literal["alias", "copy"]:
    dtypes = {entry.name: entry.dtype for entry in reader.layout.entries}
    fits = all(
        slot.tensor.device == reader.device and slot.tensor.dtype == dtypes[slot.name]
        for slot in module_slots(module)
        if slot.kind == "parameter" and slot.name in dtypes
    )
    return "alias" if fits and not is_compiled(collector) else "copy"
