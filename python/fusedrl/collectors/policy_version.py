"""Tags turns with the version of the policy that made them."""

from __future__ import annotations

import operator
import uuid
from datetime import datetime
from typing import Any, Literal

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDictBase
from tensordict.utils import expand_as_right
from torch import Tensor
from torchrl.data import Composite, NonTensor, Unbounded
from torchrl.envs import AsyncEnvPool
from torchrl.envs.llm.transforms.policy_version import PolicyVersion as _PolicyVersion
from torchrl.envs.llm.transforms.policy_version import VersionChange
from torchrl.envs.transforms import Transform

from fusedrl.vllm.token_versions import PADDING, TOKENS_KEY

KEY = "policy_version"
HISTORY = 1000  # entries that version_history keeps

Version = int | str


class PolicyVersion(_PolicyVersion):
    """Tags what an environment returns with the version of the policy.

    As a transform it writes ``"policy_version"`` at each reset and step. A collector that gets it
    as ``track_policy_version=`` writes the version that the policy had when it was called for the
    turn: another thread may have changed the version by the time the environment steps. It counts
    one version for each weight update.

    A policy whose weights change while it generates can report the version of each token under
    ``"token_policy_version"`` (int64, one row for each sample, ragged or padded with -1), as vLLM's
    policies do. A collector then has them in ``"next"`` too and tags the turn with the oldest of
    them, and :meth:`span` reads them.

    Args:
        version_type: ``"int"`` or ``int``: 0, 1, 2, ... in int64 tensors of the batch's shape.
            ``"uuid"`` or ``str``: UUID4 strings, one for each element. The key then gives a list of
            strings, nested like the batch, or one string if there is no batch dimension.

    Raises:
        ValueError: ``version_type`` is none of these.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from fusedrl import PolicyVersion
        >>> tracker = PolicyVersion()
        >>> tracker.increment_version()
        >>> tracker(TensorDict(batch_size=2))["policy_version"]
        tensor([1, 1])
        >>> [(change.old_version, change.new_version) for change in tracker.version_history]
        [(None, 0), (0, 1)]
    """

    def __init__(self, version_type: type | Literal["uuid", "int"] = int) -> None:
        Transform.__init__(self)
        if version_type not in (int, "int", str, "uuid"):
            raise ValueError(
                f"version_type: expected 'int' or 'uuid', got {version_type!r}; counters are exact "
                "and ordered, UUIDs are unique across collectors"
            )
        self.version_type = version_type
        self.version_history: list[VersionChange] = []
        self.cal_on_reset = True
        self._current_version: Version | None = None
        self.version = 0 if self.counts else str(uuid.uuid4())

    @property
    def counts(self) -> bool:
        """Whether versions are integers, which can be counted."""
        return self.version_type in (int, "int")

    @property
    def version(self) -> Version:
        """The version that the policy has now; assigning one records the change.

        Raises:
            TypeError: an integer is assigned to UUIDs, or anything else to integers.
            ValueError: a negative integer is assigned, as -1 stands for no version.
        """
        assert self._current_version is not None
        return self._current_version

    @version.setter
    def version(self, value: Version) -> None:
        if self.counts == isinstance(value, str) or isinstance(value, bool):
            expected = "an integer" if self.counts else "a string"
            raise TypeError(
                f"version: expected {expected} for version_type={self.version_type!r}, got "
                f"{value!r}; choose the version_type when the tracker is made"
            )
        new = operator.index(value) if self.counts else str(value)  # pyright: ignore[reportArgumentType]
        if isinstance(new, int) and new < 0:
            raise ValueError(f"version: expected 0 or more, got {new}; -1 marks padding in batches")
        change = VersionChange(datetime.now(), self._current_version, new)
        self._current_version = new
        self.version_history.append(change)
        del self.version_history[:-HISTORY]

    def increment_version(self) -> None:
        """Go to the next integer, or to a new UUID."""
        self.version = self.version + 1 if isinstance(self.version, int) else str(uuid.uuid4())

    def span(self, batch: TensorDictBase) -> tuple[Version, Version]:
        """The oldest and the newest version that made a part of a batch of turns.

        Args:
            batch: turns as a collector returns them, of any shape.

        Raises:
            ValueError: the batch has no versions, or UUIDs that ``version_history``, which orders
                them, no longer has.
        """
        versions = versions_in(batch)
        if self.counts:
            return min(versions), max(versions)
        order = {change.new_version: n for n, change in enumerate(self.version_history)}
        unknown = versions - order.keys()
        if unknown:
            raise ValueError(
                f"batch: expected versions of the last {HISTORY}, got {unknown}; read batches "
                "where their tracker is, and before there are so many newer ones"
            )
        return min(versions, key=order.__getitem__), max(versions, key=order.__getitem__)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the version that the policy has now."""
        return stamp(tensordict, self.version)

    def _step(
        self, tensordict: TensorDictBase | None, next_tensordict: TensorDictBase
    ) -> TensorDictBase:
        return stamp(next_tensordict, self.version)

    def transform_observation_spec(self, spec: Composite) -> Composite:
        """Add the entry: int64 of the environment's shape, or a string."""
        where: dict[str, Any] = {"shape": spec.shape, "device": spec.device}
        spec[KEY] = (
            Unbounded(dtype=torch.int64, **where)
            if self.counts
            else NonTensor(example_data=str(self.version), **where)
        )
        return spec


