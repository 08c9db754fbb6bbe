"""The actors of ``RayLLMCollector``: each is a collector with a channel that it follows."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.collectors import ProfileConfig

from fusedrl.channel import WeightChannel
from fusedrl.channel.sources import places_of
from fusedrl.collectors.cluster.options import RayOptions
from fusedrl.collectors.llm_collector import LLMCollector
from fusedrl.collectors.policy_version import versions_in
from fusedrl.collectors.progress import response_tokens
from fusedrl.transport import Serialized, serialize

# The concurrency group of what runs between two batches. Weights and versions arrive outside of it,
# at any time.
BETWEEN = "between_batches"

WEIGHTS = (nn.Module, Mapping, TensorDictBase)


class Collected(NamedTuple):
    """A batch, ``None`` if a replay buffer got it or all turns have run, and the actor's counts.

    The number of tokens and the oldest version are those before any postprocessing; they are
    ``None`` if the batch has none.
    """

    batch: Serialized | None
    frames: int
    stale: int
    over: bool = False
    tokens: int | None = None
    oldest: Any = None


class _EveryNth:
    """Gives trajectory ids that none of the other ``step - 1`` collectors gives."""

    def __init__(self, ids: Any, first: int, step: int) -> None:
        self._ids, self._first, self._step = ids, first, step

    def get_traj_and_increment(self, n: int = 1, device: Any = None) -> Tensor:
        return self._first + self._step * self._ids.get_traj_and_increment(n, device)

    def __getattr__(self, name: str) -> Any:
        """What torchrl's collectors store of them."""
        return getattr(self._ids, name)


class DialogActor(LLMCollector):
    """A collector in a process of its own, whose versions the caller numbers."""

    _channel: WeightChannel | None = None
    _tokens: int | None = None
    _oldest: Any = None

    def __init__(self) -> None:
        """Nothing: the actor has a place then, and what fails in :meth:`make` comes as it is."""

    def make(self, arguments: dict[str, Any], own: dict[str, Any], index: int, count: int) -> Any:
        """Make the collector; returns the layout of its weights as text, if they have a channel.

        Args:
            arguments: those of :class:`LLMCollector` that all actors share.
            own: those of this actor, and torch's ``seed``, as all processes start with the same.
            index: the index of this actor.
            count: the number of actors.
        """
        # Weights are views of Ray's store, which the channel reads.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        arguments = {**arguments, **own}
        seed = arguments.pop("seed")
        policy, factory = arguments.pop("policy"), arguments.pop("policy_factory")
        policy = policy if factory is None else factory()
        source = None if arguments.get("weight_updater") is not None else _source(policy)
        if source is not None:
            self._channel = WeightChannel.create(source)
            arguments["channel"] = self._channel.handle
        super().__init__(policy=policy, **arguments)
        self.worker_idx = index
        trajectories: Any = self._loop.trajectories
        trajectories.source = _EveryNth(trajectories.source, index, count)
        self._batches = iter(self)
        torch.manual_seed(seed)  # a factory may have set one for the weights
        return None if self._channel is None else self._channel.layout.to_json()

    def rollout(self) -> TensorDictBase:
        """As for :class:`LLMCollector`, and remember what a postprocessing may remove."""
        batch = super().rollout()
        self._tokens = response_tokens(batch)
        self._oldest = None if self.policy_version_tracker is None else min(versions_in(batch))
        return batch

    def collect(self) -> Collected:
        """The next batch."""
        try:
            batch = next(self._batches)
        except StopIteration:
            return Collected(None, self._frames, self.stale_turns, over=True)
        packed = None if batch is None else serialize(batch.clear_device_())
        counts = self._frames, self.stale_turns
        return Collected(packed, *counts, tokens=self._tokens, oldest=self._oldest)

    def publish(self, weights: Any, version: int | None) -> None:
        """Publish weights for the calls of the policy that begin from now on.

        Raises:
            TypeError: the policy has no module whose weights could be published.
            ValueError: the weights do not fit.
        """
        if self._channel is None:
            raise TypeError(
                f"policy: expected a module, or what has one as its model, got "
                f"{type(self.policy).__name__}; pass a weight_updater= that knows it"
            )
        self._channel.publish(weights_in(weights), version)

    def update_as(self, version: Any, weights: Any, worker_ids: Any) -> None:
        """Update by the updater, as this version."""
        with self._versions.one_update(numbered=True):
            self.update_policy_weights_(weights, worker_ids=worker_ids)
            self.renumber(version)

    def renumber(self, version: Any) -> None:
        """Set the version without new weights."""
        if self._channel is not None and self._channel.version is not None:
            with self._channel.handle.open() as reader, reader.lease() as lease:
                self._channel.publish(lease.weights, version)
        elif self.policy_version_tracker is not None:
            self.policy_version_tracker.version = version

    def set_updater(self, updater: Any) -> None:
        """Replace the updater; the policy stops following the channel, and keeps its weights."""
        self._versions.close()
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self.weight_updater = updater

    def install_profile(self, config: ProfileConfig) -> None:
        """Install torchrl's profiler if it is meant for this actor, with a path of its own."""
        if self.worker_idx in config.workers:
            own = replace(config, save_path=config.get_save_path(self.worker_idx))
            self._install_profile_hooks(own)

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        """Let the turn that runs end, and close the environment and the channel."""
        try:
            super().shutdown(*args, **kwargs)
        finally:
            if self._channel is not None:
                self._channel.close()


