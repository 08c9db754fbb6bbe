"""Weights and versions of a collector on a Ray cluster: one update, one number, every actor."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tensordict import TensorDict, TensorDictBase

from fusedrl.channel.layout import Layout
from fusedrl.collectors.cluster.dialog_actor import weights_in
from fusedrl.collectors.cluster.distributor import Distributor, InFirstActor, Stored
from fusedrl.collectors.cluster.ray_actors import Actors
from fusedrl.collectors.policy_version import PolicyVersion
from fusedrl.weights.base import RemoteWeightUpdaterBase
from fusedrl.weights.copying import unwrap
from fusedrl.weights.ray_store import StoredWeights


class RayWeights:
    """The weights that the actors' policies have, and the newest version of them.

    Pickled, it is the same for another process, where there is no policy, and no updater that
    sends the weights of this one: that process would have copies.

    Args:
        actors: which have started.
        policy: the source of an update without weights, if any.
        track: whether versions are asked for, or the tracker that counts them.
        has_updater: whether the actors have one.
    """

    def __init__(self, actors: Actors, policy: Any, track: Any, has_updater: bool) -> None:
        self._actors, self._policy = actors, policy
        self.updater: Any = None  # or a function that makes it in the actors, as it was set
        self._tracks = track is not False
        # It counts also where nobody asks.
        self._tracker: Any = PolicyVersion() if isinstance(track, bool) else track
        self._distributor: Distributor | InFirstActor = Distributor(actors, self._tracker)
        layout = actors.started[0].layout
        self._layout = None if layout is None else Layout.from_json(layout)  # of their channels
        self._updatable = layout is not None or has_updater
        self._numbered = False  # whether the update that is under way has a version

    def __getstate__(self) -> dict[str, Any]:
        """What a handle in another process has; :meth:`share` comes first."""
        updater = None if self._sends_from_here else self.updater
        return vars(self) | {"_policy": None, "_distributor": None, "updater": updater}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Updates are numbered in the first actor."""
        vars(self).update(state)
        self._distributor = InFirstActor(self._actors, self._tracker)

    def share(self) -> None:
        """Let the first actor number the updates, for handles in any process."""
        # In another thread: Ray forgets what it was pickling in this one.
        with self._distributor.lock, ThreadPoolExecutor(1) as thread:
            self._distributor = thread.submit(self._distributor.to_first_actor).result()

    def newest(self) -> Any:
        """The newest version, which is counted also where nobody asked for versions."""
        return self._tracker.version if self._actors.closed else self._distributor.version()

    @property
    def version(self) -> Any:
        """The newest version, ``None`` if nobody asked for versions."""
        return self.newest() if self._tracks else None

    @property
    def tracker(self) -> Any:
        """The tracker, ``None`` if nobody asked for one; it knows what other processes counted."""
        if not self._tracks:
            return None
        self.newest()
        return self._tracker

    @property
    def _sends_from_here(self) -> bool:
        return isinstance(self.updater, RemoteWeightUpdaterBase)

    def update(self, weights: Any, worker_ids: Any) -> None:
        """Update all policies, with those of the policy that was given if ``None``."""
        self._actors.require_open()
        with self._distributor.lock:
            if self._sends_from_here:
                self.updater(weights, worker_ids)
            elif not self._updatable:
                raise TypeError(
                    "policy: expected a module, or what has one as its model, got another, whose "
                    "weights are not known; pass a weight_updater= that knows them"
                )
            elif self._layout is None:
                self._distributor.update(_stored(unwrap(weights)), worker_ids)
            else:
                self._check_all(worker_ids)
                named = self._layout.named(weights_in(self._given_or_own(weights)))
                self._distributor.publish(_stored(TensorDict(named)))  # pyright: ignore[reportArgumentType]

    def _check_all(self, worker_ids: Any) -> None:
        everyone = set(self._actors.indices)
        chosen = worker_ids if isinstance(worker_ids, list | tuple | set) else [worker_ids]
        if worker_ids is not None and set(chosen) != everyone:
            raise ValueError(
                f"worker_ids: expected None or all of {sorted(everyone)}, got {worker_ids!r}; a "
                "version is the same everywhere: pass a RayRemoteWeightUpdater to update some"
            )

    def _given_or_own(self, weights: Any) -> Any:
        weights = self._policy if weights is None else weights
        if weights is None:
            raise ValueError(
                "policy_or_weights: expected weights, got none, and no policy= that they could be "
                "of; pass the trained module, its tensordict or its state dict"
            )
        return weights

    def count(self) -> None:
        """Count a version in every actor, without other weights."""
        self._actors.require_open()
        self._distributor.count()

    def load(self, version: Any) -> None:
        """The version of a state, unless policies keep the weights that were sent to them."""
        self._distributor.load(version, self._layout is not None)

    def replace_updater(self, updater: Any, collector: Any) -> None:
        """Set another updater, here or in the actors.

        Args:
            updater: one, or a function that makes it in each actor, or ``None``.
            collector: which an updater that sends from here is registered with.

        Raises:
            RuntimeError: one that runs in the actors, once other processes have handles.
        """
        self._actors.require_open()
        sends = isinstance(updater, RemoteWeightUpdaterBase)
        nothing = updater is None and (self.updater is None or self._sends_from_here)
        if not sends and not nothing:
            if self._actors.shared:
                raise RuntimeError(
                    "weight_updater: expected one that sends to actors, got one that runs in them, "
                    "which handles of this collector in other processes would not know; set it "
                    "before the collector is sent"
                )
            self._layout = None
            self._actors.each("set_updater", updater)
            self._updatable = True
        self.register(updater, collector)

    def register(self, updater: Any, collector: Any) -> None:
        """Keep an updater that the actors have copies of, or that sends to them."""
        self.updater = updater
        if self._sends_from_here:
            hooks = len(updater.post_hooks)
            updater.register_collector(collector)
            if len(updater.post_hooks) == hooks:
                updater.register_post_hook(_Count(self))

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """Call ``init`` of the weight updater, where it runs."""
        if self._sends_from_here:
            self.updater.init(*args, **kwargs)
        else:
            self._actors.each("call", "init_updater", args, kwargs)

    def numbered_actors(self) -> list[NumberedActor]:
        """The actors, as :class:`fusedrl.RayRemoteWeightUpdater` takes them."""
        handles = enumerate(self._actors.handles)
        return [NumberedActor(self, index, handle) for index, handle in handles]

    def send(self, weights: Any, index: int) -> Any:
        """Send weights that are in Ray's store to one actor; a reference to its answer."""
        self._numbered = True
        return self._distributor.send(Stored(weights), index)

    def count_unless_numbered(self) -> None:
        """Count the update of an updater that has run here, unless :meth:`send` did."""
        if not self._numbered:
            self.count()
        self._numbered = False


