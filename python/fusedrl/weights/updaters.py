"""Weight updaters within a process and to worker processes, from torchrl's first LLM API."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from fusedrl.channel import WeightChannel
from fusedrl.weights import pipes
from fusedrl.weights.base import (
    LocalWeightUpdaterBase,
    RemoteWeightUpdaterBase,
    WorkerId,
)
from fusedrl.weights.checks import check_getter, check_timeout, check_weights
from fusedrl.weights.copying import copy_weights, match_weights, unwrap
from fusedrl.weights.worker_channels import following


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

    If a collector gets the updater when it is made, an update publishes one version in a
    :class:`~fusedrl.WeightChannel`. Every call of a worker's policy computes with one complete
    version, and a call that begins after the update computes with the new one, also in the middle
    of a batch. No worker is interrupted, and none waits. ``policy_weights`` are written in place
    too.

    Workers that run already are updated in their shared memory or through their pipes.

    Args:
        get_server_weights: returns the trainer's weights, a tensordict or a module. Pass ``None``
            if you give each update its weights, or if the collector's policy *is* the trained
            module: an update without weights then publishes it as it is.
        policy_weights: the policy's weights, such as ``TensorDict.from_module(policy)``, by the
            device of the workers' policy or by the index of a worker. For a collector with
            ``policy_factory`` they are the trainer's copy of what a worker has, and the workers
            start with what the factory makes.
        timeout: seconds to wait for a worker that a signal stopped, for the end of a policy call of
            an old version if all slots are taken, and for an answer through a pipe.
        slots: number of versions that fit into a channel; each takes memory. With fewer than two
            more than the workers that share it, an update may wait for the end of a policy call.

    Raises:
        ValueError: the policy does not have such names or shapes, or a worker is unknown.
        RuntimeError: a worker is dead; the message names its index and process id.
        TimeoutError: one of these took longer than ``timeout``.

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
        check_timeout(timeout)
        self.weights_getter = get_server_weights
        self._policy_weights = policy_weights
        self.timeout = timeout
        self.slots = slots
        self._channels: dict[Any, WeightChannel] = {}

    def all_worker_ids(self) -> list[Any]:
        """The names of all workers: the keys of ``policy_weights``."""
        return list(self._policy_weights)

    def _get_server_weights(self) -> TensorDictBase | None:
        return None if self.weights_getter is None else unwrap(self.weights_getter())

    def _maybe_map_weights(self, server_weights: TensorDictBase | None) -> TensorDictBase | None:
        return server_weights

    def register_collector(self, collector: Any) -> None:
        """Keep a weak reference to the collector, whose workers will follow a channel."""
        super().register_collector(collector)
        start = getattr(collector, "_run_processes", None)
        if start is None or hasattr(collector, "procs"):
            return

        def start_followers() -> None:
            del collector._run_processes  # back to the collector's own
            with following(collector, self._policy_weights, self.slots) as self._channels:
                start()

        # Hooks can only be added to a worker's policy before it is sent to the worker.
        collector._run_processes = start_followers

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process publishes nothing."""
        return {**super().__getstate__(), "_channels": {}}

    def _distribute(self, worker_ids: list[Any], mapped_weights: Any) -> list[Any]:
        deadline = time.monotonic() + self.timeout
        for worker in worker_ids:
            if mapped_weights is not None:
                match_weights(mapped_weights, self._policy_weights[worker])
            for index in pipes.processes_of(self.collector, worker):
                if worker in self._channels:
                    pipes.wait_until_runs(self.collector, index, deadline)
        return super()._distribute(worker_ids, mapped_weights)

    def _sync_weights_with_worker(
        self, worker_id: WorkerId, server_weights: TensorDictBase | None
    ) -> None:
        if server_weights is not None:
            self._send(worker_id, server_weights)
        elif worker_id in self._channels and getattr(self.collector, "policy", None) is not None:
            self._publish(worker_id)  # trained in place

    def _send(self, worker_id: WorkerId, weights: TensorDictBase) -> None:
        """Send weights through a channel, or by shared memory and pipes to workers without one."""
        ours = self._policy_weights[worker_id]
        copy_weights(weights, ours)
        if worker_id in self._channels:
            self._publish(worker_id)
            return
        for index in pipes.processes_of(self.collector, worker_id):
            if not pipes.reads(self.collector, index, ours):
                pipes.update(self.collector, index, ours, self.timeout)

    def _publish(self, worker_id: WorkerId) -> None:
        try:
            self._channels[worker_id].publish(self._policy_weights[worker_id], timeout=self.timeout)
        except TimeoutError as error:
            busy = {reader.pid for reader in self._channels[worker_id].readers() if reader.leased}
            raise TimeoutError(pipes.busy(self.collector, busy)) from error
