"""The arguments of an ``AsyncCollector``, checked before a process is started."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Literal

from tensordict import TensorDictBase
from torchrl.collectors import Collector
from torchrl.collectors.llm import LLMCollector as _LLMCollector
from torchrl.envs.llm.transforms.policy_version import PolicyVersion

from fusedrl.channel import WeightHandle
from fusedrl.collectors.llm_collector import LLMCollector
from fusedrl.collectors.options import (
    DialogOptions,
    Policy,
    check_total,
    check_ways,
    check_whole,
)
from fusedrl.weights.sync_scheme import ChannelWeightSyncScheme

KINDS = Collector, LLMCollector
# Arguments of torchrl's Collector that are followed in the trainer's process, not in the worker.
WITH_TRAINER = "device", "split_trajs", "trajs_per_batch", "trajs_per_write", "traj_format"


@dataclass(eq=False)
class AsyncOptions:
    """The arguments of :class:`fusedrl.AsyncCollector`.

    Attributes:
        for_class: the arguments that are those of ``collector_class``.
    """

    create_env_fn: Any
    policy: Policy | None = None
    _: KW_ONLY
    policy_factory: Callable[[], Policy] | None = None
    dialog_turns_per_batch: int | None = None
    total_dialog_turns: float | None = -1
    postproc: Policy | None = None
    replay_buffer: Any = None
    weight_updater: Any = None
    weight_sync_schemes: dict[str, Any] | None = None
    queue: Any = None
    channel: WeightHandle | None = None
    channel_mode: Literal["alias", "copy"] = "alias"
    track_policy_version: bool | PolicyVersion = False
    max_staleness: int | None = None
    verbose: bool = False
    frames_per_batch: int | None = None
    total_frames: float | None = -1
    create_env_kwargs: Any = None
    update_at_each_batch: bool = False
    preemptive_threshold: float | None = None
    num_threads: int | None = None
    num_sub_threads: int = 1
    extend_buffer: bool = True
    weight_recv_schemes: dict[str, Any] | None = None
    collector_class: Any = None
    init_fn: Callable[[], None] | None = None
    pre_collect_hook: Callable[[], None] | None = None
    post_collect_hook: Callable[[TensorDictBase], None] | None = None
    prefetch: int = 1
    timeout: float | None = None
    for_class: dict[str, Any]

    @classmethod
    def of(cls, create_env_fn: Any, policy: Policy | None, **arguments: Any) -> AsyncOptions:
        """A record of arguments, some of which are those of ``collector_class``."""
        others = arguments.keys() - {field.name for field in fields(cls)}
        for_class = {name: arguments.pop(name) for name in others}
        return cls(create_env_fn, policy, for_class=for_class, **arguments)

    def __post_init__(self) -> None:
        """Check all of them; sizes have both of their names afterwards."""
        both = ("policy_factory", "policy")
        check_ways(self, (WeightHandle,), *([both] if self.weight_updater is not None else []))
        for name in ("dialog_turns_per_batch", "frames_per_batch"):
            check_whole(name, getattr(self, name), 1)
        check_whole("prefetch", self.prefetch, 0, optional=False)
        for name in ("total_dialog_turns", "total_frames"):
            check_total(name, getattr(self, name))
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(
                f"timeout: expected more than 0 seconds, got {self.timeout!r}; None waits while "
                "the worker lives"
            )
        for name, scheme in (self.weight_sync_schemes or {}).items():
            if not isinstance(scheme, ChannelWeightSyncScheme):
                raise ValueError(
                    f"weight_sync_schemes: expected ChannelWeightSyncScheme for {name!r}, got "
                    f"{type(scheme).__name__}; its updates are those of every other scheme: leave "
                    "the argument out"
                )
        self._take_either_name("dialog_turns_per_batch", "frames_per_batch", None)
        self._take_either_name("total_dialog_turns", "total_frames", -1)
        self._check_class()

    @property
    def collects_dialogs(self) -> bool:
        """Whether the worker's class collects dialogs, with our arguments."""
        return isinstance(self.kind, type) and issubclass(self.kind, LLMCollector)

    @property
    def kind(self) -> Any:
        """The class of the worker's collector."""
        return self.collector_class or Collector

    def _check_class(self) -> None:
        """Check the arguments of the worker's collector."""
        kind, base = self.kind, LLMCollector if self.collects_dialogs else Collector
        own, of_base = (inspect.signature(x).parameters.values() for x in (kind, base))
        known = {p.name for p in (*own, *of_base) if p.kind is not p.VAR_KEYWORD}
        of_both = {p for base in KINDS for p in inspect.signature(base).parameters}
        for name in self.for_class.keys() - known:
            if name in of_both and (self.for_class[name] is None or self.for_class[name] is False):
                del self.for_class[name]  # what the other kind of collector is not told to do
                continue
            raise TypeError(
                f"{getattr(kind, '__name__', kind)}.__init__() got an unexpected keyword argument "
                f"{name!r}; drop it, or pass another collector_class="
            )
        if self.collects_dialogs:
            names = self.for_class.keys() & {p.name for p in of_base}
            given = {name: self.for_class[name] for name in names}
            DialogOptions(self.env, dialog_turns_per_batch=self.dialog_turns_per_batch, **given)
            return
        if isinstance(kind, type) and issubclass(kind, _LLMCollector):
            raise ValueError(
                f"collector_class: expected fusedrl.LLMCollector for dialogs, got {kind}; import "
                "it from fusedrl"
            )
        if self.frames_per_batch is None:
            raise TypeError(
                "frames_per_batch: expected a number of frames, got None; 1 is the least"
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

    def for_worker(self) -> AsyncOptions:
        """A copy without what stays with the trainer."""
        own = copy.copy(self)
        own.replay_buffer = own.queue = own.postproc = own.weight_updater = None
        own.weight_sync_schemes = own.weight_recv_schemes = None
        own.policy = None if own.policy_factory is not None else own.policy
        return own

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