class NumberedActor:
    """An actor that gets its weights with their version; anything else is the actor's own."""

    def __init__(self, weights: RayWeights, index: int, handle: Any) -> None:
        self._weights = weakref.ref(weights)
        self._index, self._handle = index, handle

    @property
    def update_policy_weights_(self) -> NumberedActor:
        """The method, whose :meth:`remote` is called."""
        return self

    def remote(self, weights: Any) -> Any:
        """Send weights that are in Ray's store; a reference to the answer."""
        sender = self._weights()
        assert sender is not None
        return sender.send(weights, self._index)

    def __getattr__(self, name: str) -> Any:
        """Anything else, of the actor."""
        return getattr(self._handle, name)


class _Count:
    """A post-hook of an updater that does not keep the collector alive."""

    def __init__(self, weights: RayWeights) -> None:
        self._weights = weakref.ref(weights)

    def __call__(self) -> None:
        weights = self._weights()
        if weights is not None:
            weights.count_unless_numbered()


def _stored(weights: Any) -> Stored:
    import ray

    one = isinstance(weights, TensorDictBase)
    return Stored(ray.put(StoredWeights(weights) if one else weights))


def one_of_policy(
    forms: list[Any], model_id: str | None, weights_dict: dict[str, Any] | None
) -> Any:
    """The weights of an update that were given in one of the ways there are, ``None`` if in none.

    Raises:
        ValueError: weights in several; those of another model than the policy.
    """
    if model_id not in (None, "policy") or set(weights_dict or {}) - {"policy"}:
        raise ValueError(
            f"model_id: expected 'policy', got {model_id or sorted(weights_dict or {})}; the "
            "policy is what is updated"
        )
    forms = [form for form in (*forms, (weights_dict or {}).get("policy")) if form is not None]
    if len(forms) > 1:
        raise ValueError(
            "policy_or_weights: expected weights in one argument, got them in several; pass one"
        )
    return next(iter(forms), None)
