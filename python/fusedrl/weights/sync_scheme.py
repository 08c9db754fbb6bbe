"""The weight channel as a weight-sync scheme of torchrl's collectors."""

from __future__ import annotations

import contextlib
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

# What a scheme has in one process only, each None before it is made and after a shutdown.
_OF_THIS_PROCESS = ("_channel", "_follower", "_local", "_ends")


class ChannelWeightSyncScheme(WeightSyncScheme):
    """torchrl's weight-sync backend ``"channel"``: updates through a :class:`WeightChannel`.

    ``collector.update_policy_weights_(weights)`` publishes one version, and waits for no worker.
    Each batch computes with all of the version that is newest when it begins (with
    ``trajs_per_batch``, each rollout that it is made of), and with ``track_policy_version`` its
    frames are tagged with it: 1 stands for the weights that a collector starts with.
    :class:`fusedrl.LLMCollector` takes a version for each turn. A dead worker is logged.

    A collector in the trainer's own process computes with a copy of its policy, so that in-place
    training does not reach it between updates.

    Args:
        strategy: as in torchrl's schemes. ``"state_dict"`` merges a peft model's adapters. An
            update takes weights in either form.
        dtype, slots, device, timeout: as for :meth:`WeightChannel.create`. Each batch that is being
            collected holds at most one slot: two more than workers never wait.
        mode: with ``"alias"`` the model's parameters are frozen views of the channel; with
            ``"copy"`` they are written in place, in their own dtype and on their own device.
            ``None`` takes alias if dtypes and devices fit and the collector compiles nothing, and
            copy otherwise, also in an inference server, which writes to its model.

    Raises:
        ValueError: the weights do not fit, or an update names some workers only: a channel serves
            all of them.
        TimeoutError: workers hold all slots for too long. The message names their process ids.

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
        if mode not in (None, "alias", "copy"):
            raise ValueError(
                f"mode: expected 'alias', 'copy' or None, got {mode!r}; None takes alias where the "
                "policy allows it, and copy elsewhere"
            )
        super().__init__(strategy)
        self.mode: Literal["alias", "copy"] | None = mode
        wait = seconds("timeout", timeout)
        self._create: Any = partial(
            WeightChannel.create, dtype=dtype, slots=slots, device=device, timeout=wait
        )
        self._handle: WeightHandle | None = None
        self._name = "policy"  # the model's
        self.buffers: dict[str, Tensor] = {}
        self._channel: WeightChannel | None = None  # at the trainer's end
        self._follower: Follower | None = None  # at the end where the weights are computed with
        self._local: Any = None  # this process's model
        self._ends: Any = None  # an ExitStack with what shutdown() undoes

    def __getstate__(self) -> dict[str, Any]:
        """What a worker gets: the channel's handle, and nothing that belongs to this process."""
        return {**super().__getstate__(), **dict.fromkeys(_OF_THIS_PROCESS)}

    @property
    def channel(self) -> WeightChannel:
        """The channel, in the trainer's process; it says who reads it and what they hold."""
        if self._channel is None:
            raise RuntimeError(
                "scheme: expected the trainer's end of an open channel, got none; give the scheme "
                "to a collector first, or call init_on_sender, and nothing after shutdown()"
            )
        return self._channel

    @property
    def version(self) -> int | None:
        """The newest published version; ``None`` before the first, and after :meth:`shutdown`."""
        end = self._channel or (self._follower and self._follower.reader)
        return end and end.version

    # What follows is called by torchrl.

    @property
    def initialized_on_sender(self) -> bool:
        """Whether this is the trainer's open end; false in a child that the trainer forked."""
        return self._channel is not None and self._pid == os.getpid()

    def _init_on_sender_impl(
        self,
        model_id: str = "policy",
        context: Any = None,
        *,
        model: Any = None,
        weights: Any = None,
        ctx: Any = None,
        num_workers: int | None = None,
        remote_collectors: Any = None,
    ) -> None:
        self._pid = os.getpid()
        self.model_id = self._name = model_id or "policy"
        self.context = context
        source = model if model is not None else weights
        if source is None:
            source = find_model(context, self._name)
        if not isinstance(source, Mapping):
            source = module_of(source)
            unsaved = [weight for weight in weights_in(source) if not weight.saved]
            self.buffers = {weight.name: weight.tensor.detach().clone() for weight in unsaved}
        merges = self.strategy_str == "state_dict" and has_adapters(source)
        channel = self._create(source, merge_adapters=merges)
        self._channel, self._handle, self._ends = channel, channel.handle, ExitStack()
        self._ends.callback(channel.close)

    def restore(self, weights: Any, version: Any) -> None:
        """Publish weights, or the model's own, under the version of a state, or a greater one.

        Weights of the model's own may have changed since the state was saved: they get a greater
        one. A version that is no integer is unknown.
        """
        least = version + (weights is None) if isinstance(version, int) else 0
        self.send(weights, version=max(least, (self.version or 0) + 1))

    def join(self, collector: Any) -> None:
        """Take a collector of this process that was made after this scheme was initialized."""
        if self._channel is not None and self.context is None:
            self.context = collector
            if self.synchronized_on_sender:  # else torchrl connects it
                self._follow_in(collector)

    def _setup_connection_and_weights_on_sender_impl(
        self, *, worker_idx: int | None = None, weights: Any | None = None
    ) -> None:
        self.send(weights)
        if isinstance(self.context, Collector):
            self._follow_in(self.context)

    def _follow_in(self, collector: Any) -> None:
        """Let a collector of the trainer's process compute with the channel's weights."""
        try:
            copied = not wrappers_in(collector.get_model(self._name))  # an engine has its own
            if copied:
                self._ends.callback(with_own_copy(collector, self._name))
            self._attach(collector, copied)
        except BaseException:
            self.shutdown()
            raise

    def send(
        self, weights: Any = None, worker_ids: Any = None, *, version: int | None = None
    ) -> int:
        """Publish one version; returns its number, which is one more if ``version`` is ``None``.

        Args:
            weights: a tensordict, module or state dict; the model's own if ``None``.
            worker_ids: ``None``, or all workers.
            version: its number, greater than the last one.

        Raises:
            ValueError, TimeoutError: as for the class.
        """
        everyone = list(range(getattr(self.context, "num_workers", 1)))
        chosen = worker_ids if isinstance(worker_ids, list | tuple | set) else [worker_ids]
        if worker_ids is not None and set(chosen) != set(everyone):
            raise ValueError(
                f"worker_ids: expected None or all of {everyone}, got {worker_ids!r}; a channel's "
                "version reaches every worker: give workers that differ their own schemes"
            )
        if weights is not None and not isinstance(weights, Mapping):
            weights = module_of(weights)
        published = self.channel.publish(weights, version)
        tracker: Any = getattr(self.context, "policy_version_tracker", None)
        if is_policy(self._name) and getattr(tracker, "version_type", None) in (int, "int"):
            tracker.version = published
        if dead := ", ".join(str(r.pid) for r in self.channel.readers() if not r.alive):
            logger.warning(
                "worker_ids: expected living workers, got dead: pid %s; the others get version %d",
                *(dead, published),
            )
        return published

    @WeightSyncScheme.context.setter
    def context(self, context: Any) -> None:
        """The collector, if it still exists; a worker's comes after its policy."""
        WeightSyncScheme.context.fset(self, context)  # pyright: ignore[reportOptionalCall]
        if context is not None and self.synchronized_on_receiver:
            self._attach(context)

    def init_on_receiver(self, *, model_id: str, context: Any = None, **given: Any) -> None:
        """Become the end where a collector or a server computes with the weights."""
        if self.initialized_on_sender:
            raise RuntimeError(
                "weight_sync: expected an object of its own beside the trainer's in one process, "
                "got the trainer's; pass copy.copy(scheme), and send with scheme"
            )
        if self._handle is None:
            raise RuntimeError(
                "scheme: expected one that the trainer has initialised, got one without a channel; "
                "call init_on_sender before it is sent to workers"
            )
        if isinstance(self.context, InferenceServer):  # which has set itself
            context = self.context
        self.__setstate__(self.__getstate__())  # nothing of the trainer's stays in a forked child
        self.model_id, self._name, self._ends = model_id, model_id, ExitStack()
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
        follower = self._follow(find_model(collector, self._name), collector, copied)
        leave = one_version_a_batch(collector, follower, is_policy(self._name))
        self._ends.callback(leave, not copied)
        with follower.call():
            pass  # releases the version that is held until the first batch

    def _follow(self, model: Any, collector: Any, copied: bool = False) -> Follower:
        """Load the newest version into a model, and hold it until the model is called.

        The weights may lie on meta, or in a vLLM engine. What is ``copied`` for a collector, the
        trainer can call too: it is held between batches, and not used after them.
        """
        assert self._handle is not None
        module, before = module_of(model), self._follower
        reader = before.reader if before else self._ends.enter_context(self._handle.open())
        has_engine = bool(wrappers_in(module))
        if not has_engine:
            materialise(module, reader.layout, self.buffers, reader.device)
        mode = self.mode or fitting_mode(module, reader, collector)
        if before is not None:
            if before.module is module and getattr(before, "mode", mode) == mode:
                return before
            before.close(detach=before.module is module)
        if has_engine:
            follower = EngineFollower(self._handle, reader, module)
        else:
            follower = reader.follow(module, mode, between_calls=copied)
        self._ends.callback(follower.close, detach=not copied)
        follower.load()
        self._follower = follower
        return follower

    def receive(self, timeout: float | None = None) -> TensorDictBase | None:
        """Load the newest version, where no collector's calls do that; its weights if they are new.

        Without a ``timeout``, in seconds, it does not wait for a version that is not loaded yet.
        """
        follower = self._follower
        if follower is None:
            return None
        before = follower.version
        if timeout is not None and before is not None:
            with contextlib.suppress(TimeoutError):
                follower.reader.wait_for(before + 1, timeout)
        if follower.load() == before:
            return None
        torchrl.number_weights(self.context, follower.version)
        weights = TensorDict.from_module(follower.module)
        return weights.data  # pyright: ignore[reportAttributeAccessIssue]

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Refused with a ``RuntimeError``: the model's memory is the channel's."""
        raise RuntimeError(
            "weights: expected them through the channel, got some at a worker's end; publish them "
            "with update_policy_weights_, or send() at the trainer's end"
        )

    def create_transport(self, **_: Any) -> TransportBackend:
        """Refused with a ``NotImplementedError``: the channel is the transport."""
        raise NotImplementedError("scheme: expected no transports; the channel carries the weights")

    def shutdown(self) -> None:
        """Close this end of the channel; may be called again.

        A collector that goes on keeps the newest version. One in the trainer's process gets back
        the policy that it was given, under a number greater than that of any version; call
        ``increment_version`` for each further change of it. The trainer's end frees the memory,
        once the workers' ends are closed too. The scheme may be given to another collector then.
        """
        if self._ends is not None:
            self._ends.close()
        vars(self).update(dict.fromkeys(_OF_THIS_PROCESS))
        self.synchronized_on_sender = False
        super().shutdown()


register_weight_sync_backend("channel")(ChannelWeightSyncScheme)
