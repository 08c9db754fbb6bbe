"""The weight channel as a weight-sync scheme of torchrl's collectors."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.collectors import Collector
from torchrl.envs import Transform
from torchrl.modules.inference_server import InferenceServer
from torchrl.weight_update import TransportBackend, WeightSyncScheme
from torchrl.weight_update.weight_sync_schemes import register_weight_sync_backend

from fusedrl.channel import WeightChannel, WeightHandle, WeightReader
from fusedrl.channel.checks import seconds
from fusedrl.channel.follow import Follower
from fusedrl.compat import torchrl
from fusedrl.vllm.policy import EngineFollower, wrappers_in
from fusedrl.weights.follow import Attachment, call_if_alive, module_of, patch_attribute
from fusedrl.weights.worker_end import (
    POLICY_STATE,
    find_model,
    fitting_mode,
    is_policy,
    materialise,
    replace_by_copy,
    unsaved_buffers,
)

logger = logging.getLogger("fusedrl")

# What a scheme has in one process only, each None before it is made and after a shutdown.
_OF_THIS_PROCESS = (
    *("_channel", "_put_back", "_finalizer"),
    *("_reader", "_follower", "_attachment", "_local"),
)


class ChannelWeightSyncScheme(WeightSyncScheme):
    """torchrl's weight-sync backend ``"channel"``: updates through a :class:`WeightChannel`.

    ``collector.update_policy_weights_(weights)`` publishes one version. Each batch takes the newest
    version when it begins and computes with all of it (with ``trajs_per_batch``, each rollout that
    it is made of). With ``track_policy_version`` its frames are tagged with that version. The
    numbers are the channel's: 1 stands for the weights that a collector starts with.

    An update returns when the version is published and does not wait for workers: every batch that
    begins afterwards uses this version or a later one. :class:`fusedrl.LLMCollector` takes a
    version for each turn. A dead worker is logged, with its process id.

    A collector in the trainer's own process computes with a copy of its policy, so that in-place
    training does not reach it between updates.

    Args:
        strategy: as in torchrl's schemes. ``"state_dict"`` merges a peft model's adapters. An
            update takes weights in either form.
        dtype: dtype of floating weights in the channel; their own if ``None``.
        slots: number of versions that fit into the channel, as for :meth:`WeightChannel.create`.
            Each batch that is being collected holds at most one: two more than workers never wait.
        mode: with ``"alias"`` the model's parameters are frozen views of the channel; with
            ``"copy"`` they are written in place, in their own dtype and on their own device.
            ``None`` takes alias if dtypes and devices fit and the collector compiles nothing, and
            copy otherwise, also in an inference server, which writes to its model.
        device: where the channel lies; that of the weights if ``None``.
        timeout: seconds that each wait may take.

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

    # The trainer's end.
    _channel: WeightChannel | None
    _put_back: Callable[[], None] | None  # gives a collector its model back, which it has a copy of
    _finalizer: weakref.finalize[..., Any] | None  # shuts down with the collector
    # The end where a collector computes with the weights, which may be the trainer's process too.
    _reader: WeightReader | None
    _follower: Follower | None
    _attachment: Attachment | None
    _local: Any  # this process's model

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
        self._options = {
            "dtype": dtype,
            "slots": slots,
            "device": device,
            "timeout": seconds("timeout", timeout),
        }
        self._pid = os.getpid()
        self._handle: WeightHandle | None = None
        self.buffers: dict[str, Tensor] = {}
        for name in _OF_THIS_PROCESS:
            setattr(self, name, None)

    def __getstate__(self) -> dict[str, Any]:
        """What a worker gets: the channel's handle, and nothing that belongs to this process."""
        return {**super().__getstate__(), **dict.fromkeys(_OF_THIS_PROCESS)}

    @property
    def channel(self) -> WeightChannel:
        """The channel, in the trainer's process; it says who reads it and what they hold.

        Raises:
            RuntimeError: this is the scheme in a worker, or it is shut down.
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
        if self._channel is not None:
            return self._channel.version
        return None if self._reader is None else self._reader.version

    # What follows is called by torchrl.

    @property
    def initialized_on_sender(self) -> bool:
        """Whether this is the trainer's end; false in a child that the trainer forked."""
        return super().initialized_on_sender and self._pid == os.getpid()

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
        self._pid = os.getpid()
        self.model_id = model_id or "policy"
        self.context = context
        source = model if model is not None else weights
        if source is None:
            source = find_model(context, self._id())
            if wrappers_in(source):
                raise ValueError(
                    "weight_sync_schemes: expected the trainer's model beside a policy with a vLLM "
                    "engine, got none; call scheme.init_on_sender(model_id='policy', model=model) "
                    "before the collector is made"
                )
        if not isinstance(source, Mapping):
            source = module_of(source)
            self.buffers = unsaved_buffers(source)
        merges = self.strategy_str == "state_dict" and hasattr(source, "merge_and_unload")
        self._channel = WeightChannel.create(source, merge_adapters=merges, **self._options)
        self._handle = self._channel.handle
        if context is not None:
            self._end_with(context)

    def _end_with(self, collector: Any) -> None:
        """Shut down once the collector is gone, unless somebody does so before."""
        self._finalizer = weakref.finalize(
            collector, call_if_alive, weakref.WeakMethod(self.shutdown)
        )
        self._finalizer.atexit = False
        if is_policy(self._id()) and hasattr(collector, "load_state_dict"):
            load: Any = vars(collector).get("load_state_dict")  # that of another scheme
            load = load or partial(call_if_alive, weakref.WeakMethod(collector.load_state_dict))
            patch_attribute(collector, "load_state_dict", partial(self._resume, load))

    def _resume(self, load: Callable[..., None], state_dict: Any, **kwargs: Any) -> None:
        """Load a collector's state, and publish its weights, unless loading has published them."""
        # A collector of several processes has the state of each.
        of_policy = state_dict.get("worker0", state_dict).get(POLICY_STATE, {})
        part = f"{self._id()}.".removeprefix("policy.").replace("[", ".").replace("]", "")
        names = [n for n in of_policy if n.startswith(part) and isinstance(of_policy[n], Tensor)]
        weights = {name.removeprefix(part): of_policy[name] for name in names}
        if weights and self._channel is not None:
            try:
                self._channel.layout.match(weights)
            except ValueError:
                if kwargs.get("strict", True):  # another model's are refused before all else
                    raise
                weights = {}  # the model has what loading takes of them
        before, version = self.version, state_dict.get("policy_version")
        if isinstance(version, int) and not hasattr(self.context, "hold_turns"):
            version += 1  # torchrl's state has the trainer's weights, which no version may have had
        load(state_dict, **kwargs)
        if self._channel is not None and self.version == before:
            self.restore(weights or None, version)

    def restore(self, weights: Any, version: Any) -> None:
        """Publish the weights of a state under its version, or a greater one if that is not new.

        Args:
            weights: as for :meth:`send`; for the model's own, the version is a greater one.
            version: that they had when the state was saved; unknown if it is no integer.
        """
        least = version + (weights is None) if isinstance(version, int) else 0
        self.send(weights, version=max(least, (self.version or 0) + 1))

    def join(self, collector: Any) -> None:
        """Take a collector of this process that was made after this scheme was initialized."""
        if self._channel is None or self.context is not None:
            return
        self.context = collector
        self._end_with(collector)
        if self.synchronized_on_sender:  # else torchrl connects it
            self._follow_in(collector)

    def _setup_connection_and_weights_on_sender_impl(
        self, *, worker_idx: int | None = None, weights: Any | None = None
    ) -> None:
        collector = self.context
        if not isinstance(collector, Collector):
            self._publish(weights)
            return
        self._follow_in(collector, weights, publishes=True)

    def _follow_in(self, collector: Any, weights: Any = None, publishes: bool = False) -> None:
        try:
            if not wrappers_in(collector.get_model(self._id())):  # an engine has its own weights
                self._put_back = replace_by_copy(collector, self._id(), self.channel.layout)
            if publishes:
                self._publish(weights)
            self._open()
            self._attach(collector)
        except BaseException:
            self.shutdown()
            raise

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
            ValueError, TimeoutError: as for the class.
        """
        everyone = list(range(getattr(self.context, "num_workers", 1)))
        chosen = worker_ids if isinstance(worker_ids, list | tuple | set) else [worker_ids]
        if worker_ids is not None and set(chosen) != set(everyone):
            raise ValueError(
                f"worker_ids: expected None or all of {everyone}, got {worker_ids!r}; a channel's "
                "version reaches every worker: give workers that differ their own schemes"
            )
        published = self._publish(weights, version)
        if dead := ", ".join(str(r.pid) for r in self.channel.readers() if not r.alive):
            logger.warning(
                "worker_ids: expected living workers, got dead: pid %s; the others get version %d",
                *(dead, published),
            )
        return published

    def _publish(self, weights: Any, version: int | None = None) -> int:
        if weights is not None and not isinstance(weights, Mapping):
            weights = module_of(weights)
        published = self.channel.publish(weights, version)
        tracker: Any = getattr(self.context, "policy_version_tracker", None)
        if is_policy(self._id()) and getattr(tracker, "version_type", None) in (int, "int"):
            tracker.version = published
        return published

    def _id(self) -> str:
        return self.model_id or "policy"

    @property
    def context(self) -> Any:
        """The collector, if it still exists."""
        return super().context

    @context.setter
    def context(self, context: Any) -> None:
        WeightSyncScheme.context.fset(self, context)  # pyright: ignore[reportOptionalCall]
        if context is not None and self.synchronized_on_receiver:
            self._attach(context)

    def init_on_receiver(self, *, model_id: str, context: Any = None, **arguments: Any) -> None:
        """Become the end where a collector or a server computes with the weights.

        Raises:
            RuntimeError: this is the trainer's end, which would lose its channel.
        """
        if self.initialized_on_sender:
            raise RuntimeError(
                "weight_sync: expected an object of its own beside the trainer's in one process, "
                "got the trainer's; pass copy.copy(scheme), and send with scheme"
            )
        super().init_on_receiver(model_id=model_id, context=context, **arguments)

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
        if isinstance(self.context, InferenceServer):  # which has set itself
            context = self.context
        self.__setstate__(self.__getstate__())  # nothing of the trainer's stays in a forked child
        self._initialized_on_receiver = True
        self.model_id = model_id
        self.worker_idx = worker_idx
        self._local = model
        self.context = context

    def _setup_connection_and_weights_on_receiver_impl(
        self, *, worker_idx: int | None = None
    ) -> None:
        self._open()
        if self._local is not None:
            follower = self._follow(self._local, self.context)
            torchrl.number_weights(self.context, follower.version)
        elif self.context is not None:
            self._attach(self.context)

    def _open(self) -> None:
        assert self._handle is not None
        self._reader = self._handle.open()

    def _attach(self, collector: Any) -> None:
        """Switch versions of the collector's model between batches."""
        self._local = self.model = find_model(collector, self._id())
        follower = self._follow(self._local, collector)
        if self._attachment is None:
            self._attachment = Attachment(collector, follower, is_policy(self._id()))
        with follower.call():
            pass  # releases the version that is held until the first batch

    def _follow(self, model: Any, collector: Any = None) -> Follower:
        """Load the newest version into a model, and hold it until the model is called.

        Args:
            model: a module, or an object with a ``module``; its weights may lie on meta, or in a
                vLLM engine.
            collector: the collector or inference server that calls the model, if it is known.
        """
        module, reader = module_of(model), self._reader
        assert reader is not None
        if isinstance(module, Transform):
            raise ValueError(
                f"weight_sync_schemes: expected a module that is called, got the transform "
                f"{self._id()!r}; name the module in it, such as '{self._id()}.model'"
            )
        has_engine = bool(wrappers_in(module))
        if not has_engine:
            materialise(module, reader.layout, self.buffers, reader.device)
        mode = self.mode or fitting_mode(module, reader, collector)
        before = self._follower
        if before is not None:
            if before.module is module and getattr(before, "mode", mode) == mode:
                return before
            before.close(detach=before.module is module)
        if has_engine:
            assert self._handle is not None
            self._follower = EngineFollower(self._handle, reader, module)
        else:
            # A policy that the trainer can call is held between batches too.
            self._follower = reader.follow(module, mode, keeps=self._put_back is not None)
        self._follower.load()
        return self._follower

    def receive(self, timeout: float | None = None) -> TensorDictBase | None:
        """Load the newest version, in a process where no collector's calls do that.

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
        torchrl.number_weights(self.context, follower.version)
        weights = TensorDict.from_module(follower.module)
        return weights.data  # pyright: ignore[reportAttributeAccessIssue]

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
        raise NotImplementedError(
            "scheme: expected no transports, got a request for one; the channel itself carries the "
            "weights"
        )

    def shutdown(self) -> None:
        """Close this end of the channel; may be called again.

        A collector that goes on keeps the newest version. One in the trainer's process gets back
        the policy that it was given, under a number greater than that of any version; call
        ``increment_version`` for each further change of it. The trainer's end frees the memory,
        once the workers' ends are closed too.
        """
        keeps = self._put_back is None
        if self._attachment is not None:
            self._attachment.remove(keeps)
        if self._follower is not None:
            self._follower.close(detach=keeps)
        if self._reader is not None:
            self._reader.close()
        if self._put_back is not None:
            self._put_back()
        if self._finalizer is not None:
            self._finalizer.detach()  # there may be another channel by the time that it runs
        if self._channel is not None:
            self._channel.close()
        for name in _OF_THIS_PROCESS:
            setattr(self, name, None)
        super().shutdown()


register_weight_sync_backend("channel")(ChannelWeightSyncScheme)
