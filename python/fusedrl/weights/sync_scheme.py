"""The weight channel as a weight-sync scheme of torchrl's collectors."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.collectors import Collector
from torchrl.modules.inference_server import InferenceServer
from torchrl.weight_update import TransportBackend, WeightSyncScheme
from torchrl.weight_update.weight_sync_schemes import register_weight_sync_backend

from fusedrl.channel import WeightChannel, WeightHandle
from fusedrl.channel.adapters import has_adapters
from fusedrl.channel.checks import seconds
from fusedrl.channel.follow import Follower
from fusedrl.channel.tensors import weights_in
from fusedrl.compat import torchrl
from fusedrl.vllm.policy import EngineFollower, wrappers_in
from fusedrl.weights.collector import (
    find_model,
    fitting_mode,
    is_policy,
    materialise,
    module_of,
    one_version_a_batch,
    with_own_copy,
)

logger = logging.getLogger("fusedrl")

# Attributes that no other process gets; None before they are made and after a shutdown.
_PROCESS_STATE = ("_channel", "_follower", "_local", "_cleanup")


class ChannelWeightSyncScheme(WeightSyncScheme):
    """torchrl's weight-sync backend ``"channel"``: updates through a :class:`WeightChannel`.

    ``collector.update_policy_weights_(weights)`` publishes one version, and waits for no worker.
    Each batch (with ``trajs_per_batch``, each of its rollouts) computes with the version that is
    newest when it begins; with ``track_policy_version`` its frames are tagged with this version.
    Version 1 has the collector's initial weights. :class:`fusedrl.LLMCollector` switches versions
    between turns. A dead worker is logged.

    A scheme serves one collector. A collector in the trainer's process computes with a copy of its
    policy, so that in-place training does not change it between updates.

    Args:
        strategy: as in torchrl's schemes. ``"state_dict"`` merges a peft model's adapters.
        dtype, slots, device, timeout: as for :meth:`WeightChannel.create`. A batch holds at most
            one slot while it is collected: with two slots more than workers, updates never wait.
        mode: with ``"alias"`` the model's parameters are frozen views of the channel; with
            ``"copy"`` they are written in place, and keep their dtype and device. ``None``: alias
            if dtypes and devices fit and the collector compiles nothing, copy otherwise and in an
            inference server, which writes to its model.

    Raises:
        ValueError: the weights do not fit, or an update names only some of the workers.
        TimeoutError: workers hold all slots for too long; the message has their process ids.

    Example:
        >>> import torch
        >>> from fusedrl import ChannelWeightSyncScheme
        >>> trained = torch.nn.Linear(2, 1)
        >>> scheme = ChannelWeightSyncScheme()  # a collector does what the next lines do
        >>> scheme.init_on_sender(model_id="policy", model=trained)
        >>> scheme.connect()
        >>> scheme.version
        1
        >>> scheme.shutdown()
    """

    def __init__(
        self,
        strategy: Literal["tensordict", "state_dict"] = "tensordict",
        *,
        dtype: torch.dtype | None = None,
        slots: int = 3,
        mode: Literal["alias", "copy"] | None = None,
        device: torch.device | str | None = None,
        timeout: float = 60.0,
    ) -> None:
        super().__init__(strategy)
        self.mode: Literal["alias", "copy"] | None = mode
        wait = seconds("timeout", timeout)
        self._create: Any = partial(
            WeightChannel.create, dtype=dtype, slots=slots, device=device, timeout=wait
        )
        self._handle: WeightHandle | None = None
        self.buffers: dict[str, Tensor] = {}
        self._channel: WeightChannel | None = None  # in the trainer's process
        self._follower: Follower | None = None  # where the weights are used
        self._local: Any = None  # the model of this process
        self._cleanup: Any = None  # an ExitStack, which shutdown() closes

    def __getstate__(self) -> dict[str, Any]:
        """What a worker receives: the channel's handle, and nothing of this process."""
        return {**super().__getstate__(), **dict.fromkeys(_PROCESS_STATE)}

    @property
    def channel(self) -> WeightChannel:
        """The channel, in the trainer's process; ``readers()`` lists workers and their leases."""
        if self._channel is None:
            raise RuntimeError(
                "scheme: expected an open channel in the trainer's process, got none; pass the "
                "scheme to a collector or call init_on_sender, and nothing after shutdown()"
            )
        return self._channel

    @property
    def version(self) -> int | None:
        """The newest published version; ``None`` before the first, and after :meth:`shutdown`."""
        source = self._channel or (self._follower and self._follower.reader)
        return source and source.version

    @property
    def initialized_on_sender(self) -> bool:
        """False: each collector calls :meth:`init_on_sender`, which refuses a second collector."""
        return False

    @property
    def _is_sender(self) -> bool:
        """Whether this is the trainer's scheme with an open channel, and not in a forked child."""
        return self._channel is not None and self._channel.handle.pid == os.getpid()

    def _init_on_sender_impl(
        self,
        model_id: str | None = "policy",
        context: Any = None,
        *,
        model: Any = None,
        weights: Any = None,
        **_: Any,  # arguments of other schemes
    ) -> None:
        former = self.context if self._is_sender else None
        if former is not None and former is not context:
            raise RuntimeError(
                f"scheme: expected one without a collector, got that of a {type(former).__name__}; "
                "make one scheme for each collector, or call scheme.shutdown() after the first"
            )
        self.model_id = model_id or "policy"
        if context is None or not self._is_sender:
            source = weights if model is None else model
            if source is None:
                source = find_model(context, self.model_id)
            if not isinstance(source, Mapping):
                source = module_of(source)
                unsaved = [weight for weight in weights_in(source) if not weight.saved]
                self.buffers = {weight.name: weight.tensor.detach().clone() for weight in unsaved}
            merges = self.strategy_str == "state_dict" and has_adapters(source)
            channel = self._create(source, merge_adapters=merges)
            self._channel, self._handle, self._cleanup = channel, channel.handle, ExitStack()
            self._cleanup.callback(channel.close)
        self.context = context
        self.synchronized_on_sender = False  # connect() comes next

    def _setup_connection_and_weights_on_sender_impl(
        self, *, worker_idx: int | None = None, weights: Any | None = None
    ) -> None:
        if weights is not None or self.version is None:  # otherwise it was connected before
            self.send(weights)
        collector = self.context
        if not isinstance(collector, Collector):
            return
        try:  # it computes with the channel's weights in this process
            copied = not wrappers_in(find_model(collector, self.model_id))  # not an engine
            if copied:
                self._cleanup.callback(with_own_copy(collector, self.model_id))
            self._attach(collector, copied)
        except BaseException:
            self.shutdown()
            raise

    def restore(self, weights: Any, version: Any, loaded: bool = False) -> None:
        """Publish a policy's state, or the model's weights, under this version or a greater one."""
        path = str(self.model_id).removeprefix("policy").replace("[", ".").replace("]", "")
        if weights is not None and path:  # the channel has only this part
            part = f"{path[1:]}."
            weights = {n.removeprefix(part): x for n, x in weights.items() if n.startswith(part)}
        # The model may have changed since that version, unless the state is loaded.
        least = version + (weights is None and not loaded) if isinstance(version, int) else 0
        self.send(weights, version=max(least, (self.version or 0) + 1))

    def send(
        self, weights: Any = None, worker_ids: Any = None, *, version: int | None = None
    ) -> int:
        """Publish weights as one version, and return its number; ``None``: the model's weights.

        Every worker gets it. ``version`` has to be greater than the last one.
        """
        everyone = list(range(getattr(self.context, "num_workers", 1)))
        chosen = worker_ids if isinstance(worker_ids, list | tuple | set) else [worker_ids]
        if worker_ids is not None and set(chosen) != set(everyone):
            raise ValueError(
                f"worker_ids: expected None or all of {everyone}, got {worker_ids!r}; a channel's "
                "version reaches every worker: use separate schemes for different weights"
            )
        published = self.channel.publish(weights, version)
        tracker: Any = getattr(self.context, "policy_version_tracker", None)
        if is_policy(self.model_id) and getattr(tracker, "version_type", None) in (int, "int"):
            tracker.version = published
        if dead := ", ".join(str(r.pid) for r in self.channel.readers() if not r.alive):
            logger.warning(
                "worker_ids: expected running workers, got dead: pid %s; live ones get version %d",
                *(dead, published),
            )
        return published

    @WeightSyncScheme.context.setter
    def context(self, context: Any) -> None:
        """The collector, if it still exists; a worker's is set after its policy."""
        WeightSyncScheme.context.fset(self, context)  # pyright: ignore[reportOptionalCall]
        if context is not None and self.synchronized_on_receiver:
            self._attach(context)

    def init_on_receiver(self, *, model_id: str, context: Any = None, **given: Any) -> None:
        """Make this the receiving scheme, in a collector or server that uses the weights."""
        if self._is_sender or self._handle is None:
            raise RuntimeError(
                "weight_sync: expected a copy of a scheme that the trainer has initialised, got "
                f"{'that scheme itself' if self._is_sender else 'one without a channel'}; call "
                "init_on_sender, pass copy.copy(scheme) here, and send with scheme"
            )
        if isinstance(self.context, InferenceServer):  # the server has set itself
            context = self.context
        self.__setstate__(self.__getstate__())  # drop the trainer's state in a forked child
        self.model_id, self._cleanup = model_id, ExitStack()
        self.worker_idx, self._local = given.get("worker_idx"), given.get("model")
        self.context = context
        self._initialized_on_receiver = True

    def _setup_connection_and_weights_on_receiver_impl(
        self, *, worker_idx: int | None = None
    ) -> None:
        if self._local is not None:
            follower = self._follow(self._local, self.context)
            torchrl.number_weights(self.context, follower.version)
        elif self.context is not None:
            self._attach(self.context)

    def _attach(self, collector: Any, copied: bool = False) -> None:
        """Switch versions of the collector's model between batches."""
        follower = self._follow(find_model(collector, self.model_id), collector, copied)
        leave = one_version_a_batch(collector, follower, is_policy(self.model_id))
        self._cleanup.callback(leave, not copied)
        with follower.call():
            pass  # releases the version that is held until the first batch

    def _follow(self, model: Any, collector: Any, copied: bool = False) -> Follower:
        """Load the newest version into a model, and hold it until the model is called.

        The weights may be on meta, or in a vLLM engine. A model that was ``copied`` for a collector
        can also be called by the trainer: its version is held between batches, and not needed after
        them.
        """
        handle: Any = self._handle
        module, before = module_of(model), self._follower
        reader = before.reader if before else self._cleanup.enter_context(handle.open())
        has_engine = bool(wrappers_in(module))
        if not has_engine:
            materialise(module, reader.layout, self.buffers, reader.device)
        mode = self.mode or fitting_mode(module, reader, collector)
        if before is not None:
            if before.module is module and getattr(before, "mode", mode) == mode:
                return before
            before.close()
        if has_engine:
            follower = EngineFollower(handle, reader, module)
        else:
            follower = reader.follow(module, mode, between_calls=copied)
        self._cleanup.callback(follower.close, detach=not copied)
        follower.load()
        self._follower = follower
        return follower

    def receive(self, timeout: float | None = None) -> TensorDictBase | None:
        """Load the newest version, without waiting; returns its weights if they are new."""
        follower = self._follower
        if follower is None or follower.version == follower.load():
            return None
        torchrl.number_weights(self.context, follower.version)
        weights = TensorDict.from_module(follower.module)
        return weights.data  # pyright: ignore[reportAttributeAccessIssue]

    def create_transport(self, **_: Any) -> TransportBackend:
        """Raise ``NotImplementedError``: the channel is the transport."""
        raise NotImplementedError("scheme: expected no transports; the channel carries the weights")

    def shutdown(self) -> None:
        """Close this end of the channel; may be called again.

        A collector that continues keeps the newest version. One in the trainer's process gets its
        original policy back, under a number greater than any version, from which its
        ``increment_version`` counts on. Another collector may use the scheme afterwards.
        """
        if self._cleanup is not None:
            self._cleanup.close()
        vars(self).update(dict.fromkeys(_PROCESS_STATE))
        self.synchronized_on_sender = False
        super().shutdown()


def of_policy(schemes: Mapping[str, Any] | None) -> list[ChannelWeightSyncScheme]:
    """The schemes whose channels carry the weights of a collector's policy, or of a part."""
    named = [scheme for name, scheme in (schemes or {}).items() if is_policy(name)]
    return [scheme for scheme in named if isinstance(scheme, ChannelWeightSyncScheme)]


register_weight_sync_backend("channel")(ChannelWeightSyncScheme)
