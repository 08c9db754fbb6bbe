"""The bases of weight updaters, as torchrl's collectors take them."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from typing import Any

import torch
from torchrl.collectors.weight_update import WeightUpdaterBase

from fusedrl.compat.torchrl import REGISTERED_COLLECTORS
from fusedrl.weights.copying import Weights, copy_weights, unwrap

WorkerId = int | torch.device

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)

    class _Updater(WeightUpdaterBase):
        """What both bases share: the registered collector, and the ways to call an update."""

        @abstractmethod
        def _get_server_weights(self) -> Weights:
            """The weights to fetch or to send, for updates that are given none."""

        def _fetched(self, weights: Weights) -> Weights:
            """The weights of an update: those of the server if it has none."""
            return self._get_server_weights() if weights is None else unwrap(weights)

        def __init_subclass__(cls, **kwargs: Any) -> None:
            # This skips torchrl's method, which warns that every subclass is deprecated.
            super(WeightUpdaterBase, cls).__init_subclass__(**kwargs)

        def register_collector(self, collector: Any) -> None:
            """Keep a weak reference to the collector; collectors call this themselves.

            Raises:
                RuntimeError: a collector is registered already.
            """
            if self.collectors:
                raise RuntimeError(
                    "Cannot register collector twice: expected an updater of its own for each "
                    f"collector, got one that has {self.collector!r}; make another updater"
                )
            super().register_collector(collector)

        def __getstate__(self) -> dict[str, Any]:
            # A copy in another process belongs to the collector there.
            return {k: v for k, v in vars(self).items() if k != REGISTERED_COLLECTORS}

        def __call__(
            self,
            weights: Weights = None,
            worker_ids: Any = None,
            *,
            policy_or_weights: Weights = None,
        ) -> None:
            """As :meth:`update_weights`."""
            if weights is not None and policy_or_weights is not None:
                raise ValueError(
                    "policy_or_weights: expected weights or policy_or_weights, got both; they mean "
                    "the same"
                )
            self.update_weights(policy_or_weights if weights is None else weights, worker_ids)

        def update_weights(self, weights: Weights = None, worker_ids: Any = None) -> None:
            """Write or send weights, then run the post-hooks; torchrl calls it ``push_weights``.

            Args:
                weights: a tensordict, a module or a mapping; those of the server if ``None``.
                worker_ids: one or several of :meth:`all_worker_ids`; all if ``None``. A local
                    updater has none.

            Raises:
                ValueError: an unknown worker, or a policy without such entries, or with entries of
                    other shapes. No weight has changed then.
            """
            self.push_weights(weights, worker_ids)


class LocalWeightUpdaterBase(_Updater):
    """Base of updaters that fetch weights into the policy of their own process.

    A subclass defines :meth:`_get_server_weights`, :meth:`_get_local_weights` and
    :meth:`_maybe_map_weights`; it may define :meth:`_update_local_weights`. An update runs them in
    this order, then the post-hooks.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from fusedrl import LocalWeightUpdaterBase
        >>> class Halved(LocalWeightUpdaterBase):
        ...     local = TensorDict({"w": torch.zeros(2)})
        ...     def _get_server_weights(self):
        ...         return TensorDict({"w": torch.ones(2)})
        ...     def _get_local_weights(self):
        ...         return self.local
        ...     def _maybe_map_weights(self, server_weights, local_weights):
        ...         return server_weights / 2
        >>> updater = Halved()
        >>> updater.update_weights()
        >>> updater.local["w"]
        tensor([0.5000, 0.5000])
    """

    @abstractmethod
    def _get_local_weights(self) -> Weights:
        """The policy's weights, which are written in place."""

    @abstractmethod
    def _maybe_map_weights(self, server_weights: Weights, local_weights: Weights) -> Weights:
        """The server's weights under the names and in the shapes of the local ones."""

    def _update_local_weights(self, local_weights: Weights, mapped_weights: Weights) -> Any:
        copy_weights(mapped_weights, local_weights)

    def _push_weights(self, *, policy_or_weights: Weights = None, worker_ids: Any = None) -> None:
        if worker_ids is not None:
            raise ValueError(
                f"worker_ids: expected None, got {worker_ids!r}; a local updater writes the policy "
                "of its own process: leave worker_ids out, or use a remote updater"
            )
        self._sync_weights_with_worker(server_weights=self._fetched(policy_or_weights))

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Weights) -> None:
        local_weights = self._get_local_weights()
        mapped_weights = self._maybe_map_weights(server_weights, local_weights)
        self._update_local_weights(local_weights, mapped_weights)


class RemoteWeightUpdaterBase(_Updater):
    """Base of updaters that send weights to workers.

    A subclass defines :meth:`_get_server_weights`, :meth:`_maybe_map_weights`,
    :meth:`all_worker_ids` and :meth:`_sync_weights_with_worker`; it may define
    :meth:`_skip_update`. An update fetches and maps once, sends to each chosen worker that is not
    skipped, then runs the post-hooks. It fetches nothing if all are skipped.

    Example:
        >>> from fusedrl import RemoteWeightUpdaterBase
        >>> class Printed(RemoteWeightUpdaterBase):
        ...     def all_worker_ids(self):
        ...         return [0, 1]
        ...     def _get_server_weights(self):
        ...         return 1.0
        ...     def _maybe_map_weights(self, server_weights):
        ...         return server_weights / 2
        ...     def _sync_weights_with_worker(self, worker_id, server_weights):
        ...         print(worker_id, server_weights)
        >>> updater = Printed()
        >>> updater.update_weights()
        0 0.5
        1 0.5
        >>> updater.update_weights(4.0, worker_ids=1)
        1 2.0
    """

    @abstractmethod
    def _sync_weights_with_worker(self, worker_id: WorkerId, server_weights: Weights) -> Any:
        """Send mapped weights to one worker."""

    @abstractmethod
    def _maybe_map_weights(self, server_weights: Weights) -> Weights:
        """The weights in the form that workers take, which is what is sent."""

    @abstractmethod
    def all_worker_ids(self) -> list[int] | list[torch.device]:
        """The names of all workers, as ``worker_ids`` takes them."""

    def _skip_update(self, worker_id: WorkerId) -> bool:
        return False

    def _push_weights(self, *, policy_or_weights: Weights = None, worker_ids: Any = None) -> None:
        due = [worker for worker in self._chosen(worker_ids) if not self._skip_update(worker)]
        if not due:
            return
        self._distribute(due, self._maybe_map_weights(self._fetched(policy_or_weights)))

    def _chosen(self, worker_ids: Any) -> list[Any]:
        known = self.all_worker_ids()
        if worker_ids is None:
            return list(known)
        single = isinstance(worker_ids, int | str | torch.device)
        chosen = [
            torch.device(worker) if isinstance(worker, str) and worker not in known else worker
            for worker in ([worker_ids] if single else worker_ids)
        ]
        for worker in chosen:
            if worker not in known:
                raise ValueError(
                    f"worker_ids: expected one or several of {list(known)}, got {worker!r}; "
                    "all_worker_ids() lists them"
                )
        return chosen

    def _distribute(self, worker_ids: list[Any], mapped_weights: Weights) -> None:
        """Send mapped weights to all of ``worker_ids``: the transport of one update."""
        for worker in worker_ids:
            self._sync_weights_with_worker(worker, mapped_weights)