def tracker_of(track: bool | _PolicyVersion) -> Any:
    """The tracker that ``track_policy_version`` asks for; ``None`` if it asks for none."""
    if isinstance(track, bool):
        return PolicyVersion() if track else None
    return track


def tracked(env: Any, track: bool | _PolicyVersion) -> tuple[Any, Any]:
    """An environment with the tracker that is asked for, and the tracker; a pool needs none.

    Raises:
        ValueError: the tracker is in another environment.
    """
    tracker = tracker_of(track)
    if tracker is None or isinstance(env, AsyncEnvPool):
        return env, tracker
    if tracker.container is None:
        env = env.append_transform(tracker)
    if KEY not in list(env.observation_spec):
        raise ValueError(
            "track_policy_version: expected a tracker that is in env or in none, got one of "
            "another environment; make a PolicyVersion for each"
        )
    return env, tracker


def stamp(tensordict: TensorDictBase, version: Version) -> TensorDictBase:
    """Write one version into every element of a tensordict, in place."""
    shape, device = tensordict.batch_size, tensordict.device
    if not isinstance(version, str):
        return tensordict.set(KEY, torch.full(shape, version, dtype=torch.int64, device=device))
    if shape.numel() == 0:  # of no elements there is no stack
        return tensordict.set(KEY, NonTensorData(version, batch_size=shape, device=device))
    # One entry an element, so that reading the key answers with a list as in torchrl.
    return tensordict.set(KEY, NonTensorData(version, device=device).expand(shape))


def stamp_turn(turn: TensorDictBase, version: Version, following: bool = True) -> None:
    """Write the version of a turn into it, and that of its tokens if the policy reported them.

    Args:
        turn: is changed in place.
        version: the version that the policy had when it was called for the turn.
        following: whether ``"next"`` does not have that version yet.
    """
    stamp(turn, version)
    if following:
        stamp(turn.get("next"), version)
    if not isinstance(version, str):
        stamp_tokens(turn)


def stamp_tokens(turn: TensorDictBase) -> None:
    """Give ``"next"`` the versions of a turn's tokens, and both the oldest of them as their own.

    Args:
        turn: a stamped turn, which is changed in place, unless its policy reported no versions of
            tokens.
    """
    if isinstance(turn, LazyStackedTensorDict):
        for part in turn.tensordicts:
            stamp_tokens(part)
        return
    tokens = turn.get(TOKENS_KEY, None)
    if tokens is None:
        return
    following = turn.get("next")
    following.set(TOKENS_KEY, tokens.clone())  # a batch may be written to
    if tokens.is_nested:
        tokens = tokens.to_padded_tensor(PADDING)
    rows = tokens.flatten(turn.batch_dims)
    if not rows.shape[-1]:
        return
    none = torch.iinfo(torch.int64).max
    oldest = rows.masked_fill(rows < 0, none).amin(-1)
    for part in (turn, following):
        part.set(KEY, torch.where(oldest == none, part.get(KEY), oldest))


def mark_padding(batch: TensorDictBase) -> TensorDictBase:
    """Give what fills up short trajectories the version -1, none, where torchrl gives it 0.

    Args:
        batch: is changed in place, if it has a ``("collector", "mask")``.
    """
    mask = batch.get(("collector", "mask"), None)
    if mask is None:
        return batch
    for part in (batch, batch.get("next")):
        for key in (KEY, TOKENS_KEY):
            versions = part.get(key, None)
            if isinstance(versions, Tensor):
                filled = ~expand_as_right(mask, versions)
                part.set(key, versions.masked_fill(filled, PADDING))
    return batch


def versions_in(batch: TensorDictBase) -> set[Any]:
    """All versions in a batch: those of the tokens if there are any, else those of the turns."""
    flat = batch.reshape(-1)
    for part in (flat.get("next", flat), flat):
        rows: Any = part.get(TOKENS_KEY, as_list=True)
        if rows is not None:
            of_tokens = {n for row in rows for n in row.unique().tolist() if n >= 0}
            if of_tokens:
                return of_tokens
    column = flat.get("next", flat).get(KEY)
    if column is None:
        column = flat.get(KEY)
    if column is None:
        raise ValueError(
            f"batch: expected an entry {KEY!r}, got none; collect with track_policy_version=True"
        )
    return {version for version in column.tolist() if version != PADDING}
