"""The weight updaters of torchrl's first API: in-process, multi-process and Ray."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.collectors.weight_update import WeightUpdaterBase

from fusedrl.channel.checks import seconds
from fusedrl.channel.layout import Layout
from fusedrl.channel.tensors import Weight, weights_of
from fusedrl.compat import torchrl
from fusedrl.weights.ray_store import stored
from fusedrl.weights.sync_scheme import ChannelWeightSyncScheme


def pairs(weights: Any, target: TensorDictBase) -> list[tuple[Tensor, Weight]]:
    """The tensors of ``target`` that ``weights`` have values for, each with its source."""
    targets = weights_of(target)
    found = Layout.of(target).match(weights, partial=True) if targets or weights_of(weights) else {}
    return [(targets[name].tensor, source) for name, source in found.items()]


@torch.no_grad()
def write_weights(policy: Any, weights: Any) -> None:
    """Write weights, all of which fit, into a tensordict, a module, or its ``model``."""
    target: Any = policy if isinstance(policy, nn.Module) else getattr(policy, "model", policy)
    if isinstance(target, nn.Module) and not isinstance(target, TensorDictBase):
        target = TensorDict.from_module(target)
    if not isinstance(target, TensorDictBase):
        raise RuntimeError(
            "policy: expected a module, or an object with one as its model, got "
            f"{type(policy).__name__}; pass a weight_updater= for it"
        )
    for tensor, source in pairs(weights, target):
        tensor.copy_(source.value())


class _Updater(WeightUpdaterBase):
    """What both base classes share: how an update is called, and what it sends."""

    def update_weights(
        self, weights: Any = None, worker_ids: Any = None, *, policy_or_weights: Any = None
    ) -> None:
        """Write or send weights, ``None``: the server's. Calling the updater does the same.

        Unknown workers, names and shapes raise ``ValueError`` before any weight changes.
        """
        if weights is not None and policy_or_weights is not None:
            raise ValueError("policy_or_weights: expected None with weights, got both; pass one")
        self.push_weights(policy_or_weights if weights is None else weights, worker_ids)

    __call__ = update_weights  # pyright: ignore[reportAssignmentType]

    @abstractmethod
    def _get_server_weights(self) -> Any:
        """The weights to fetch or to send if an update is called without weights."""

    def _maybe_map_weights(self, server_weights: Any, local_weights: Any = None) -> Any:
        """The given weights in the form of the local ones, or in the form that workers expect."""
        return server_weights


class LocalWeightUpdaterBase(_Updater):
    """Base of updaters that fetch weights into a policy of the same process.

    A subclass defines ``_get_server_weights`` and ``_get_local_weights``; it may define
    ``_maybe_map_weights`` and ``_update_local_weights``. An update runs them in this order.

    Example:
        >>> import torch
        >>> from fusedrl import LocalWeightUpdaterBase
        >>> local = torch.nn.Linear(1, 1, bias=False)
        >>> class Fetched(LocalWeightUpdaterBase):
        ...     _get_server_weights = lambda self: {"weight": torch.ones(1, 1)}
        ...     _get_local_weights = lambda self: local
        >>> Fetched()()
        >>> local.weight.item()
        1.0
    """

    @abstractmethod
    def _get_local_weights(self) -> Any:
        """The policy's weights, which are written in place."""

    def _update_local_weights(self, local_weights: Any, mapped_weights: Any) -> Any:
        if mapped_weights is not None:
            write_weights(local_weights, mapped_weights)

    def _push_weights(self, *, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        if worker_ids is not None:
            raise ValueError(
                f"worker_ids: expected None, got {worker_ids!r}; there is one policy: leave it out"
            )
        weights = self._get_server_weights() if policy_or_weights is None else policy_or_weights
        local = self._get_local_weights()
        self._update_local_weights(local, self._maybe_map_weights(weights, local))

    _sync_weights_with_worker: Any = _push_weights  # there is one policy


class RemoteWeightUpdaterBase(_Updater):
    """Base of updaters that send weights to workers.

    A subclass defines ``all_worker_ids``, ``_get_server_weights`` and
    ``_sync_weights_with_worker``; it may define ``_skip_update`` and ``_maybe_map_weights``. An
    update fetches and maps once, for all workers that are not skipped, if there are any.

    Example:
        >>> from fusedrl import RemoteWeightUpdaterBase
        >>> class Printed(RemoteWeightUpdaterBase):
        ...     all_worker_ids = lambda self: [0, 1]
        ...     _get_server_weights = lambda self: 1.0
        ...     _sync_weights_with_worker = lambda self, worker, weights: print(worker, weights)
        >>> Printed()(2.0, worker_ids=1)
        1 2.0
    """

    @abstractmethod
    def all_worker_ids(self) -> list[Any]:
        """The ids of all workers, as ``worker_ids`` accepts them."""

    @abstractmethod
    def _sync_weights_with_worker(self, worker_id: Any, server_weights: Any) -> Any:
        """Send mapped weights to one worker."""

    def _push_weights(self, *, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        known = self.all_worker_ids()
        if isinstance(worker_ids, int | str | torch.device):
            worker_ids = [worker_ids]
        # "cpu" names the worker torch.device("cpu").
        names = {str(worker) for worker in (known if worker_ids is None else worker_ids)}
        if unknown := names.difference(map(str, known)):
            raise ValueError(
                f"worker_ids: expected one or several of {known}, got {unknown}; pass known ids"
            )
        if due := [w for w in known if str(w) in names and not self._skip_update(w)]:
            weights = self._get_server_weights() if policy_or_weights is None else policy_or_weights
            self._distribute(due, self._maybe_map_weights(weights))

    def _distribute(self, worker_ids: list[Any], mapped_weights: Any) -> None:
        for worker in worker_ids:
            self._sync_weights_with_worker(worker, mapped_weights)


class VanillaLocalWeightUpdater(LocalWeightUpdaterBase):
    """Writes the weights that a function returns into a policy of the same process.

    Args:
        weight_getter: returns the trainer's weights. With ``None``, an update without weights
            changes nothing.
        policy_weights: the policy's weights, such as ``TensorDict.from_module(policy)``, which are
            written in place. ``None``: the policy of the registered collector.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from fusedrl import VanillaLocalWeightUpdater
        >>> policy, trained = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
        >>> VanillaLocalWeightUpdater(lambda: trained, TensorDict.from_module(policy))()
        >>> bool(policy.weight == trained.weight)
        True
    """

    def __init__(
        self, weight_getter: Callable[[], Any] | None, policy_weights: TensorDictBase | None
    ) -> None:
        self.weight_getter = weight_getter
        self.policy_weights = policy_weights

    def _get_server_weights(self) -> Any:
        return None if self.weight_getter is None else self.weight_getter()

    def _get_local_weights(self) -> Any:
        policy = getattr(self.collector, "policy", None)
        return policy if self.policy_weights is None else self.policy_weights


class MultiProcessedRemoteWeightUpdate(RemoteWeightUpdaterBase):
    """Sends weights to the worker processes of a torchrl multi-process collector.

    An update writes ``policy_weights`` in place, and publishes them as one version through a
    :class:`~fusedrl.ChannelWeightSyncScheme`, set up before the collector's processes start.

    Args:
        get_server_weights: returns the trainer's weights. With ``None``, an update without weights
            publishes ``policy_weights`` as they are.
        policy_weights: the policy's weights, such as ``TensorDict.from_module(policy)``, for each
            device of the workers' policies. All workers start with the first, and receive it.
        timeout, slots: as for :class:`~fusedrl.ChannelWeightSyncScheme`.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from fusedrl import MultiProcessedRemoteWeightUpdate
        >>> workers = {torch.device("cpu"): TensorDict({"w": torch.zeros(2)})}
        >>> MultiProcessedRemoteWeightUpdate(None, workers)({"w": torch.ones(2)})
        >>> workers[torch.device("cpu")]["w"]
        tensor([1., 1.])
    """

    def __init__(
        self,
        get_server_weights: Callable[[], Any] | None,
        policy_weights: Mapping[Any, TensorDictBase],
        *,
        timeout: float = 300.0,
        slots: int = 3,
    ) -> None:
        self.weights_getter = get_server_weights
        self.policy_weights = policy_weights
        self._scheme: Any = ChannelWeightSyncScheme(slots=slots, timeout=timeout)

    def all_worker_ids(self) -> list[Any]:
        """The ids of all workers: the keys of ``policy_weights``."""
        return list(self.policy_weights)

    def _get_server_weights(self) -> Any:
        return None if self.weights_getter is None else self.weights_getter()

    def register_collector(self, collector: Any) -> None:
        """Keep a weak reference to the collector, and let its workers follow a channel."""
        if hasattr(collector, "procs") and self._scheme.version is None:
            raise RuntimeError(
                "weight_updater: expected a collector without processes yet, got a running one; "
                "pass the updater to its constructor"
            )
        super().register_collector(collector)
        torchrl.before_processes_start(collector, self._open_channel)

    def publish_with(self, scheme: ChannelWeightSyncScheme) -> None:
        """Publish through the scheme of a collector that exists already."""
        self._scheme = scheme

    def _open_channel(self) -> dict[str, Any]:
        weights = next(iter(self.policy_weights.values()), TensorDict())
        self._scheme.init_on_sender(model_id="policy", context=self.collector, weights=weights)
        return {"policy": self._scheme}

    def _distribute(self, worker_ids: list[Any], mapped_weights: Any) -> None:
        publishes = self._scheme.version is not None
        if publishes and len(worker_ids) < len(self.policy_weights):
            raise ValueError(
                f"worker_ids: expected all of {[*self.policy_weights]}, got {worker_ids}; use "
                "separate collectors for different weights"
            )
        if mapped_weights is not None:
            for worker in worker_ids[1:]:  # before any is written; the first is checked when it is
                pairs(mapped_weights, self.policy_weights[worker])
            super()._distribute(worker_ids, mapped_weights)
        if publishes:
            self._scheme.send(self.policy_weights[worker_ids[0]])

    def _sync_weights_with_worker(self, worker_id: Any, server_weights: Any) -> None:
        write_weights(self.policy_weights[worker_id], server_weights)


class RayRemoteWeightUpdater(RemoteWeightUpdaterBase):
    """Sends weights to collectors that are Ray actors, with one ``ray.put`` for each update.

    Every chosen actor's ``update_policy_weights_`` gets a tensordict of views of Ray's store, which
    must not be written. The update returns when all actors have applied it.

    Args:
        policy_weights: the trainer's weights, such as ``TensorDict.from_module(policy)``.
        remote_collectors: handles of the actors; the id of a worker is its index in this list.
            ``None``: those of the ``RayCollector`` that the updater is registered with.
        max_interval: number of updates that a worker skips between two that it gets.
        timeout: seconds within which all workers have to answer, or ``TimeoutError`` is raised. A
            dead or failed worker raises Ray's error; the weights have been sent to all workers.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from fusedrl import RayRemoteWeightUpdater
        >>> weights = TensorDict.from_module(torch.nn.Linear(1, 1))
        >>> RayRemoteWeightUpdater(weights, remote_collectors=[]).all_worker_ids()
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
        self.remote_collectors: Any = remote_collectors
        self.max_interval = max_interval
        self.timeout = seconds("timeout", timeout)
        self._skipped: dict[int, int] = {}  # number of skipped updates, by worker

    def all_worker_ids(self) -> list[int]:
        """The indices of the actors."""
        if self.remote_collectors is None:
            self.remote_collectors = getattr(self.collector, "remote_collectors", None)
        if self.remote_collectors is None:
            raise RuntimeError("remote_collectors: expected handles of actors, got None; pass them")
        return [*range(len(self.remote_collectors))]

    def _get_server_weights(self) -> Any:
        return self.policy_weights

    def _maybe_map_weights(self, server_weights: Any, local_weights: Any = None) -> Any:
        # An actor would die of weights that it cannot apply.
        found = pairs(server_weights, self.policy_weights)
        values = {Weight("", tensor).identity(): source.value() for tensor, source in found}
        return self.policy_weights.data.apply(lambda x: values.get(Weight("", x).identity()))

    def _skip_update(self, worker_id: int) -> bool:
        self._skipped[worker_id] = self._skipped.get(worker_id, 0) + 1
        return self._skipped[worker_id] <= self.max_interval

    def _distribute(self, worker_ids: list[Any], mapped_weights: Any) -> None:
        import ray

        if not ray.is_initialized():  # ray.put would start a cluster
            raise RuntimeError("remote_collectors: expected a Ray cluster, got none; make actors")
        sent = None if mapped_weights is None else stored(mapped_weights)
        answers = [self._sync_weights_with_worker(worker, sent) for worker in worker_ids]
        ray.get(answers, timeout=self.timeout)

    def _sync_weights_with_worker(self, worker_id: int, server_weights: Any) -> Any:
        self._skipped[worker_id] = 0
        return self.remote_collectors[worker_id].update_policy_weights_.remote(server_weights)
