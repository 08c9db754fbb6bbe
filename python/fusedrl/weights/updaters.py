"""Weight updaters within a process and to worker processes, from torchrl's first LLM API."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from fusedrl.channel import WeightHandle
from fusedrl.channel.checks import seconds
from fusedrl.compat import torchrl
from fusedrl.weights.base import LocalWeightUpdaterBase, RemoteWeightUpdaterBase, WorkerId
from fusedrl.weights.checks import check_getter, check_weights
from fusedrl.weights.copying import copy_weights, pairs, unwrap
from fusedrl.weights.sync_scheme import ChannelWeightSyncScheme


class VanillaLocalWeightUpdater(LocalWeightUpdaterBase):
    """Writes the weights that a function returns into a policy of the same process.

    Args:
        weight_getter: returns the trainer's weights, a tensordict or a module. Pass ``None`` if you
            give each update its weights; an update without weights then changes nothing.
        policy_weights: the policy's weights, such as ``TensorDict.from_module(policy)``. They are
            written in place, also if they require gradients. ``None`` takes the policy of the
            collector that the updater is registered with.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from fusedrl import VanillaLocalWeightUpdater
        >>> policy, trained = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
        >>> updater = VanillaLocalWeightUpdater(lambda: trained, TensorDict.from_module(policy))
        >>> updater.update_weights()
        >>> bool(policy.weight == trained.weight)
        True
    """

    def __init__(
        self,
        weight_getter: Callable[[], TensorDictBase] | None,
        policy_weights: TensorDictBase | None,
    ) -> None:
        check_getter("weight_getter", weight_getter)
        if policy_weights is not None:
            check_weights("policy_weights", policy_weights)
        self.weight_getter = weight_getter
        self.policy_weights = policy_weights

    def _get_server_weights(self) -> TensorDictBase | None:
        return None if self.weight_getter is None else unwrap(self.weight_getter())

    def _get_local_weights(self) -> TensorDictBase | None:
        policy = getattr(self.collector, "policy", None)
        if self.policy_weights is None and isinstance(policy, torch.nn.Module):
            return TensorDict.from_module(policy)
        return self.policy_weights

    def _map_weights(self, server_weights: TensorDictBase) -> TensorDictBase:
        return server_weights

    def _maybe_map_weights(
        self, server_weights: TensorDictBase | None, local_weights: TensorDictBase | None
    ) -> TensorDictBase | None:
        return None if server_weights is None else self._map_weights(server_weights)

    def _update_local_weights(
        self, local_weights: TensorDictBase | None, mapped_weights: TensorDictBase | None
    ) -> None:
        if local_weights is not None and mapped_weights is not None:
            copy_weights(mapped_weights, local_weights)


class MultiProcessedRemoteWeightUpdate(RemoteWeightUpdaterBase):
    """Sends weights to the worker processes of a torchrl multi-process collector.

    An update writes ``policy_weights`` in place, and publishes one version of them by a
    :class:`~fusedrl.ChannelWeightSyncScheme`, which the collector gets before its processes start.
    Every call of a worker's policy computes with one complete version, and a call that begins after
    the update computes with the new one, also in the middle of a batch. No worker is interrupted,
    and none waits.

    Args:
        get_server_weights: returns the trainer's weights, a tensordict or a module. Pass ``None``
            if you give each update its weights, or if the collector's policy *is* the trained
            module: an update without weights then publishes it as it is.
        policy_weights: the policy's weights, such as ``TensorDict.from_module(policy)``, by the
            device of the workers' policy or by the index of a worker. Each entry has a channel. For
            a collector with ``policy_factory`` they are the trainer's copy of what a worker has,
            and the workers start with what the factory makes.
        timeout: seconds to wait for the end of a policy call of an old version if all slots are
            taken.
        slots: number of versions that fit into a channel; each takes memory. With fewer than two
            more than the workers that share it, an update may wait for the end of a policy call.

    Raises:
        ValueError: the policy does not have such names or shapes, a worker is unknown, or one has
            no entry.
        RuntimeError: a worker is dead; the message names its index and process id. Or the
            collector's processes run already when it gets the updater.
        TimeoutError: workers hold all slots for longer than ``timeout``.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from fusedrl import MultiProcessedRemoteWeightUpdate
        >>> trained = TensorDict({"w": torch.ones(2)})
        >>> workers = {torch.device("cpu"): TensorDict({"w": torch.zeros(2)})}
        >>> MultiProcessedRemoteWeightUpdate(lambda: trained, workers).update_weights()
        >>> workers[torch.device("cpu")]["w"]
        tensor([1., 1.])
    """

    def __init__(
        self,
        get_server_weights: Callable[[], TensorDictBase] | None,
        policy_weights: Mapping[Any, TensorDictBase],
        *,
        timeout: float = 300.0,
        slots: int = 3,
    ) -> None:
        check_getter("get_server_weights", get_server_weights)
        if not isinstance(policy_weights, Mapping) or isinstance(policy_weights, TensorDictBase):
            raise TypeError(
                "policy_weights: expected a dict from a worker's device or index to its weights, "
                f"got {type(policy_weights).__name__}; pass {{torch.device('cpu'): weights}}"
            )
        for worker, weights in policy_weights.items():
            check_weights(f"policy_weights[{worker!r}]", weights)
        seconds("timeout", timeout)
        self.weights_getter = get_server_weights
        self.policy_weights = policy_weights
        self.timeout = timeout
        self.slots = slots
        self._schemes: dict[Any, ChannelWeightSyncScheme] = {}
        self._entries: list[Any] = []  # of the workers, by index

    def all_worker_ids(self) -> list[Any]:
        """The names of all workers: the keys of ``policy_weights``."""
        return list(self.policy_weights)

    def _get_server_weights(self) -> TensorDictBase | None:
        return None if self.weights_getter is None else unwrap(self.weights_getter())

    def _maybe_map_weights(self, server_weights: TensorDictBase | None) -> TensorDictBase | None:
        return server_weights

    def register_collector(self, collector: Any) -> None:
        """Keep a weak reference to the collector, and let its workers follow channels.

        Raises:
            RuntimeError: another collector is registered, or the processes of this one run already.
        """
        if hasattr(collector, "procs") and not self._schemes:
            raise RuntimeError(
                "weight_updater: expected a collector whose processes have not started, got one "
                "that runs; pass the updater to its constructor, or weight_sync_schemes="
            )
        super().register_collector(collector)
        torchrl.before_processes_start(collector, partial(self._open_channels, collector))

    def publish_with(self, scheme: ChannelWeightSyncScheme) -> None:
        """Publish for the one worker of a collector, whose scheme it is.

        Raises:
            ValueError: ``policy_weights`` are not those of one worker.
        """
        workers = self.all_worker_ids()
        if len(workers) != 1:
            raise ValueError(
                f"policy_weights: expected one entry for the one worker, got {workers}; drop others"
            )
        self._schemes, self._entries = {workers[0]: scheme}, workers

    def _open_channels(self, collector: Any) -> None:
        """Open a channel for each entry of ``policy_weights``, before the processes start."""
        if all(weights.is_empty() for weights in self.policy_weights.values()):
            return
        devices = collector.policy_device
        self._entries = [self._entry_for(index, device) for index, device in enumerate(devices)]
        if unknown := [worker for worker in self.policy_weights if worker not in self._entries]:
            raise ValueError(
                f"policy_weights: expected workers of the collector, 0 to {len(devices) - 1} or "
                f"devices {devices}, got {unknown}; name each by its index or device, once"
            )
        for worker, weights in self.policy_weights.items():
            scheme: Any = ChannelWeightSyncScheme(slots=self.slots, timeout=self.timeout)
            scheme.init_on_sender(model_id="policy", context=collector, weights=weights)
            self._schemes[worker] = scheme
            if collector.policy is not None:
                scheme.channel.layout.matched(collector.policy)
                scheme.send()
        handles = [self._schemes[worker].channel.handle for worker in self._entries]
        torchrl.set_schemes(collector, {"policy": _WorkersOwn(handles)})

    def _entry_for(self, index: int, device: torch.device | None) -> Any:
        """The key of ``policy_weights`` for a worker; every device is that of a policy without one.

        Raises:
            ValueError: there is none.
        """
        for worker in self.policy_weights:
            if worker == index if isinstance(worker, int) else device in (None, worker):
                return worker
        raise ValueError(
            f"policy_weights: expected weights for each worker, got none for worker {index}; add "
            "them by its index, or by the device of its policy"
        )

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process publishes nothing."""
        return {**super().__getstate__(), "_schemes": {}, "_entries": []}

    def _distribute(self, worker_ids: list[Any], mapped_weights: Any) -> list[Any]:
        for worker in worker_ids:
            if mapped_weights is not None:
                pairs(mapped_weights, self.policy_weights[worker])  # refuses what does not fit
            self._check_alive(worker)
        return super()._distribute(worker_ids, mapped_weights)

    def _check_alive(self, worker: WorkerId) -> None:
        """Raise ``RuntimeError`` if processes have ended that compute with an entry."""
        if not self._entries:
            return
        if self.collector is None or self.collector.closed:
            raise RuntimeError(
                "collector: expected a running one, got one that is shut down; make another"
            )
        for index, process in enumerate(self.collector.procs):
            if self._entries[index] == worker and not process.is_alive():
                raise RuntimeError(
                    f"worker {index} (pid {process.pid}): expected a living process, got exit code "
                    f"{process.exitcode}; its own output says why it ended: make another collector"
                )

    def _sync_weights_with_worker(
        self, worker_id: WorkerId, server_weights: TensorDictBase | None
    ) -> None:
        weights = self.policy_weights[worker_id]
        if server_weights is not None:
            copy_weights(server_weights, weights)
        elif getattr(self.collector, "policy", None) is None:
            return  # not trained in place
        if worker_id in self._schemes:
            self._schemes[worker_id].send(weights)


class _WorkersOwn(ChannelWeightSyncScheme):
    """The workers' end of an updater's schemes: each worker opens the channel of its own entry.

    Where nothing is published before the workers start, they begin with the weights that they have.

    Args:
        handles: of the workers' channels, in the order of the workers.
    """

    awaits_first = False

    def __init__(self, handles: list[WeightHandle]) -> None:
        super().__init__()
        self._handles = handles

    def _init_on_sender_impl(self, **_: Any) -> None:
        """Do nothing: the updater's schemes are the trainer's end."""

    def _setup_connection_and_weights_on_sender_impl(self, **_: Any) -> None:
        """Do nothing: the updater publishes."""

    def _init_on_receiver_impl(self, *args: Any, worker_idx: int, **kwargs: Any) -> None:
        self._handle = self._handles[worker_idx]
        super()._init_on_receiver_impl(*args, worker_idx=worker_idx, **kwargs)
