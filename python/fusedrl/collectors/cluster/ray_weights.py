"""Updates the weights of all actors of a collector, each update under one version."""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import Any

from tensordict import TensorDict, TensorDictBase

from fusedrl.channel.forking import renew_in_children
from fusedrl.channel.layout import Layout
from fusedrl.collectors.cluster.dialog_actor import weights_in
from fusedrl.collectors.cluster.ray_actors import Actors
from fusedrl.collectors.cluster.updates import Stored
from fusedrl.collectors.policy_version import PolicyVersion
from fusedrl.weights.base import RemoteWeightUpdaterBase
from fusedrl.weights.copying import unwrap
from fusedrl.weights.ray_store import StoredWeights


class RayWeights:
    """The weights of the actors' policies, and their newest version, which the first actor counts.

    A pickled copy works in another process, but has neither the policy nor an updater that sends
    the policy's weights, because these would be copies in that process.

    Args:
        actors: the actors, which have started.
        policy: the source of weights for updates that are given none, if any.
        track: whether to track versions, or the tracker that counts them.
        has_updater: whether the actors have a weight updater.
    """

    def __init__(self, actors: Actors, policy: Any, track: Any, has_updater: bool) -> None:
        self._actors, self._policy = actors, policy
        self.updater: Any = None  # an updater, or a function that makes it in the actors
        self._tracks = track is not False
        # It has the newest version that this process knows, even if nobody wants it.
        self._tracker: Any = PolicyVersion() if isinstance(track, bool) else track
        layout = actors.started[0].layout
        self._layout = None if layout is None else Layout.from_json(layout)  # of their channels
        self._updatable = layout is not None or has_updater
        self._is_copied = False  # whether other processes may have copies
        self._numbered = False  # whether the update of an updater here has a version
        self._new_lock()
        actors.one(0, "number_updates", actors.with_first(None), self._tracker)

    def _new_lock(self) -> None:
        self._updating: Any = threading.RLock()  # held while an updater runs here
        renew_in_children(self, _updating=threading.RLock)

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy in another process."""
        self._is_copied = True
        updater = None if self._sends_from_here else self.updater
        state = vars(self) | {"_policy": None, "updater": updater}
        del state["_updating"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        vars(self).update(state)
        self._new_lock()

    def newest(self) -> Any:
        """The newest version, which is counted even if versions are not tracked."""
        if not self._actors.closed:
            # Not in the concurrency group of updates, which may wait for batches.
            asked = {self._actors.send(0, "version", group=None): 0}
            (version,) = self._actors.wait(asked, self._actors.deadline())
            self._set_version(version)
        return self._tracker.version

    def _set_version(self, version: Any) -> None:
        if version != self._tracker.version:
            self._tracker.version = version

    @property
    def version(self) -> Any:
        """The newest version; ``None`` if versions are not tracked."""
        return self.newest() if self._tracks else None

    @property
    def tracker(self) -> Any:
        """The tracker, with what other processes have counted; ``None`` if there is none."""
        if not self._tracks:
            return None
        self.newest()
        return self._tracker

    @property
    def _sends_from_here(self) -> bool:
        return isinstance(self.updater, RemoteWeightUpdaterBase)

    def update(self, weights: Any, worker_ids: Any) -> None:
        """Update all policies; weights of ``None`` are those of the collector's policy."""
        self._actors.require_open()
        if self._sends_from_here:
            with self._updating:
                self.updater(weights, worker_ids)
        elif not self._updatable:
            raise TypeError(
                "policy: expected a module, or what has one as its model, got another, whose "
                "weights are not known; pass a weight_updater= that knows them"
            )
        elif self._layout is None:
            stored = _stored(unwrap(weights))
            self._set_version(self._actors.update("update", stored, worker_ids, waits=True))
        else:
            self._check_all(worker_ids)
            named = self._layout.named(weights_in(self._given_or_own(weights)))
            stored = _stored(TensorDict(named))  # pyright: ignore[reportArgumentType]
            self._set_version(self._actors.update("publish", stored))

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
        self._set_version(self._actors.update("count"))

    def load(self, version: Any) -> None:
        """Set the version of a state, unless policies keep the weights that were sent to them."""
        self._set_version(self._actors.update("load", version, self._layout is not None))

    def replace_updater(self, updater: Any, collector: Any) -> None:
        """Set another updater, here or in the actors.

        Args:
            updater: an updater, or a function that makes it in each actor, or ``None``.
            collector: the collector to register an updater with that sends from here.

        Raises:
            RuntimeError: the updater would run in the actors, and other processes have handles.
        """
        self._actors.require_open()
        sends = isinstance(updater, RemoteWeightUpdaterBase)
        nothing = updater is None and (self.updater is None or self._sends_from_here)
        if not sends and not nothing:
            if self._is_copied:
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
        """Keep an updater that sends to the actors, or of which the actors have copies."""
        self.updater = updater
        if self._sends_from_here:
            hooks = len(updater.post_hooks)
            updater.register_collector(collector)
            if len(updater.post_hooks) == hooks:
                updater.register_post_hook(partial(_count, weakref.ref(self)))

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
        """Send weights in Ray's store to one actor, and return a reference to its answer."""
        version, (answer,) = self._actors.update("send", [weights], index)
        self._set_version(version)
        self._numbered = True
        return answer

    def count_unless_numbered(self) -> None:
        """Count the update of an updater that ran here, unless :meth:`send` has counted it."""
        if not self._numbered:
            self.count()
        self._numbered = False


class NumberedActor:
    """An actor to which weights are sent with their version; all else goes to the actor itself."""

    def __init__(self, weights: RayWeights, index: int, handle: Any) -> None:
        self._weights = weakref.ref(weights)
        self._index, self._handle = index, handle

    @property
    def update_policy_weights_(self) -> NumberedActor:
        """The remote method for weights, whose :meth:`remote` sends them."""
        return self

    def remote(self, weights: Any) -> Any:
        """Send weights in Ray's store, and return a reference to the answer."""
        sender = self._weights()
        assert sender is not None
        return sender.send(weights, self._index)

    def __getattr__(self, name: str) -> Any:
        """Any other attribute of the actor."""
        return getattr(self._handle, name)


def _count(weights: weakref.ref[RayWeights]) -> None:
    alive = weights()
    if alive is not None:
        alive.count_unless_numbered()


def _stored(weights: Any) -> Stored:
    import ray

    one = isinstance(weights, TensorDictBase)
    return [ray.put(StoredWeights(weights) if one else weights)]


def one_of_policy(
    forms: list[Any], model_id: str | None, weights_dict: dict[str, Any] | None
) -> Any:
    """The weights that an update was given by one of several arguments; ``None`` if by none.

    Raises:
        ValueError: weights were given by several arguments, or for another model than the policy.
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
