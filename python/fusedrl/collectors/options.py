"""The arguments of collectors of dialogs, and checks of them and of states, before any is used."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal, SupportsIndex

from tensordict import TensorDictBase
from torch import Tensor
from torch.nn.parameter import is_lazy
from torchrl.envs import AsyncEnvPool
from torchrl.envs.llm.transforms.policy_version import PolicyVersion

from fusedrl.channel import WeightHandle, WeightReader
from fusedrl.channel.checks import seconds
from fusedrl.collectors.batches import QueueBuffer
from fusedrl.collectors.progress import check_progress
from fusedrl.compat.torch import EXTRA_STATE

Policy = Callable[[TensorDictBase], TensorDictBase]


@dataclass(kw_only=True, eq=False)
class TurnOptions:
    """Arguments that say which turns a collector of dialogs yields, and in which form."""

    yield_only_last_steps: bool | None = None
    yield_completed_trajectories: bool | None = None
    async_envs: bool | None = None
    flatten_data: bool | None = None


@dataclass(kw_only=True, eq=False)
class CollectorOptions(TurnOptions):
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
    reset_at_each_iter: bool = False
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
        check_whole(
            "dialog_turns_per_batch", self.dialog_turns_per_batch, 1, "turns", "1 is the least"
        )
        check_total("total_dialog_turns", self.total_dialog_turns, "turns")
        if not isinstance(self.track_policy_version, bool | PolicyVersion):
            raise TypeError(
                f"track_policy_version: expected a bool or a PolicyVersion, got "
                f"{type(self.track_policy_version).__name__}; pass True"
            )
        check_staleness(self.max_staleness, self.track_policy_version)
        if self.channel_mode not in ("alias", "copy"):
            raise ValueError(
                f"channel_mode: expected 'alias' or 'copy', got {self.channel_mode!r}; alias takes "
                "no memory, copy keeps the addresses of the parameters"
            )
        check_progress(self.progress)
        self._check_ways()

    def _check_ways(self) -> None:
        """Check that weights come in one way, and that batches go one way."""
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
        if self.channel is None:
            return
        if not isinstance(self.channel, self.channel_kinds):
            kinds = " or a ".join(kind.__name__ for kind in self.channel_kinds)
            raise TypeError(
                f"channel: expected a {kinds}, got {type(self.channel).__name__}; pass "
                "channel.handle"
            )
        if self.has_uuids:
            raise ValueError(
                "track_policy_version: expected integer versions, which a channel has, got UUIDs; "
                "pass True or PolicyVersion('int')"
            )

    @property
    def buffer(self) -> Any:
        """The replay buffer, or what stands in its place for a queue."""
        return self.replay_buffer if self.queue is None else QueueBuffer(self.queue)

    @property
    def completed(self) -> bool:
        """Whether batches have completed trajectories."""
        return bool(self.yield_completed_trajectories or self.yield_only_last_steps)

    @property
    def has_uuids(self) -> bool:
        """Whether versions are tracked as UUIDs."""
        return self.track_policy_version is not False and not counts(self.track_policy_version)

    @property
    def total(self) -> float:
        """The number of turns to run in all; infinite if they never end."""
        total = self.total_dialog_turns
        return float("inf") if total is None or total in (-1, float("inf")) else int(total)

    def check_dialogs(self) -> None:
        """Check what holds of dialogs."""
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

    def __post_init__(self) -> None:
        """Check all of them."""
        super().__post_init__()
        self.refuse_both(("policy_factory", "policy"))
        self.check_dialogs()


def counts(tracker: Any) -> bool:
    """Whether ``track_policy_version`` asks for integer versions."""
    return tracker is True or getattr(tracker, "version_type", None) in (int, "int")


def check_whole(
    name: str, value: Any, least: int, unit: str, remedy: str, optional: bool = True
) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless a value is a whole number, ``least`` or more.

    Args:
        name: the name of the argument.
        value: its value.
        least: the smallest number that is accepted.
        unit: what is counted.
        remedy: the end of the message, which says what to do.
        optional: whether ``None`` is accepted.
    """
    if value is None and optional:
        return
    if not isinstance(value, SupportsIndex) or isinstance(value, bool | float):
        raise TypeError(f"{name}: expected a whole number of {unit}, got {value!r}; {remedy}")
    if operator.index(value) < least:
        raise ValueError(f"{name}: expected {least} or more {unit}, got {value!r}; {remedy}")


