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
from torchrl.collectors.utils import _TrajectoryPool

from fusedrl.channel import WeightChannel
from fusedrl.collectors.llm_collector import LLMCollector
from fusedrl.collectors.policy_version import versions_in
from fusedrl.collectors.progress import response_tokens
from fusedrl.transport import Serialized, serialize


@dataclass(frozen=True)
class Started:
    """What the caller needs to know of an actor: where it runs, and the layout of its weights."""

    pid: int
    node: str
    layout: str | None


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


class Stopped(Exception):
    """The collector was told to stop in the middle of a batch."""


class _EveryNth(_TrajectoryPool):
    """Gives trajectory ids that none of the other ``step - 1`` collectors gives."""

    def __init__(self, first: int, step: int) -> None:
        super().__init__()
        self._first, self._step = first, step

    def get_traj_and_increment(self, n: int = 1, device: Any = None) -> Tensor:
        return self._first + self._step * super().get_traj_and_increment(n, device)


class _Collector(LLMCollector):
    """A collector that can be stopped between two turns, and that describes its last batch."""

    stopping = False
    tokens: int | None = None
    oldest: Any = None

    def check_state_dict(self, state_dict: Any, **kwargs: Any) -> None:
        """Raise the error that loading a state would raise."""
        self._checked_state(state_dict, kwargs.get("strict", True))

    def rollout(self) -> TensorDictBase:
        batch = super().rollout()
        self.tokens = response_tokens(batch)
        self.oldest = None if self.policy_version_tracker is None else min(versions_in(batch))
        return batch

    def _call_policy(self, carried: TensorDictBase) -> TensorDictBase:
        if self.stopping:
            raise Stopped
        return super()._call_policy(carried)


class DialogActor:
    """A collector in a process of its own.

    Calls that change or read the collector run between two batches, because the caller sends them
    to the concurrency group of :meth:`collect`. Weights and versions arrive at any time.
    """

    _collector: _Collector
    _channel: WeightChannel | None = None
    _distributor: Any = None

    def start(
        self,
        arguments: dict[str, Any],
        index: int,
        of: int,
        seed: int,
        own: dict[str, Any],
    ) -> Started:
        """Make the collector.

        Args:
            arguments: the arguments of :class:`LLMCollector` that all actors share.
            index: the index of this actor.
            of: the number of actors.
            seed: torch's seed from here on, as all processes start with the same one.
            own: the arguments of this actor alone.
        """
        import ray

        # Weights are views of Ray's store, which the channel reads.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        arguments = {**arguments, **own}
        policy, factory = arguments.pop("policy"), arguments.pop("policy_factory")
        policy = policy if factory is None else factory()
        source = None if arguments.get("weight_updater") is not None else _source(policy)
        if source is not None:
            self._channel = WeightChannel.create(source)
            arguments["channel"] = self._channel.handle
        self._collector = _Collector(policy=policy, **arguments)
        self._collector.worker_idx = index
        self._collector._loop.trajectories.source = _EveryNth(index, of)
        self._batches = iter(self._collector)
        torch.manual_seed(seed)  # a factory may have set one for the weights
        layout = None if self._channel is None else self._channel.layout.to_json()
        return Started(os.getpid(), ray.util.get_node_ip_address(), layout)

    def collect(self) -> Collected:
        """The next batch."""
        try:
            batch, over = next(self._batches), False
        except Exception as error:
            self._batches = iter(self._collector)  # for the case that another state is loaded
            if not isinstance(error, StopIteration):
                raise
            batch, over = None, True
        packed = None if batch is None else serialize(batch.clear_device_())
        it = self._collector
        return Collected(packed, it._frames, it.stale_turns, over, it.tokens, it.oldest)

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
        with self._collector._versions.one_update(numbered=True):
            self._collector.update_policy_weights_(weights, worker_ids=worker_ids)
            self._tag(version)

    def renumber(self, version: Any) -> None:
        """Set the version without new weights."""
        if self._channel is None or self._channel.version is None:
            self._tag(version)
            return
        with self._channel.handle.open() as reader, reader.lease() as lease:
            self._channel.publish(lease.weights, version)

    def _tag(self, version: Any) -> None:
        if self._collector.policy_version_tracker is not None:
            self._collector.policy_version_tracker.version = version

    def take_over(self, actors: Any, versions: Any, newest: str | None) -> None:
        """Number and distribute updates here, for the collector's handles in any process.

        Args:
            actors: the actors, without this one.
            versions: the tracker that counts.
            newest: the id of the newest version's weights in Ray's store.
        """
        import ray

        # Imported here, because that module imports the actors, which import this module.
        from fusedrl.collectors.cluster.distributor import Distributor

        # The actor makes its own handle: one that was sent here would keep it alive for ever.
        me = ray.get_runtime_context().current_actor
        self._distributor = Distributor(actors.with_first(me), versions, newest)

    def distribute(self, method: str, args: tuple[Any, ...]) -> None:
        """Call a method of the distributor that runs in this actor."""
        getattr(self._distributor, method)(*args)

    def version(self) -> Any:
        """The distributor's newest version."""
        return self._distributor.version()

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
        self._collector._versions.close()
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._collector.weight_updater = updater

    def stop(self) -> None:
        """End a batch that is being collected, before its next turn."""
        self._collector.stopping = True

    def close(self, close_env: bool) -> None:
        """Close the environment and the channel."""
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
