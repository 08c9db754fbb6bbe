"""Weight updater to collectors that are Ray actors, from torchrl's first LLM API."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tensordict import TensorDictBase

from fusedrl.channel.checks import seconds
from fusedrl.weights.base import RemoteWeightUpdaterBase
from fusedrl.weights.checks import check_weights
from fusedrl.weights.copying import named_as
from fusedrl.weights.ray_store import StoredWeights


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
        RuntimeError: workers are dead or failed; the message names each.
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
        check_weights("policy_weights", policy_weights)
        seconds("timeout", timeout)
        self.policy_weights = policy_weights
        self.remote_collectors = remote_collectors
        self.max_interval = max(0, max_interval)
        self.timeout = timeout
        self._batches_since_weight_update = [0] * len(remote_collectors or ())

    def register_collector(self, collector: Any) -> None:
        """Keep a weak reference to the collector, and its actors if none were given."""
        super().register_collector(collector)
        if self.remote_collectors is None:
            self.remote_collectors = collector.remote_collectors
            self._batches_since_weight_update = [0] * len(collector.remote_collectors)

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
        self._batches_since_weight_update[worker_id] += 1
        return self._batches_since_weight_update[worker_id] <= self.max_interval

    def _distribute(self, worker_ids: list[Any], mapped_weights: Any) -> list[Any]:
        import ray

        if mapped_weights is None:
            return []
        if not isinstance(mapped_weights, ray.ObjectRef):
            stored = isinstance(mapped_weights, TensorDictBase)
            mapped_weights = ray.put(StoredWeights(mapped_weights) if stored else mapped_weights)
        answers = super()._distribute(worker_ids, mapped_weights)
        sent = zip(answers, worker_ids, strict=True)
        self._wait({ref: worker for ref, worker in sent if isinstance(ref, ray.ObjectRef)})
        return answers

    def _sync_weights_with_worker(self, worker_id: int, server_weights: Any) -> Any:
        """Send a reference; returns what Ray will resolve once the worker has the weights."""
        assert self.remote_collectors is not None
        answer = self.remote_collectors[worker_id].update_policy_weights_.remote(server_weights)
        self._batches_since_weight_update[worker_id] = 0
        return answer

    def _wait(self, answers: dict[Any, int]) -> None:
        import ray
        from ray.exceptions import RayError

        if not answers:
            return
        ready, missing = ray.wait(list(answers), num_returns=len(answers), timeout=self.timeout)
        failures = {answers[ref]: f"no answer within {self.timeout} s" for ref in missing}
        cause = None
        for ref in ready:
            try:
                ray.get(ref)
            except RayError as error:
                cause = error
                pid = re.search(r"pid[:=] ?(\d+)", str(error))
                where = f" (pid {pid[1]})" if pid else ""
                failures[answers[ref]] = f"{type(error).__name__}{where}"
        if failures:
            got = ", ".join(f"worker {worker}: {failures[worker]}" for worker in sorted(failures))
            raise (RuntimeError if cause else TimeoutError)(
                f"worker_ids: expected each to apply the weights, got {got}; replace dead workers "
                "or leave them out, raise timeout if rollouts take longer"
            ) from cause
