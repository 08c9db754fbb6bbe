"""The arguments of collectors of dialogs, and checks of them, before any is used."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal, SupportsIndex

from tensordict import TensorDictBase
from torchrl.envs import AsyncEnvPool
from torchrl.envs.llm.transforms.policy_version import PolicyVersion

from fusedrl.channel import WeightHandle, WeightReader
from fusedrl.collectors.batches import QueueBuffer
from fusedrl.weights.follow import check_counts

Policy = Callable[[TensorDictBase], TensorDictBase]


@dataclass(kw_only=True, eq=False)
class CollectorOptions:
    """Arguments that all collectors of dialogs have. They are checked when the record is made.

    Raises:
        TypeError, ValueError, RuntimeError: an argument is invalid, or some exclude each other. The
            message names the argument.
    """

    policy_factory: Callable[[], Policy] | None = None
    dialog_turns_per_batch: int | None = None
    total_dialog_turns: float | None = -1
    postproc: Policy | None = None
    replay_buffer: Any = None
    weight_updater: Any = None
    weight_sync_schemes: dict[str, Any] | None = None
    queue: Any = None
    channel: WeightHandle | WeightReader | None = None
    channel_mode: Literal["alias", "copy"] = "alias"
    track_policy_version: bool | PolicyVersion = False
    max_staleness: int | None = None
    progress: bool = False
    verbose: bool = False

    channel_kinds: ClassVar[tuple[type, ...]] = (WeightHandle, WeightReader)

    def __post_init__(self) -> None:
        """Check what holds of every collector."""
        check_whole("dialog_turns_per_batch", self.dialog_turns_per_batch, 1)
        check_total("total_dialog_turns", self.total_dialog_turns)
        check_whole("max_staleness", self.max_staleness, 0)
        self._check_versions()
        self._check_ways()

    def _check_versions(self) -> None:
        """Check that versions can be tracked, which are integers."""
        tracker = self.track_policy_version
        if not isinstance(tracker, bool | PolicyVersion):
            raise TypeError(
                f"track_policy_version: expected a bool or a PolicyVersion, got "
                f"{type(tracker).__name__}; pass True"
            )
        if isinstance(tracker, PolicyVersion):
            check_counts(tracker)
        if self.max_staleness is not None and tracker is False:
            raise ValueError(
                "max_staleness: expected versions to count back from, got "
                "track_policy_version=False; pass True"
            )

    def _check_ways(self) -> None:
        """Check that weights come in one way, and that batches go one way."""
        if self.channel is not None and not isinstance(self.channel, self.channel_kinds):
            kinds = " or ".join(kind.__name__ for kind in self.channel_kinds)
            raise TypeError(
                f"channel: expected a {kinds}, got {type(self.channel).__name__}; pass the "
                "channel's .handle"
            )
        if self.queue is not None and self.replay_buffer is not None:
            raise RuntimeError(
                "queue: expected a queue or a replay_buffer, got both; fill the buffer where the "
                "queue is read"
            )
        self.refuse_both(
            ("weight_updater", "weight_sync_schemes"),
            ("weight_updater", "channel"),
            ("weight_sync_schemes", "channel"),
        )

    @property
    def buffer(self) -> Any:
        """The replay buffer, or what stands in its place for a queue."""
        return self.replay_buffer if self.queue is None else QueueBuffer(self.queue)

    @property
    def total(self) -> float:
        """The number of turns to run in all; infinite if they never end."""
        total = self.total_dialog_turns
        return float("inf") if total is None or total in (-1, float("inf")) else int(total)

    def refuse_both(self, *pairs: tuple[str, str]) -> None:
        """Raise ``TypeError`` if two arguments are given that exclude each other."""
        for name, other in pairs:
            if getattr(self, name) is not None and getattr(self, other) is not None:
                raise TypeError(f"{name}: expected it or {other}, got both; drop one")


@dataclass(eq=False)
class DialogOptions(CollectorOptions):
    """The arguments of :class:`fusedrl.LLMCollector`."""

    env: Any
    _: KW_ONLY
    policy: Policy | None = None
    reset_at_each_iter: bool = False
    yield_only_last_steps: bool | None = None
    yield_completed_trajectories: bool | None = None
    async_envs: bool | None = None
    flatten_data: bool | None = None

    def __post_init__(self) -> None:
        """Check all of them."""
        super().__post_init__()
        self.refuse_both(("policy_factory", "policy"))
        if self.dialog_turns_per_batch is None and not self.completed:
            raise TypeError(
                "dialog_turns_per_batch: expected a number of turns, got None; it may be left out "
                "with yield_completed_trajectories only"
            )
        if not self.yield_only_last_steps:
            return
        if self.yield_completed_trajectories is False:
            raise TypeError(
                "yield_completed_trajectories: expected True or None with yield_only_last_steps, "
                "got False; last steps are those of completed trajectories"
            )
        if self.flatten_data is not None:
            raise TypeError(
                f"flatten_data: expected None with yield_only_last_steps, got {self.flatten_data}; "
                "last steps have one dimension as they are"
            )
        if self.reset_at_each_iter:
            raise TypeError(
                "reset_at_each_iter: expected False with yield_only_last_steps, got True; a dialog "
                "may take longer than an iteration"
            )

    @property
    def completed(self) -> bool:
        """Whether batches have completed trajectories."""
        return bool(self.yield_completed_trajectories or self.yield_only_last_steps)


# What Python says of an argument that is missing or unknown.
DialogOptions.__init__.__qualname__ = "LLMCollector.__init__"


def check_whole(name: str, value: Any, least: int, optional: bool = True) -> None:
    """Raise unless the value of an argument is a whole number, ``least`` or more, or ``None``."""
    if value is None and optional:
        return
    if not isinstance(value, SupportsIndex) or isinstance(value, bool | float):
        raise TypeError(f"{name}: expected a whole number, {least} or more, got {value!r}")
    if operator.index(value) < least:
        raise ValueError(f"{name}: expected {least} or more, got {value!r}")


def check_total(name: str, value: Any) -> None:
    """As :func:`check_whole`, for a total, which may be a float such as 1e6, -1 or infinity."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value not in (-1, float("inf")):
        check_whole(name, value, 1)


def check_environment(env: Any, async_envs: bool | None, completed: bool) -> None:
    """Raise if the environment cannot do what is asked of it."""
    if isinstance(env, AsyncEnvPool):
        # torchrl 0.14.1 looks up the environment of a tensordict in the flattened list of indices,
        # in which one of several rows has several: it steps some twice and others never.
        sizes = [tuple(size) for size in env.env_batch_sizes if size.numel() > 1]
        if sizes:
            raise ValueError(
                f"env: expected a pool of environments with one dialog each, got one with "
                f"batch_size={sizes[0]}; make it AsyncEnvPool([make_env] * n) with an environment "
                "for each dialog"
            )
    elif async_envs:
        raise RuntimeError(
            f"async_envs: expected an AsyncEnvPool as env, got {type(env).__name__}; make it "
            "AsyncEnvPool([make_env] * n), or leave async_envs out"
        )
    elif completed and len(env.batch_size) != 1:
        raise ValueError(
            "yield_completed_trajectories: expected an env with one batch dimension, got "
            f"batch_size={tuple(env.batch_size)}; give the env batch_size=(n,) for n dialogs"
        )
