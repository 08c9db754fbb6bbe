"""The arguments of an ``AsyncCollector``, checked before a process is started."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, ClassVar

from tensordict import TensorDictBase
from torchrl.collectors import Collector
from torchrl.collectors.llm import LLMCollector as _LLMCollector
from torchrl.envs.utils import ExplorationType

from fusedrl.channel import WeightHandle
from fusedrl.collectors.llm_collector import LLMCollector
from fusedrl.collectors.options import (
    CollectorOptions,
    Policy,
    TurnOptions,
    check_patience,
    check_total,
    check_whole,
)
from fusedrl.compat.torchrl import default_exploration
from fusedrl.weights.sync_scheme import ChannelWeightSyncScheme

EXPLORATION = default_exploration()

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
class FrameOptions:
    """Arguments of torchrl's ``Collector`` that :class:`fusedrl.LLMCollector` does not have."""

    device: Any = None
    storing_device: Any = None
    env_device: Any = None
    policy_device: Any = None
    max_frames_per_traj: int | None = None
    init_random_frames: int | None = None
    split_trajs: bool | None = None
    exploration_type: ExplorationType = EXPLORATION
    set_truncated: bool = False
    use_buffers: bool | None = None
    trust_policy: bool | None = None
    compile_policy: bool | dict[str, Any] | None = None
    cudagraph_policy: bool | dict[str, Any] | None = None
    no_cuda_sync: bool = False
    trajs_per_batch: int | None = None
    trajs_per_write: int | None = None
    auto_register_policy_transforms: bool | None = None
    compact_obs: bool = False


@dataclass(eq=False)
class AsyncOptions(CollectorOptions, FrameOptions):
    """The arguments of :class:`fusedrl.AsyncCollector`."""

    create_env_fn: Any
    policy: Policy | None = None
    _: KW_ONLY
    frames_per_batch: int | None = None
    total_frames: float | None = -1
    create_env_kwargs: Any = None
    reset_when_done: bool = True
    update_at_each_batch: bool = False
    preemptive_threshold: float | None = None
    num_threads: int | None = None
    num_sub_threads: int = 1
    extend_buffer: bool = True
    weight_recv_schemes: dict[str, Any] | None = None
    collector_class: Any = None
    traj_format: Any = None
    init_fn: Callable[[], None] | None = None
    pre_collect_hook: Callable[[], None] | None = None
    post_collect_hook: Callable[[TensorDictBase], None] | None = None
    prefetch: int = 1
    timeout: float | None = None

    channel_kinds: ClassVar[tuple[type, ...]] = (WeightHandle,)

    def __post_init__(self) -> None:
        """Check all of them; sizes have both of their names afterwards."""
        super().__post_init__()
        for name, (least, unit, remedy) in WHOLE.items():
            optional = name not in ("prefetch", "num_sub_threads")
            check_whole(name, getattr(self, name), least, unit, remedy, optional)
        check_total("total_frames", self.total_frames, "frames")
        if self.timeout is not None:
            check_patience(self.timeout, "None waits while the worker lives")
        self._check_class()
        _only(self.create_env_fn, "create_env_fn")
        _only(self.create_env_kwargs, "create_env_kwargs")
        if not self.reset_when_done:
            raise ValueError(
                "reset_when_done: expected True, got False; torchrl's collectors take nothing else"
            )
        for name, scheme in (self.weight_sync_schemes or {}).items():
            if not isinstance(scheme, ChannelWeightSyncScheme):
                raise ValueError(
                    f"weight_sync_schemes: expected ChannelWeightSyncScheme for {name!r}, got "
                    f"{type(scheme).__name__}; its updates are those of every other scheme: leave "
                    "the argument out"
                )
        if self.weight_updater is not None:
            self.refuse_both(("policy_factory", "policy"))
        self._take_either_name("dialog_turns_per_batch", "frames_per_batch", None)
        self._take_either_name("total_dialog_turns", "total_frames", -1)
        if self.collects_dialogs:
            self.check_dialogs()
        elif self.frames_per_batch is None:
            raise TypeError(
                "frames_per_batch: expected a number of frames, got None; 1 is the least"
            )

    @property
    def collects_dialogs(self) -> bool:
        """Whether the worker's class collects dialogs, with our arguments."""
        return isinstance(self.kind, type) and issubclass(self.kind, LLMCollector)

    @property
    def kind(self) -> Any:
        """The class of the worker's collector."""
        return self.collector_class or Collector

    def _check_class(self) -> None:
        kind = self.kind
        if not self.collects_dialogs and isinstance(kind, type) and issubclass(kind, _LLMCollector):
            raise ValueError(
                f"collector_class: expected fusedrl.LLMCollector for dialogs, got {kind}; import "
                "it from fusedrl"
            )
        for name, value in self._changed(FrameOptions if self.collects_dialogs else TurnOptions):
            if value not in (None, False):
                raise TypeError(
                    f"{name}: expected an argument of {kind.__name__}, got one of another class; "
                    "drop it, or pass another collector_class="
                )

    def _take_either_name(self, name: str, other: str, default: Any) -> None:
        turns, frames = getattr(self, name), getattr(self, other)
        if turns != default and frames not in (default, turns):
            raise TypeError(
                f"{name}: expected it or {other}, which is its other name here, got {turns} and "
                f"{frames}; drop one"
            )
        size = frames if turns == default else turns
        setattr(self, name, size)
        setattr(self, other, size)

    def _changed(self, part: type) -> list[tuple[str, Any]]:
        """The arguments in a part of this record that differ from their defaults."""
        named = [(field.name, getattr(self, field.name), field.default) for field in fields(part)]
        return [(name, value) for name, value, default in named if value is not default]

    def for_worker(self) -> AsyncOptions:
        """A copy without what stays with the trainer."""
        own = copy.copy(self)
        own.replay_buffer = own.queue = own.postproc = own.weight_updater = None
        own.weight_sync_schemes = own.weight_recv_schemes = None
        own.policy = None if own.policy_factory is not None else own.policy
        return own

    def passed_on(self) -> dict[str, Any]:
        """The arguments that the worker's collector gets as they came."""
        part = TurnOptions if self.collects_dialogs else FrameOptions
        kept = ("device", "split_trajs", "trajs_per_batch", "trajs_per_write")
        passed = {name: value for name, value in self._changed(part) if name not in kept}
        return passed | {"reset_at_each_iter": self.reset_at_each_iter}

    @property
    def env(self) -> Any:
        """A function that makes the environment with its arguments, or an environment."""
        make = _only(self.create_env_fn, "create_env_fn")
        kwargs = _only(self.create_env_kwargs, "create_env_kwargs")
        return functools.partial(make, **kwargs) if kwargs else make


def _only(value: Any, name: str) -> Any:
    """The value for the only worker, from a list as torchrl takes it, with an entry a worker."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return value
    if len(value) != 1:
        raise ValueError(
            f"{name}: expected one for the one worker, got {len(value)}; pass it alone"
        )
    return value[0]
