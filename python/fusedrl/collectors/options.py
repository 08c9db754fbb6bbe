"""Arguments of the dialog collectors, and validation of arguments and states."""

from __future__ import annotations

import operator
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, SupportsIndex

from tensordict import TensorDictBase
from torch import Tensor
from torch.nn.parameter import is_lazy
from torchrl.envs.llm.transforms.policy_version import PolicyVersion

from fusedrl.channel import WeightHandle, WeightReader
from fusedrl.channel.checks import MAX_VERSION
from fusedrl.weights.collector import check_counts

Policy = Callable[[TensorDictBase], TensorDictBase]


@dataclass(eq=False)
class DialogOptions:
    """The arguments of :class:`fusedrl.LLMCollector`, validated on construction."""

    env: Any
    _: KW_ONLY
    policy: Policy | None = None
    policy_factory: Callable[[], Policy] | None = None
    dialog_turns_per_batch: int | None = None
    total_dialog_turns: float | None = -1
    yield_only_last_steps: bool | None = None
    yield_completed_trajectories: bool | None = None
    postproc: Policy | None = None
    async_envs: bool | None = None
    replay_buffer: Any = None
    reset_at_each_iter: bool = False
    flatten_data: bool | None = None
    weight_updater: Any = None
    weight_sync_schemes: dict[str, Any] | None = None
    queue: Any = None
    channel: WeightHandle | WeightReader | None = None
    channel_mode: Literal["alias", "copy"] = "alias"
    track_policy_version: bool | PolicyVersion = False
    max_staleness: int | None = None
    verbose: bool = False

    def __post_init__(self) -> None:
        """Validate all arguments."""
        check_whole("dialog_turns_per_batch", self.dialog_turns_per_batch, 1)
        check_total("total_dialog_turns", self.total_dialog_turns)
        check_versions(self.track_policy_version, self.max_staleness)
        check_channel(self.channel, self.channel_mode, WeightHandle, WeightReader)
        check_one(policy_factory=self.policy_factory, policy=self.policy)
        check_one(queue=self.queue, replay_buffer=self.replay_buffer)
        check_one(
            weight_updater=self.weight_updater,
            weight_sync_schemes=self.weight_sync_schemes,
            channel=self.channel,
        )
        whole, last = self.yield_completed_trajectories, self.yield_only_last_steps
        if self.dialog_turns_per_batch is None and not self.completed:
            raise TypeError(
                "dialog_turns_per_batch: expected a number of turns, got None; it is optional only "
                "with yield_completed_trajectories"
            )
        if last and (whole is False or self.flatten_data is not None or self.reset_at_each_iter):
            raise TypeError(
                "yield_only_last_steps: expected no yield_completed_trajectories=False, "
                "flatten_data or reset_at_each_iter with it, got one of them; leave it out"
            )

    @property
    def completed(self) -> bool:
        """Whether batches contain only completed trajectories."""
        return bool(self.yield_completed_trajectories or self.yield_only_last_steps)

    @property
    def flat(self) -> bool:
        """Whether batches are one-dimensional."""
        has_buffer = self.replay_buffer is not None or self.queue is not None
        return has_buffer if self.flatten_data is None else self.flatten_data


# The name in Python's errors about missing or unknown arguments.
DialogOptions.__init__.__qualname__ = "LLMCollector.__init__"


def check_versions(track: Any, max_staleness: Any) -> None:
    """Check ``track_policy_version`` and ``max_staleness``, which requires tracking."""
    check_whole("max_staleness", max_staleness, 0)
    if not isinstance(track, bool | PolicyVersion):
        raise TypeError(
            "track_policy_version: expected a bool or a PolicyVersion, got "
            f"{type(track).__name__}; pass True"
        )
    if isinstance(track, PolicyVersion):
        check_counts(track)
    if max_staleness is not None and track is False:
        raise TypeError(
            f"max_staleness: expected track_policy_version with it, got {max_staleness} alone; "
            "pass track_policy_version=True"
        )


def check_channel(channel: Any, mode: Any, *kinds: type) -> None:
    """Check ``channel`` and ``channel_mode``."""
    if mode not in ("alias", "copy"):
        raise ValueError(
            f"channel_mode: expected 'alias' or 'copy', got {mode!r}; leave it out for 'alias'"
        )
    if channel is None and mode != "alias":
        raise TypeError(
            f"channel_mode: expected a channel with it, got {mode!r} alone; leave it out, or pass "
            "the mode to the weight sync scheme"
        )
    if channel is not None and not isinstance(channel, kinds):
        raise TypeError(
            f"channel: expected a {' or '.join(kind.__name__ for kind in kinds)}, got "
            f"{type(channel).__name__}; pass the channel's .handle"
        )


def check_one(**ways: Any) -> None:
    """Check that at most one of these mutually exclusive arguments is given."""
    given = [name for name, way in ways.items() if way is not None]
    if len(given) > 1:
        raise TypeError(f"{given[0]}: expected it or {given[1]}, got both; drop one")


def check_whole(name: str, value: Any, least: int, optional: bool = True) -> None:
    """Raise unless ``value`` is an integer of at least ``least``, or ``None`` if optional."""
    if value is None and optional:
        return
    if not isinstance(value, SupportsIndex) or isinstance(value, bool | float):
        raise TypeError(f"{name}: expected an int, {least} or more, got {value!r}; pass one")
    if operator.index(value) < least:
        raise ValueError(f"{name}: expected {least} or more, got {value!r}; pass a larger one")


def check_total(name: str, value: Any) -> float:
    """A total as an integer (1e6 is accepted); -1, infinity and ``None`` mean no limit."""
    if value is None or value in (-1, float("inf")):
        return float("inf")
    total = int(value) if isinstance(value, float) and value.is_integer() else value
    check_whole(name, total, 1)
    return int(total)


def check_state(own: Mapping[str, Any], given: Mapping[str, Any], strict: bool = True) -> None:
    """Raise unless a collector with the state ``own`` can load the state ``given``."""
    needed = {"frames", "iter", *(name for name in own if strict and name.endswith("state_dict"))}
    expected, found = (
        _shapes({name: state[name] for name in own if name in needed or name in given})
        for state in (own, given)
    )
    if strict and (others := expected.keys() ^ found.keys()):
        raise KeyError(f"state_dict: expected the collector's entries, got others: {min(others)}")
    for name in expected.keys() & found.keys():
        if None not in (expected[name], found[name]) and expected[name] != found[name]:
            raise ValueError(
                f"{name}: expected shape {expected[name]}, got {found[name]}; load the state of a "
                "collector with the same environment and policy"
            )
    for name, least in (("frames", 0), ("iter", -1), ("policy_version", 0)):
        if name in given and name in own:
            check_whole(name, given[name], least)
    if (given.get("policy_version") or 0) > MAX_VERSION and "policy_version" in own:
        raise ValueError(
            f"policy_version: expected at most {MAX_VERSION}, got {given['policy_version']}; load "
            "what state_dict() returned"
        )


def _shapes(state: Any, path: str = "") -> dict[str, tuple[int, ...] | None]:
    """Shapes of the tensors of a state by path, and ``None`` for other values."""
    if isinstance(state, Mapping):
        parts = (_shapes(part, f"{path}.{name}".lstrip(".")) for name, part in state.items())
        return dict(ChainMap({path: None}, *parts))
    is_whole = isinstance(state, Tensor) and not is_lazy(state)
    return {path: tuple(state.shape) if is_whole else None}
