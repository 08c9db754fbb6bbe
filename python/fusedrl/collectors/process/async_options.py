"""The arguments of an ``AsyncCollector``, checked and made into its worker's job."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchrl.collectors import Collector
from torchrl.collectors._constants import DEFAULT_EXPLORATION_TYPE
from torchrl.collectors.llm import LLMCollector as _LLMCollector
from torchrl.envs.utils import ExplorationType

from fusedrl.channel import WeightHandle
from fusedrl.collectors.checks import (
    check_mode,
    check_seconds,
    check_staleness,
    check_total,
    check_whole,
)
from fusedrl.collectors.llm_collector import LLMCollector
from fusedrl.collectors.policy_version import PolicyVersion
from fusedrl.collectors.process.worker_job import WorkerJob
from fusedrl.collectors.queues import QueueBuffer
from fusedrl.weights.sync_scheme import ChannelWeightSyncScheme

# Arguments that the worker's torchrl Collector gets unchanged, if they differ from the default.
OF_COLLECTOR = (
    *("max_frames_per_traj", "init_random_frames", "exploration_type", "set_truncated"),
    *("use_buffers", "trust_policy", "compile_policy", "cudagraph_policy", "no_cuda_sync"),
    *("auto_register_policy_transforms", "compact_obs"),
)
DEVICES = ("device", "storing_device", "policy_device", "env_device")
# Arguments that a collector of dialogs does not have.
ONLY_FRAMES = (*OF_COLLECTOR, *DEVICES, "split_trajs", "trajs_per_batch", "trajs_per_write")
# The smallest value of each number, what it counts, and the remedy in the error message.
WHOLE = {
    "frames_per_batch": (1, "frames", "1 is the least"),
    "max_frames_per_traj": (0, "frames", "None leaves trajectories as they are"),
    "init_random_frames": (-1, "frames", "None has none"),
    "trajs_per_batch": (1, "trajectories", "None yields frames as they come"),
    "trajs_per_write": (1, "trajectories", "None writes all that are complete"),
    "num_threads": (0, "threads", "None leaves them as they are"),
    "num_sub_threads": (1, "threads", "1 is the default"),
    "prefetch": (0, "batches", "0 collects on demand"),
}


@dataclass(kw_only=True, eq=False)
class AsyncOptions:
    """The arguments of :class:`fusedrl.AsyncCollector`, whose docstring explains them.

    ``of_dialogs`` are the arguments that only ``collector_class=LLMCollector`` has. Numbers of
    turns are kept under the names for frames, and a queue as a buffer. ``tracker`` is the tracker
    that ``track_policy_version`` asks for, if any.

    Raises:
        TypeError, ValueError, RuntimeError: arguments are invalid or exclude each other.
    """

    create_env_fn: Any
    policy: Any
    policy_factory: Callable[[], Any] | None
    frames_per_batch: int | None
    total_frames: Any
    device: Any
    storing_device: Any
    env_device: Any
    policy_device: Any
    create_env_kwargs: Any
    max_frames_per_traj: int | None = None
    init_random_frames: int | None = None
    reset_at_each_iter: bool
    postproc: Callable[[Any], Any] | None
    split_trajs: bool | None
    exploration_type: ExplorationType = DEFAULT_EXPLORATION_TYPE
    reset_when_done: bool
    preemptive_threshold: float | None
    num_threads: int | None
    num_sub_threads: int
    set_truncated: bool = False
    track_policy_version: Any
    use_buffers: bool | None = None
    replay_buffer: Any
    trust_policy: bool | None = None
    compile_policy: bool | dict[str, Any] | None = None
    cudagraph_policy: bool | dict[str, Any] | None = None
    no_cuda_sync: bool = False
    weight_updater: Any
    weight_sync_schemes: dict[str, Any] | None
    collector_class: Any
    trajs_per_batch: int | None
    trajs_per_write: int | None
    init_fn: Callable[[], None] | None
    auto_register_policy_transforms: bool | None = None
    pre_collect_hook: Callable[[], None] | None
    post_collect_hook: Callable[[Any], None] | None
    compact_obs: bool = False
    channel: WeightHandle | None
    channel_mode: str
    prefetch: int
    max_staleness: int | None
    timeout: float | None
    of_dialogs: dict[str, Any]
    are_dialogs: bool = field(init=False)
    tracker: Any = field(init=False)

    def __post_init__(self) -> None:
        """Check the arguments, and bring them into one form."""
        kind = self.collector_class
        self.are_dialogs = isinstance(kind, type) and issubclass(kind, LLMCollector)
        if self.are_dialogs:
            self._take_size("frames_per_batch", "dialog_turns_per_batch", None)
            self._take_size("total_frames", "total_dialog_turns", -1)
        self._check_kind()
        self._check_numbers()
        self._check_weights()
        self.tracker = _tracker_of(self.track_policy_version)
        self.total_frames = _total_of(self.total_frames)
        self.split_trajs = bool(self.split_trajs)
        if self.preemptive_threshold is None:
            self.preemptive_threshold = 1.0
        queue = self.of_dialogs.pop("queue", None)
        if queue is not None:
            if self.replay_buffer is not None:
                raise RuntimeError(
                    "queue: expected a queue or a replay_buffer, got both; fill the buffer where "
                    "the queue is read"
                )
            self.replay_buffer = QueueBuffer(queue)

    def _take_size(self, name: str, own: str, default: int | None) -> None:
        """Move a number of turns to the argument for the number of frames."""
        if own not in self.of_dialogs:
            return
        size = self.of_dialogs.pop(own)
        if own == "total_dialog_turns":
            check_total(own, size, "turns")
        else:
            check_whole(own, size, 1, "turns", "1 is the least")
        if getattr(self, name) not in (default, size):
            raise TypeError(
                f"{own}: expected it or {name}, which is its other name here, got {size} and "
                f"{getattr(self, name)}; drop one"
            )
        setattr(self, name, size)

    def _check_kind(self) -> None:
        kind, others = self.collector_class, self.of_dialogs
        if self.are_dialogs:
            self._check_dialogs()
        elif isinstance(kind, type) and issubclass(kind, _LLMCollector):
            raise ValueError(
                f"collector_class: expected fusedrl.LLMCollector for dialogs, got {kind}; import "
                "it from fusedrl"
            )
        elif others:
            raise TypeError(
                f"{next(iter(others))}: expected an argument of AsyncCollector, got one of another "
                "class; those of dialogs need collector_class=fusedrl.LLMCollector"
            )
        elif self.frames_per_batch is None:
            raise TypeError(
                "frames_per_batch: expected a number of frames, got None; 1 is the least"
            )
        if not self.reset_when_done:
            raise ValueError(
                "reset_when_done: expected True, got False; torchrl's collectors take nothing else"
            )

    def _check_dialogs(self) -> None:
        known = inspect.signature(self.collector_class).parameters
        for name in self.of_dialogs:
            if name not in known:
                raise TypeError(
                    f"{name}: expected an argument of LLMCollector, got an unknown one; drop it"
                )
        for name in ONLY_FRAMES:
            value = getattr(self, name)
            if value not in (None, False, getattr(AsyncOptions, name, None)):
                raise TypeError(
                    f"{name}: expected none with dialogs, got {value!r}; LLMCollector has no such "
                    "argument: let a transform of the environment do it"
                )

    def _check_numbers(self) -> None:
        for name, (least, unit, remedy) in WHOLE.items():
            optional = name not in ("prefetch", "num_sub_threads")
            check_whole(name, getattr(self, name), least, unit, remedy, optional)
        check_total("total_frames", self.total_frames, "frames")
        threshold = self.preemptive_threshold
        if threshold is not None and not (
            isinstance(threshold, int | float) and 0.0 <= threshold <= 1.0
        ):
            raise ValueError(
                f"preemptive_threshold: expected 0 to 1, got {threshold!r}; 1 is the default"
            )
        check_staleness(self.max_staleness, self.track_policy_version)
        check_seconds("timeout", self.timeout, "None has no limit")

    def _check_weights(self) -> None:
        check_mode(self.channel_mode)
        if self.weight_updater is not None and self.weight_sync_schemes is not None:
            raise TypeError(
                "weight_updater: expected weight_updater or weight_sync_schemes, got both; drop one"
            )
        if self.channel is not None:
            if not isinstance(self.channel, WeightHandle):
                raise TypeError(
                    f"channel: expected a WeightHandle, got {type(self.channel).__name__}; pass "
                    "channel.handle"
                )
            for name in ("weight_updater", "weight_sync_schemes"):
                if getattr(self, name) is not None:
                    raise TypeError(f"{name}: expected it or channel, got both; drop one")
        for name, scheme in (self.weight_sync_schemes or {}).items():
            if not isinstance(scheme, ChannelWeightSyncScheme):
                raise ValueError(
                    f"weight_sync_schemes: expected ChannelWeightSyncScheme for {name!r}, got "
                    f"{type(scheme).__name__}; its updates are those of every other scheme: leave "
                    "the argument out"
                )
        both = self.policy is not None and self.policy_factory is not None
        if both and self.weight_updater is not None:
            raise TypeError("policy_factory: expected policy or policy_factory, got both; drop one")

    def job(self, schemes: dict[str, Any], devices: dict[str, Any]) -> WorkerJob:
        """The job that the worker is started with.

        Args:
            schemes: the schemes that bring weights to the worker.
            devices: the devices of a collector of frames, by the name of the argument.
        """
        env = _only(self.create_env_fn, "create_env_fn")
        kwargs = _only(self.create_env_kwargs, "create_env_kwargs") or {}
        if self.are_dialogs:
            env = functools.partial(env, **kwargs) if kwargs else env
            options = self._of_dialogs()
        else:
            options = self._of_frames(devices) | {"create_env_kwargs": dict(kwargs)}
        return WorkerJob(
            collector_class=self.collector_class or Collector,
            env=env,
            policy=None if self.policy_factory is not None else self.policy,
            policy_factory=self.policy_factory,
            options={**options, "track_policy_version": self.tracker or False},
            schemes=dict(schemes),
            channel=self.channel,
            channel_mode=self.channel_mode,
            init_fn=self.init_fn,
            hooks={
                "pre_collect_hook": self.pre_collect_hook,
                "post_collect_hook": self.post_collect_hook,
            },
            threads=self.num_sub_threads,
            dated=self.max_staleness is not None,
        )

    def _of_frames(self, devices: dict[str, Any]) -> dict[str, Any]:
        """The arguments of torchrl's ``Collector`` in the worker, without the environment."""
        options = {
            name: getattr(self, name)
            for name in OF_COLLECTOR
            if getattr(self, name) not in (None, getattr(AsyncOptions, name))
        }
        if options.get("init_random_frames"):
            stored = getattr(self.replay_buffer, "write_count", 0)
            options["init_random_frames"] = max(options["init_random_frames"] - stored, 0)
        return {
            **options,
            **devices,
            "frames_per_batch": self.frames_per_batch,
            "total_frames": -1,
            "reset_at_each_iter": self.reset_at_each_iter,
            "return_same_td": True,  # each batch is copied to shared memory before the next one
        }

    def _of_dialogs(self) -> dict[str, Any]:
        """The arguments of :class:`fusedrl.LLMCollector` in the worker, without the environment."""
        options = dict(self.of_dialogs)
        if options.get("flatten_data") is None:
            options["flatten_data"] = None if self.replay_buffer is None else True
        return {
            **options,
            "dialog_turns_per_batch": self.frames_per_batch,
            "total_dialog_turns": -1 if self.total_frames == float("inf") else self.total_frames,
            "reset_at_each_iter": self.reset_at_each_iter,
        }


def _total_of(total: Any) -> int | float:
    return float("inf") if total in (None, -1, float("inf")) else int(total)


def _tracker_of(track: Any) -> Any:
    """The tracker that ``track_policy_version`` asks for, if any.

    Raises:
        TypeError: it is neither a bool nor a tracker.
    """
    if isinstance(track, bool):
        return PolicyVersion() if track else None
    if not hasattr(track, "increment_version"):
        raise TypeError(
            f"track_policy_version: expected a bool or a PolicyVersion, got "
            f"{type(track).__name__}; pass True"
        )
    return track


def _only(value: Any, name: str) -> Any:
    """The value for the only worker, from a list as torchrl takes it, with an entry a worker."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return value
    if len(value) != 1:
        raise ValueError(
            f"{name}: expected one for the one worker, got {len(value)}; pass it alone"
        )
    return value[0]
