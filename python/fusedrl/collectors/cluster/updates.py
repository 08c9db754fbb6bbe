"""Weights and versions of a collector on a Ray cluster: one update, one number, every actor."""

from __future__ import annotations

import copy
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tensordict import TensorDict, TensorDictBase
from torchrl.collectors._single import _CollectorMeta
from torchrl.collectors.llm.ray_collector import RayLLMCollector as _RayLLMCollector

from fusedrl.channel.layout import Layout
from fusedrl.collectors.cluster.actor import weights_in
from fusedrl.collectors.cluster.actors import Actors
from fusedrl.collectors.cluster.distributor import Distributor, InFirstActor
from fusedrl.weights.base import RemoteWeightUpdaterBase
from fusedrl.weights.copying import unwrap
from fusedrl.weights.ray_store import StoredWeights


class _OwnArguments(_CollectorMeta):
    """torchrl's keeps ``num_collectors`` for ``Collector`` alone."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make one, with all that is given."""
        return type.__call__(cls, *args, **kwargs)


class RayUpdates(_RayLLMCollector, metaclass=_OwnArguments):
    """How :class:`fusedrl.RayLLMCollector` takes weights, and counts their versions."""

    closed: bool
    _actors: Actors
    _layout: Layout | None  # of the actors' channels; None where they have none
    _updatable: bool  # whether an update without an updater can do anything
    _policy: Any  # what was given: the source of an update without weights
    _versions: Any  # a PolicyVersion, which counts also where nobody asked for it
    _tracks: bool  # whether somebody asked for it
    _weight_updater: Any
    _distributor: Distributor | InFirstActor
    _counted: bool  # whether the update that is under way has a number

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        worker_ids: Any = None,
        model_id: str | None = None,
        weights_dict: dict[str, Any] | None = None,
        policy_weights: Any = None,
    ) -> None:
        """Update the weights of all actors' policies: one version, the same for all.

        Without a weight updater every call of a policy that begins afterwards uses the weights,
        also in the middle of a batch; a call that runs is neither changed nor waited for. An
        updater runs where it belongs: one of :class:`fusedrl.RemoteWeightUpdaterBase` here, any
        other in the actors, between two batches.

        Args:
            policy_or_weights: a tensordict, a module or a state dict of the policy, or of the model
                that it wraps; the policy that the collector was given if ``None``.
            weights: the same.
            policy: the same.
            worker_ids: of the updater; without one ``None``, or all actors.
            model_id: ``None`` or ``"policy"``.
            weights_dict: weights for ``"policy"``, and for nothing else.
            policy_weights: the same as ``policy_or_weights``, by its former name.

        Raises:
            TypeError: a policy that has no module, and no weight updater.
            ValueError: weights that do not fit, which changes nothing; chosen workers.
            RuntimeError: a dead actor; the others have the weights.
            TimeoutError: an actor does not answer.
        """
        forms = [policy_or_weights, weights, policy, policy_weights]
        forms += [] if weights_dict is None else [weights_dict.get("policy")]
        given = [form for form in forms if form is not None]
        if len(given) > 1:
            raise ValueError(
                "policy_or_weights: expected weights in one argument, got them in several; pass one"
            )
        if model_id not in (None, "policy") or set(weights_dict or {}) - {"policy"}:
            raise ValueError(
                f"model_id: expected 'policy', got {model_id or sorted(weights_dict or {})}; the "
                "policy is what is updated"
            )
        self._refuse_closed()
        with self._distributor.lock:
            self._update(given[0] if given else None, worker_ids)

    def _update(self, weights: Any, worker_ids: Any) -> None:
        if isinstance(self._weight_updater, RemoteWeightUpdaterBase):
            self._weight_updater(weights, worker_ids)
        elif not self._updatable:
            raise TypeError(
                "policy: expected a module, or what has one as its model, got another, whose "
                "weights are not known; pass a weight_updater= that knows them"
            )
        elif self._layout is None:
            weights = unwrap(weights)
            stored = isinstance(weights, TensorDictBase)
            reference = self._put(StoredWeights(weights) if stored else weights)
            self._distributor.update([reference], worker_ids)
        else:
            self._publish(weights, worker_ids)

    def _publish(self, weights: Any, worker_ids: Any) -> None:
        """Store weights once, and let every actor publish them to its policy."""
        assert self._layout is not None
        everyone = set(self._actors.indices)
        chosen = worker_ids if isinstance(worker_ids, list | tuple | set) else [worker_ids]
        if worker_ids is not None and set(chosen) != everyone:
            raise ValueError(
                f"worker_ids: expected None or all of {sorted(everyone)}, got {worker_ids!r}; a "
                "version is the same everywhere: pass a RayRemoteWeightUpdater to update some"
            )
        weights = self._policy if weights is None else weights
        if weights is None:
            raise ValueError(
                "policy_or_weights: expected weights, got none, and no policy= that they could be "
                "of; pass the trained module, its tensordict or its state dict"
            )
        named = self._layout.named(weights_in(weights))
        reference = self._put(StoredWeights(TensorDict(named)))  # pyright: ignore[reportArgumentType]
        self._distributor.publish([reference])

    def _put(self, value: Any) -> Any:
        import ray

        return ray.put(value)

    @property
    def remote_collectors(self) -> list[Any]:
        """The actors, as :class:`fusedrl.RayRemoteWeightUpdater` takes them."""
        return [Numbered(self, index) for index in self._actors.indices]

    @property
    def weight_updater(self) -> Any:
        """The weight updater, or the function that makes it in the actors, as it was set."""
        return self._weight_updater

    @weight_updater.setter
    def weight_updater(self, value: Any) -> None:
        self._refuse_closed()
        sends = isinstance(value, RemoteWeightUpdaterBase)
        runs_here = self._weight_updater is None or isinstance(
            self._weight_updater, RemoteWeightUpdaterBase
        )
        if not sends and not (value is None and runs_here):
            if self._actors.shared:
                raise RuntimeError(
                    "weight_updater: expected one that sends to actors, got one that runs in them, "
                    "which handles of this collector in other processes would not know; set it "
                    "before the collector is sent"
                )
            self._layout = None
            self._actors.each("set_updater", value)
            self._updatable = True
        self._register(value)

    def _register(self, value: Any) -> None:
        """Keep an updater that the actors have copies of, or that sends to them."""
        self._weight_updater = value
        if isinstance(value, RemoteWeightUpdaterBase):
            hooks = len(value.post_hooks)
            value.register_collector(self)
            if len(value.post_hooks) == hooks:
                value.register_post_hook(_Count(self))

    def _share(self) -> None:
        """Let the first actor number the updates, for handles in any process."""
        distributor = self._distributor
        with distributor.lock:
            if isinstance(distributor, Distributor) and self._distributor is distributor:
                # In another thread: Ray forgets what it was pickling in this one.
                with ThreadPoolExecutor(1) as thread:
                    thread.submit(self._move, distributor).result()

    def _move(self, distributor: Distributor) -> None:
        self._actors.shared = True
        moved = copy.copy(distributor)
        moved.actors = copy.copy(self._actors)
        moved.actors.handles = [None, *self._actors.handles[1:]]
        answer = self._actors.send(0, "take_over", moved, between=False)
        self._actors.wait([answer], self._actors.timeout)
        self._distributor = InFirstActor(self._actors, self._versions)

    def set_weight_updater(self, weight_updater: Any) -> bool:
        """Set the weight updater; returns ``True``, as remote calls want an answer."""
        self.weight_updater = weight_updater
        return True

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """Call ``init`` of the weight updater, where it runs."""
        if isinstance(self._weight_updater, RemoteWeightUpdaterBase):
            self._weight_updater.init(*args, **kwargs)
        else:
            self._actors.each("call", "init_updater", args, kwargs)

    def receive_weights(self, *args: Any, **kwargs: Any) -> None:
        """As :meth:`update_policy_weights_`."""
        self.update_policy_weights_(*args, **kwargs)

    @property
    def policy_version(self) -> Any:
        """The newest version, ``None`` if none is tracked: what the next policy calls have."""
        return self._newest() if self._tracks else None

    @property
    def policy_version_tracker(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The tracker, ``None`` if none was asked for; it knows what other processes counted."""
        if not self._tracks:
            return None
        self._newest()
        return self._versions

    def _newest(self) -> Any:
        return self._versions.version if self.closed else self._distributor.version()

    def get_policy_version(self) -> Any:
        """As :attr:`policy_version`."""
        return self.policy_version

    def increment_version(self) -> None:
        """Count a version in every actor, without other weights."""
        self._refuse_closed()
        self._distributor.count()

    def _refuse_closed(self) -> None:
        if not self.is_initialized():
            raise RuntimeError(
                "collector: expected one that runs, got one after shutdown(); make another"
            )


class Numbered:
    """An actor that gets its weights with their version; anything else is the actor's own."""

    def __init__(self, collector: RayUpdates, index: int) -> None:
        self._collector = weakref.ref(collector)
        self._actor, self._index = collector._actors.handles[index], index

    @property
    def update_policy_weights_(self) -> Numbered:
        """The method, whose :meth:`remote` is called."""
        return self

    def remote(self, weights: Any) -> Any:
        """Send weights that are in Ray's store; a reference to the answer."""
        collector = self._collector()
        assert collector is not None
        collector._counted = True
        return collector._distributor.send([weights], self._index)

    def __getattr__(self, name: str) -> Any:
        """Anything else, of the actor."""
        return getattr(self._actor, name)


class _Count:
    """A post-hook of an updater that is called here: counts unless its weights had a number."""

    def __init__(self, collector: RayUpdates) -> None:
        self._collector = weakref.ref(collector)

    def __call__(self) -> None:
        collector = self._collector()
        if collector is None:
            return
        if not collector._counted:
            collector.increment_version()
        collector._counted = False
