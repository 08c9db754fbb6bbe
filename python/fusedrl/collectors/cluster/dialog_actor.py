"""The actors of ``RayLLMCollector``: each has a collector, and a channel that it follows."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from fusedrl.channel import WeightChannel
from fusedrl.collectors.cluster.ray_actors import Actors, Started
from fusedrl.collectors.cluster.updates import Updates
from fusedrl.collectors.llm_collector import LLMCollector
from fusedrl.collectors.policy_version import versions_in
from fusedrl.collectors.progress import response_tokens
from fusedrl.transport import Serialized, serialize


@dataclass(frozen=True)
class Collected:
    """A batch, or ``None`` if a replay buffer got it, and the counts of its collector.

    The number of tokens and the oldest version are those before any postprocessing; they are
    ``None`` if the batch has none.
    """

    batch: Serialized | None
    frames: int
    stale: int
    over: bool
    tokens: int | None
    oldest: Any


class _EveryNth:
    """Gives trajectory ids that none of the other ``step - 1`` collectors gives."""

    def __init__(self, ids: Any, first: int, step: int) -> None:
        self._ids, self._first, self._step = ids, first, step

    def get_traj_and_increment(self, n: int = 1, device: Any = None) -> Tensor:
        return self._first + self._step * self._ids.get_traj_and_increment(n, device)

    def __getattr__(self, name: str) -> Any:
        """What torchrl's collectors store of them."""
        return getattr(self._ids, name)


class _Collector(LLMCollector):
    """A collector that describes its last batch, and whose versions another one numbers."""

    tokens: int | None = None
    oldest: Any = None

    def be_one_of(self, count: int, index: int) -> None:
        """Give trajectories other ids than the other collectors do."""
        self.worker_idx = index
        trajectories: Any = self._loop.trajectories
        trajectories.source = _EveryNth(trajectories.source, index, count)

    def rollout(self) -> TensorDictBase:
        batch = super().rollout()
        self.tokens = response_tokens(batch)
        self.oldest = None if self.policy_version_tracker is None else min(versions_in(batch))
        return batch

    def collected(self, batch: TensorDictBase | None, over: bool) -> Collected:
        """A batch as it is sent, with what it had and the counts."""
        packed = None if batch is None else serialize(batch.clear_device_())
        counts = self._frames, self.stale_turns
        return Collected(packed, *counts, over, self.tokens, self.oldest)

    def update_as(self, version: Any, weights: Any, worker_ids: Any) -> None:
        """Update by the updater, as this version."""
        with self._versions.one_update(numbered=True):
            self.update_policy_weights_(weights, worker_ids=worker_ids)
            self.tag(version)

    def tag(self, version: Any) -> None:
        """Tag turns with this version from here on."""
        if self.policy_version_tracker is not None:
            self.policy_version_tracker.version = version

    def stop_following(self) -> None:
        """Keep the weights that the channel brought, and take no more from it."""
        self._versions.close()

    def check_state_dict(self, state_dict: Any, **kwargs: Any) -> None:
        """Raise the error that loading a state would raise."""
        self._checked_state(state_dict, kwargs.get("strict", True))


@dataclass(frozen=True)
class Own:
    """What differs between actors.

    Args:
        index: the index of the actor.
        count: the number of actors.
        seed: torch's seed from here on, as all processes start with the same one.
        arguments: arguments of :class:`LLMCollector`.
    """

    index: int
    count: int
    seed: int
    arguments: dict[str, Any]