def start_ray(config: dict[str, Any] | None) -> None:
    """Start Ray, unless it runs already."""
    try:
        import ray
    except ImportError as error:
        raise RuntimeError("ray: expected it to be installed; pip install ray") from error
    if not ray.is_initialized():
        from torchrl.collectors.distributed.ray import DEFAULT_RAY_INIT_CONFIG

        ray.init(**(DEFAULT_RAY_INIT_CONFIG if config is None else config))


def start_actors(options: RayOptions) -> tuple[list[Any], str | None]:
    """The actors with their collectors, and the layout of their weights; no actor, if one fails."""
    import ray

    remote: Any = ray.remote
    shared, own = ray.put(options.for_all()), options.for_each(torch.initial_seed() % 2**62)
    actors = [
        remote(**one, concurrency_groups={BETWEEN: 1})(DialogActor).remote()
        for one in options.of_ray()
    ]
    try:
        ready = [actor.__ray_ready__.remote() for actor in actors]
        _, missing = ray.wait(ready, num_returns=len(ready), timeout=options.timeout)
        if missing:
            raise RuntimeError(
                "timeout, num_cpus, num_gpus, remote_config: expected places for "
                f"{len(ready)} actors within {options.timeout} s, got "
                f"{len(ready) - len(missing)}; of "
                f"{ray.cluster_resources()} free are {ray.available_resources()}: raise timeout if "
                "that suffices, else ask for less, or add a machine"
            )
        made = [
            actor.make.remote(shared, arguments, index, len(actors))
            for index, (actor, arguments) in enumerate(zip(actors, own, strict=True))
        ]
        return actors, ray.get(made)[0]
    except BaseException:
        for actor in actors:  # one that waits for a place would wait for ever
            ray.kill(actor)
        raise


def _source(policy: Any) -> nn.Module | None:
    """The module whose weights the policy computes with, if it is known."""
    for module in (policy, getattr(policy, "model", None)):
        if isinstance(module, nn.Module) and len(module.state_dict()):
            return module
    return None


def weights_in(policy: Any) -> Any:
    """The weights of a policy, or of its model if the policy is not a module."""
    return policy if isinstance(policy, WEIGHTS) else getattr(policy, "model", policy)


def refuse_sharded(argument: str, policy: Any) -> None:
    """Raise ``ValueError`` for weights that this rank cannot make whole without the others."""
    weights = weights_in(policy)
    for place in places_of(weights).values() if isinstance(weights, WEIGHTS) else ():
        if place.sharded and (ranks := cast(Any, place.tensor).device_mesh.size()) > 1:
            raise ValueError(
                f"{argument}: expected whole tensors, got {place.name!r} in parts on {ranks} ranks"
                "; publish the model on every rank by a WeightChannel, and pass a lease's weights"
            )
