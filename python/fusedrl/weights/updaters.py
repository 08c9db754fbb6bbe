"""The weight updaters of torchrl's first API: within a process, to processes, to Ray's actors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from fusedrl.channel.checks import seconds
from fusedrl.compat import torchrl
from fusedrl.weights.base import LocalWeightUpdaterBase, RemoteWeightUpdaterBase, WorkerId
from fusedrl.weights.copying import copy_weights, named_as, pairs, unwrap
from fusedrl.weights.ray_store import StoredWeights
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
        self.weight_getter = weight_getter
        self.policy_weights = policy_weights

    def _get_server_weights(self) -> TensorDictBase | None:
        return None if self.weight_getter is None else unwrap(self.weight_getter())

    def _get_local_weights(self) -> TensorDictBase | None:
        policy = getattr(self.collector, "policy", None)
        if self.policy_weights is None and isinstance(policy, torch.nn.Module):
            return TensorDict.from_module(policy)
        return self.policy_weights

    def _maybe_map_weights(
        self, server_weights: TensorDictBase | None, local_weights: TensorDictBase | None
    ) -> TensorDictBase | None:
        return server_weights

    def _update_local_weights(
        self, local_weights: TensorDictBase | None, mapped_weights: TensorDictBase | None
    ) -> None:
        if local_weights is not None and mapped_weights is not None:
            copy_weights(mapped_weights, local_weights)


class MultiProcessedRemoteWeightUpdate(RemoteWeightUpdaterBase):
    """Sends weights to the worker processes of a torchrl multi-process collector.

    An update writes ``policy_weights`` in place, and publishes one version of them by a
    :class:`~fusedrl.ChannelWeightSyncScheme`, which the collector gets before its processes start.
    Each batch of a worker computes with one complete version, the newest when the batch begins. No
    worker is interrupted, and none waits.

    Args:
        get_server_weights: returns the trainer's weights, a tensordict or a module. Pass ``None``
            if you give each update its weights, or if the collector's policy *is* the trained
            module: an update without weights then publishes it as it is.
        policy_weights: the policy's weights, such as ``TensorDict.from_module(policy)``, by the
            device of the workers' policy. If there are several entries, each is written, and all
            workers get the first one. Workers start with it, also where ``policy_factory`` makes
            their policies.
        timeout: seconds to wait for the end of a batch of an old version if all slots are taken.
        slots: number of versions that fit into the channel; each takes memory. With fewer than two
            more than the workers, an update may wait for the end of a batch.

    Raises:
        ValueError: the policy does not have such names or shapes, a worker is unknown, or an update
            names some workers only: a version reaches all of them.
        RuntimeError: the collector's processes run already when it gets the updater.
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
        self.weights_getter = get_server_weights
        self.policy_weights = policy_weights
        self.timeout = seconds("timeout", timeout)
        self.slots = slots
        self._scheme: ChannelWeightSyncScheme | None = None

    def all_worker_ids(self) -> list[Any]:
        """The names of all workers: the keys of ``policy_weights``."""
        return list(self.policy_weights)

    def _get_server_weights(self) -> TensorDictBase | None:
        return None if self.weights_getter is None else unwrap(self.weights_getter())

    def _maybe_map_weights(self, server_weights: TensorDictBase | None) -> TensorDictBase | None:
        return server_weights

    def register_collector(self, collector: Any) -> None:
        """Keep a weak reference to the collector, and let its workers follow a channel.

        Raises:
            RuntimeError: another collector is registered, or the processes of this one run already.
        """
        if hasattr(collector, "procs") and self._scheme is None:
            raise RuntimeError(
                "weight_updater: expected a collector whose processes have not started, got one "
                "that runs; pass the updater to its constructor, or weight_sync_schemes="
            )
        super().register_collector(collector)
        torchrl.before_processes_start(collector, partial(self._open_channel, collector))

    def publish_with(self, scheme: ChannelWeightSyncScheme) -> None:
        """Publish by the scheme of a collector, which is made already."""
        self._scheme = scheme

    def _open_channel(self, collector: Any) -> None:
        """Give a collector, before its processes start, the scheme that publishes its weights."""
        weights = next(iter(self.policy_weights.values()), None)
        if weights is None or weights.is_empty():
            return
        scheme: Any = ChannelWeightSyncScheme(slots=self.slots, timeout=self.timeout)
        scheme.init_on_sender(model_id="policy", context=collector, weights=weights)
        if collector.policy is not None:
            scheme.channel.layout.match(collector.policy)  # refuses weights of another policy
        torchrl.set_schemes(collector, {"policy": scheme})
        self._scheme = scheme

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process publishes nothing."""
        return {**super().__getstate__(), "_scheme": None}

    def _distribute(self, worker_ids: list[Any], mapped_weights: Any) -> None:
        if self._scheme is not None and len(worker_ids) < len(self.policy_weights):
            raise ValueError(
                f"worker_ids: expected all of {self.all_worker_ids()}, got {worker_ids}; a version "
                "reaches every worker: give workers that differ a collector of their own"
            )
        if mapped_weights is not None:
            for worker in worker_ids:
                pairs(mapped_weights, self.policy_weights[worker])  # refuses what does not fit
            super()._distribute(worker_ids, mapped_weights)
        elif getattr(self.collector, "policy", None) is None:
            return  # not trained in place
        if self._scheme is not None:
            self._scheme.send(next(iter(self.policy_weights.values())))

    def _sync_weights_with_worker(
        self, worker_id: WorkerId, server_weights: TensorDictBase
    ) -> None:
        copy_weights(server_weights, self.policy_weights[worker_id])


class RayRemoteWeightUpdater(RemoteWeightUpdaterBase):
    """Sends weights to collectors that are Ray actors, with one ``ray.put`` for each update.

    The weights are copied into Ray's object store once. Every chosen actor gets the reference as
    the first argument of its ``update_policy_weights_``, where it is a tensordict of views of the
    store: no process of a node deserialises or copies it for itself. Actors must not write to these
    views. The update returns when all actors have applied it.

    Args:
        policy_weights: the trainer's weights, such as ``TensorDict.from_module(policy)``, which an
            update without weights sends.
        remote_collectors: handles of the actors; the id of a worker is its index in this list.
            ``None`` takes those of the :class:`torchrl.collectors.distributed.RayCollector` that
            the updater is registered with.
        max_interval: number of updates that each worker skips between two that it gets.
        timeout: seconds within which the workers have to answer.

    Raises:
        ValueError: a worker is unknown, or the weights have other names or shapes than
            ``policy_weights``.
        ray.exceptions.RayError: a worker is dead or failed, which Ray describes. The others have
            been sent the weights.
        TimeoutError: workers did not answer in time.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from fusedrl import RayRemoteWeightUpdater
        >>> updater = RayRemoteWeightUpdater(
        ...     TensorDict.from_module(torch.nn.Linear(1, 1)), remote_collectors=[], max_interval=2
        ... )
        >>> updater.all_worker_ids()
        []
    """

    def __init__(
        self,
        policy_weights: TensorDictBase,
        remote_collectors: Sequence[Any] | None = None,
        max_interval: int = 0,
        *,
        timeout: float = 300.0,
    ) -> None:
        self.policy_weights = policy_weights
        self.remote_collectors = remote_collectors
        self.max_interval = max(0, max_interval)
        self.timeout = seconds("timeout", timeout)
        self._skipped: dict[int, int] = {}  # how many updates, by worker

    def register_collector(self, collector: Any) -> None:
        """Keep a weak reference to the collector, and its actors if none were given."""
        super().register_collector(collector)
        if self.remote_collectors is None:
            self.remote_collectors = collector.remote_collectors

    def all_worker_ids(self) -> list[int]:
        """The indices of the actors."""
        if self.remote_collectors is None:
            raise RuntimeError(
                "remote_collectors: expected handles of Ray actors, got None and no collector; "
                "pass them, or give this updater to a RayCollector first"
            )
        return list(range(len(self.remote_collectors)))

    def _get_server_weights(self) -> Any:
        import ray

        if not ray.is_initialized():  # ray.put would start a cluster
            raise RuntimeError(
                "remote_collectors: expected Ray's cluster in which they are, got a process in "
                "none; call ray.init(), and after ray.shutdown() make other collectors"
            )
        return ray.put(StoredWeights(self.policy_weights.data))

    def _maybe_map_weights(self, server_weights: Any) -> Any:
        import ray

        # A collector that is an actor dies of weights that it cannot apply.
        if server_weights is None or isinstance(server_weights, ray.ObjectRef):
            return server_weights
        return named_as(self.policy_weights, server_weights)

    def _skip_update(self, worker_id: int) -> bool:
        self._skipped[worker_id] = self._skipped.get(worker_id, 0) + 1
        return self._skipped[worker_id] <= self.max_interval

    def _distribute(self, worker_ids: list[Any], mapped_weights: Any) -> None:
        import ray

        if mapped_weights is None:
            return
        if not isinstance(mapped_weights, ray.ObjectRef):
            stored = isinstance(mapped_weights, TensorDictBase)
            mapped_weights = ray.put(StoredWeights(mapped_weights) if stored else mapped_weights)
        sent = [self._sync_weights_with_worker(worker, mapped_weights) for worker in worker_ids]
        answers = [answer for answer in sent if isinstance(answer, ray.ObjectRef)]
        ray.get(answers, timeout=self.timeout)

    def _sync_weights_with_worker(self, worker_id: int, server_weights: Any) -> Any:
        """Send a reference; returns what Ray will resolve once the worker has the weights."""
        assert self.remote_collectors is not None
        answer = self.remote_collectors[worker_id].update_policy_weights_.remote(server_weights)
        self._skipped[worker_id] = 0
        return answer
