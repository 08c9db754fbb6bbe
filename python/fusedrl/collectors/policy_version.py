"""Tag turns with the version of the policy that generated them."""

from __future__ import annotations

import operator
from datetime import datetime
from typing import Any, Literal

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from tensordict.utils import expand_as_right
from torch import Tensor
from torchrl.envs import AsyncEnvPool
from torchrl.envs.llm.transforms.policy_version import PolicyVersion as _PolicyVersion
from torchrl.envs.llm.transforms.policy_version import VersionChange

from fusedrl.compat.torchrl import step
from fusedrl.vllm.token_versions import PADDING, TOKENS_KEY
from fusedrl.weights.collector import VERSION_KEY

HISTORY = 1000  # maximum length of version_history


class PolicyVersion(_PolicyVersion):
    """Tags the output of an environment with the version of the policy, an integer counter.

    As a transform it writes ``"policy_version"``, int64 with the shape of the batch, at each reset
    and step. A collector with ``track_policy_version=`` writes the version at the time of the call
    of the policy, since another thread may update the weights before the environment steps. Each
    weight update increments the version by one.

    A policy whose weights change during generation, such as a vLLM policy, can report a version for
    each token under ``"token_policy_version"`` (int64, one row for each sample, ragged or padded
    with -1). A collector copies them to ``"next"`` and tags the turn with the oldest one;
    :meth:`span` reads them.

    Raises:
        ValueError: ``version_type`` is neither ``int`` nor ``"int"``.

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

    def __init__(self, version_type: type | Literal["int"] = int) -> None:
        if version_type not in (int, "int"):
            raise ValueError(
                f"version_type: expected 'int', got {version_type!r}; versions are integers: to "
                "distinguish collectors, use pairs of a collector and a version"
            )
        super().__init__(version_type)

    def _increment_version(self, init: bool = False) -> None:
        # torchrl's method would add a second history entry after the setter.
        current: Any = self._current_version
        self.version = 0 if init else current + 1

    @_PolicyVersion.version.setter
    def version(self, value: int) -> None:
        """Set the version, a nonnegative integer, and record the change; -1 marks padding."""
        if isinstance(value, bool):
            raise TypeError(f"version: expected an integer, got {value}; count from 0")
        new = operator.index(value)
        if new < 0:
            raise ValueError(f"version: expected 0 or more, got {new}; -1 marks padding in batches")
        self.version_history.append(VersionChange(datetime.now(), self._current_version, new))
        del self.version_history[:-HISTORY]
        self._current_version = new

    def span(self, batch: TensorDictBase) -> tuple[int, int]:
        """Oldest and newest version in a batch; ``ValueError`` if it has none."""
        versions = versions_in(batch)
        return min(versions), max(versions)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the current version of the policy."""
        return step(self, tensordict, tensordict)


def tracked(env: Any, track: bool | _PolicyVersion) -> tuple[Any, Any]:
    """The environment with the requested tracker appended (not to a pool), and the tracker."""
    tracker = PolicyVersion() if track is True else track or None
    if tracker is None or isinstance(env, AsyncEnvPool):
        return env, tracker
    if tracker.container is None:
        env = env.append_transform(tracker)
    if VERSION_KEY not in list(env.observation_spec):
        raise ValueError(
            "track_policy_version: expected a tracker of env or a new one, got that of another "
            "environment; make a PolicyVersion for each environment"
        )
    return env, tracker


def stamp_turn(turn: TensorDictBase, version: int) -> None:
    """Write the version of a turn, or the oldest one of its tokens, to the root and ``"next"``.

    Token versions reported by the policy are copied to ``"next"``.
    """
    if isinstance(turn, LazyStackedTensorDict):
        for part in turn.tensordicts:
            stamp_turn(part, version)
        return
    following, tokens = turn.get("next"), turn.get(TOKENS_KEY, None)
    versions = torch.full(turn.batch_size, version, dtype=torch.int64, device=turn.device)
    if tokens is not None:
        following.set(TOKENS_KEY, tokens.clone())  # users may write to the batch
        if tokens.is_nested:
            tokens = tokens.to_padded_tensor(PADDING)
        rows = tokens.flatten(turn.batch_dims)
        if rows.shape[-1]:
            none = torch.iinfo(torch.int64).max
            oldest = rows.masked_fill(rows < 0, none).amin(-1)
            versions = torch.where(oldest == none, versions, oldest)
    turn.set(VERSION_KEY, versions)
    following.set(VERSION_KEY, versions.clone())


def mark_padding(batch: TensorDictBase) -> TensorDictBase:
    """Set the version of padding in short trajectories to -1, where torchrl has 0.

    Works in place; a batch without ``("collector", "mask")`` has no padding.
    """
    mask = batch.get(("collector", "mask"), None)
    if mask is None:
        return batch
    for part in (batch, batch.get("next")):
        for key in (VERSION_KEY, TOKENS_KEY):
            versions = part.get(key, None)
            if isinstance(versions, Tensor):
                filled = ~expand_as_right(mask, versions)
                part.set(key, versions.masked_fill(filled, PADDING))
    return batch


def versions_in(batch: TensorDictBase) -> set[int]:
    """All versions in a batch: of the tokens if reported, else of the turns."""
    flat: Any = batch.reshape(-1)
    for key in (TOKENS_KEY, VERSION_KEY):
        for part in (flat.get("next", flat), flat):
            rows = part.get(key, (), as_list=True)
            if versions := {n for row in rows for n in row.flatten().tolist()} - {PADDING}:
                return versions
    raise ValueError(
        "batch: expected an entry 'policy_version', got none; collect with "
        "track_policy_version=True"
    )