def check_patience(timeout: Any, remedy: str) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless ``timeout`` is a number of seconds to wait."""
    if not seconds("timeout", timeout):
        raise ValueError(f"timeout: expected more than 0 seconds, got {timeout!r}; {remedy}")


def check_total(name: str, value: Any, unit: str) -> None:
    """As :func:`check_whole`, for a total, which may be a float such as 1e6, -1 or infinity."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value not in (-1, float("inf")):
        check_whole(name, value, 1, unit, "-1 never ends")


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


def check_staleness(value: Any, tracker: Any) -> None:
    """Raise ``TypeError`` or ``ValueError`` for a ``max_staleness`` that cannot be counted."""
    if value is None:
        return
    check_whole("max_staleness", value, 0, "versions", "None keeps everything")
    if not counts(tracker):
        raise ValueError(
            "max_staleness: expected integer versions to count back from, got "
            f"track_policy_version={tracker!r}; pass True or PolicyVersion('int')"
        )


def check_state(own: Any, state: Any, strict: bool = True) -> None:
    """Raise if a state does not fit a collector, in which nothing has changed then.

    Args:
        own: the state that the collector has.
        state: the state that is to be loaded.
        strict: whether it has to have environment and policy, with every entry.

    Raises:
        KeyError: a part is missing.
        ValueError: entries are missing, unexpected, or of other shapes.
    """
    strictly = {"env_state_dict": strict, "policy_state_dict": strict, "traj_pool": True}
    for name in ("frames", "iter", "env_state_dict", "policy_state_dict"):
        if name in own and name not in state and strictly.get(name, True):
            raise KeyError(
                f"state_dict: expected {name!r} in it, got {list(state)}; load what state_dict() "
                "of such a collector has returned"
            )
    parts = [part for part in strictly if part in own and part in state]
    told = [d for part in parts for d in _unlike(own[part], state[part], strictly[part], part)]
    if isinstance(own.get("policy_version"), str) != isinstance(state.get("policy_version"), str):
        told += ["policy_version, of another kind"] if state.get("policy_version") else []
    if told:
        raise ValueError(
            f"state_dict: expected the entries of this collector, got {len(told)} others: "
            f"{'; '.join(told[:5])}; load what state_dict() of such a collector has returned"
        )


def _unlike(own: Any, state: Any, strict: bool, path: str) -> Iterator[str]:
    """What differs between states of modules, which may be nested."""
    if isinstance(own, Mapping) and isinstance(state, Mapping):
        if "worker0" in own and "worker0" not in state:  # one state for all environments
            state = dict.fromkeys(own, state)
        for name in sorted(own.keys() ^ state.keys()) if strict else ():
            yield f"{path}.{name}, {'missing' if name in own else 'unexpected'}"
        for name in sorted(own.keys() & state.keys()):
            if not name.endswith(EXTRA_STATE):
                yield from _unlike(own[name], state[name], strict, f"{path}.{name}")
    elif isinstance(own, Tensor) and not is_lazy(own):
        shape = getattr(state, "shape", None)
        if shape != own.shape:
            yield f"{path}, {shape} for {own.shape}"


def of_part(part: str, name: str, doc: str) -> Any:
    """An attribute that reads and sets an attribute of a part of the collector.

    Args:
        part: the collector's attribute with the part.
        name: the name of the part's attribute. A ``max_staleness`` is checked before it is set.
        doc: the docstring of the attribute.
    """

    def read(self: Any) -> Any:
        return getattr(getattr(self, part), name)

    def write(self: Any, value: Any) -> None:
        if name == "max_staleness":
            check_staleness(value, self.policy_version_tracker or False)
        setattr(getattr(self, part), name, value)

    return property(read, write, doc=doc)