class DialogActor:
    """A collector in a process of its own.

    Calls that change or read the collector run between two batches, because the caller sends them
    to the concurrency group of :meth:`collect`. Weights and versions arrive at any time.
    """

    _collector: _Collector
    _channel: WeightChannel | None = None
    _updates: Updates

    def start(self, shared: dict[str, Any], own: Own) -> Started:
        """Make the collector, from the arguments that actors share and those of its own."""
        import ray

        # Weights are views of Ray's store, which the channel reads.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        arguments = {**shared, **own.arguments}
        policy, factory = arguments.pop("policy"), arguments.pop("policy_factory")
        policy = policy if factory is None else factory()
        source = None if arguments.get("weight_updater") is not None else _source(policy)
        if source is not None:
            self._channel = WeightChannel.create(source)
            arguments["channel"] = self._channel.handle
        self._collector = _Collector(policy=policy, **arguments)
        self._collector.be_one_of(own.count, own.index)
        self._batches = iter(self._collector)
        torch.manual_seed(own.seed)  # a factory may have set one for the weights
        layout = None if self._channel is None else self._channel.layout.to_json()
        return Started(os.getpid(), ray.util.get_node_ip_address(), layout)

    def collect(self) -> Collected:
        """The next batch."""
        try:
            return self._collector.collected(next(self._batches), over=False)
        except Exception as error:
            self._batches = iter(self._collector)  # for the case that another state is loaded
            if not isinstance(error, StopIteration):
                raise
        return self._collector.collected(None, over=True)

    def rollout(self) -> Serialized:
        """A batch that is not counted."""
        return serialize(self._collector.rollout().clear_device_())

    def update_policy_weights_(self, weights: Any, version: int) -> None:
        """Publish weights for the calls of the policy that begin from now on.

        Raises:
            TypeError: the policy has no module whose weights could be published.
            ValueError: the weights do not fit.
        """
        if self._channel is None:
            raise TypeError(
                f"policy: expected a module, or what has one as its model, got "
                f"{type(self._collector.policy).__name__}; pass a weight_updater= that knows it"
            )
        self._channel.publish(weights_in(weights), version)

    def update_by_updater(self, weights: Any, worker_ids: Any, version: Any) -> None:
        """Update by the updater of this collector, under the caller's version."""
        self._collector.update_as(version, weights, worker_ids)

    def renumber(self, version: Any) -> None:
        """Set the version without new weights."""
        if self._channel is None or self._channel.version is None:
            self._collector.tag(version)
            return
        with self._channel.handle.open() as reader, reader.lease() as lease:
            self._channel.publish(lease.weights, version)

    def number_updates(self, actors: Actors, versions: Any) -> None:
        """Number and send updates here, for the collector and its handles in any process.

        Args:
            actors: the actors, without this one.
            versions: the tracker that counts.
        """
        import ray

        # The actor makes its own handle: one that was sent here would keep it alive for ever.
        me = ray.get_runtime_context().current_actor
        self._updates = Updates(actors.with_first(me), versions)

    def number(self, method: str, args: tuple[Any, ...]) -> Any:
        """Call a method of :class:`Updates`."""
        return getattr(self._updates, method)(*args)

    def version(self) -> Any:
        """The newest version, also while an update is sent."""
        return self._updates.version()

    def call(self, name: str, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Call a method of the collector."""
        return getattr(self._collector, name)(*args, **(kwargs or {}))

    def get(self, path: str) -> Any:
        """An attribute of the collector, or of what it has."""
        return self._collector.get_distant_attr(path)

    def set(self, name: str, value: Any) -> None:
        """Set an attribute of the collector."""
        setattr(self._collector, name, value)

    def set_updater(self, updater: Any) -> None:
        """Replace the updater; the policy stops following the channel, and keeps its weights."""
        self._collector.stop_following()
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._collector.weight_updater = updater

    def close(self, close_env: bool) -> None:
        """Let the turn that runs end, and close the environment and the channel."""
        try:
            self._collector.shutdown(close_env=close_env)
        finally:
            if self._channel is not None:
                self._channel.close()


def _source(policy: Any) -> nn.Module | None:
    """The module whose weights the policy computes with, if it is known."""
    for module in (policy, getattr(policy, "model", None)):
        if isinstance(module, nn.Module) and len(module.state_dict()):
            return module
    return None


def weights_in(policy: Any) -> Any:
    """The weights of a policy, or of its model if the policy is not a module."""
    known = nn.Module | Mapping | TensorDictBase
    return policy if isinstance(policy, known) else getattr(policy, "model", policy)
