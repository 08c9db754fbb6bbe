"""What an ``AsyncCollector`` is given: refused, or sorted into what its worker needs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torchrl.collectors._constants import DEFAULT_EXPLORATION_TYPE
from torchrl.collectors.llm import LLMCollector as _LLMCollector

from fusedrl.channel import WeightHandle
from fusedrl.collectors.arguments import (
    check_mode,
    check_seconds,
    check_staleness,
    check_total,
    check_whole,
)
from fusedrl.collectors.llm_collector import LLMCollector
from fusedrl.weights.sync_scheme import ChannelWeightSyncScheme

# Arguments of torchrl's Collector that the worker's gets as they are, and what leaves them out.
OF_COLLECTOR: dict[str, Any] = {
    "max_frames_per_traj": None,
    "init_random_frames": None,
    "exploration_type": DEFAULT_EXPLORATION_TYPE,
    "set_truncated": False,
    "use_buffers": None,
    "trust_policy": None,
    "compile_policy": None,
    "cudagraph_policy": None,
    "no_cuda_sync": False,
    "auto_register_policy_transforms": None,
    "compact_obs": False,
}
# The least of each number, what it counts, and what to do.
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
OWN_SIZE, OWN_TOTAL = "dialog_turns_per_batch", "total_dialog_turns"
DEVICES = ("device", "storing_device", "policy_device", "env_device")
# Dialogs have none of these.
ONLY_FRAMES = (*OF_COLLECTOR, *DEVICES, "split_trajs", "trajs_per_batch", "trajs_per_write")


def is_of_dialogs(collector_class: Any) -> bool:
    """Whether a class is :class:`fusedrl.LLMCollector`, or derives from it."""
    return isinstance(collector_class, type) and issubclass(collector_class, LLMCollector)


def name_sizes(given: dict[str, Any], more: dict[str, Any]) -> None:
    """Move the sizes of dialogs to where those of frames are, and clear them away.

    Raises:
        TypeError, ValueError: both are given, or one that is none.
    """
    check_whole("dialog_turns_per_batch", more.get(OWN_SIZE), 1, "turns", "1 is the least")
    check_total("total_dialog_turns", more.get(OWN_TOTAL), "turns")
    for name, own, default in (
        ("frames_per_batch", OWN_SIZE, None),
        ("total_frames", OWN_TOTAL, -1),
    ):
        if own in more:
            if given[name] not in (default, more[own]):
                raise TypeError(
                    f"{own}: expected it or {name}, which is its other name here, got "
                    f"{more[own]} and {given[name]}; drop one"
                )
            given[name] = more.pop(own)


def check_arguments(given: dict[str, Any], more: dict[str, Any]) -> None:
    """Raise ``TypeError`` or ``ValueError`` for what does not go together.

    Args:
        given: the constructor's arguments by name.
        more: those that it has no name for.
    """
    collector_class = given["collector_class"]
    if is_of_dialogs(collector_class):
        _check_dialogs(given, more)
    elif isinstance(collector_class, type) and issubclass(collector_class, _LLMCollector):
        raise ValueError(
            f"collector_class: expected fusedrl.LLMCollector for dialogs, got {collector_class}; "
            "import it from fusedrl"
        )
    elif more:
        raise TypeError(
            f"{next(iter(more))}: expected an argument of AsyncCollector, got one of another "
            "class; those of dialogs need collector_class=fusedrl.LLMCollector"
        )
    elif given["frames_per_batch"] is None:
        raise TypeError("frames_per_batch: expected a number of frames, got None; 1 is the least")
    if not given["reset_when_done"]:
        raise ValueError(
            "reset_when_done: expected True, got False; torchrl's collectors take nothing else"
        )
    _check_numbers(given)
    _check_weights(given)


def _check_dialogs(given: dict[str, Any], more: dict[str, Any]) -> None:
    known = inspect.signature(given["collector_class"]).parameters
    for name in more:
        if name not in known:
            raise TypeError(f"{name}: expected an argument of LLMCollector, got an unknown one")
    for name in ONLY_FRAMES:
        if given[name] not in (None, False, OF_COLLECTOR.get(name)):
            raise TypeError(
                f"{name}: expected none with dialogs, got {given[name]!r}; LLMCollector has no "
                "such argument: let a transform of the environment do it"
            )


def _check_numbers(given: dict[str, Any]) -> None:
    for name, (least, unit, remedy) in WHOLE.items():
        optional = name not in ("prefetch", "num_sub_threads")
        check_whole(name, given[name], least, unit, remedy, optional)
    check_total("total_frames", given["total_frames"], "frames")
    threshold = given["preemptive_threshold"]
    if threshold is not None and not (
        isinstance(threshold, int | float) and 0.0 <= threshold <= 1.0
    ):
        raise ValueError(
            f"preemptive_threshold: expected 0 to 1, got {threshold!r}; 1 is the default"
        )
    check_staleness(given["max_staleness"], given["track_policy_version"])
    check_seconds("timeout", given["timeout"], "None has no limit")


def _check_weights(given: dict[str, Any]) -> None:
    check_mode(given["channel_mode"])
    channel, schemes = given["channel"], given["weight_sync_schemes"]
    if given["weight_updater"] is not None and schemes is not None:
        raise TypeError(
            "weight_updater: expected weight_updater or weight_sync_schemes, got both; drop one"
        )
    if channel is not None:
        if not isinstance(channel, WeightHandle):
            raise TypeError(
                f"channel: expected a WeightHandle, got {type(channel).__name__}; pass "
                "channel.handle"
            )
        for name in ("weight_updater", "weight_sync_schemes"):
            if given[name] is not None:
                raise TypeError(f"{name}: expected it or channel, got both; drop one")
    for name, scheme in (schemes or {}).items():
        if not isinstance(scheme, ChannelWeightSyncScheme):
            raise ValueError(
                f"weight_sync_schemes: expected ChannelWeightSyncScheme for {name!r}, got "
                f"{type(scheme).__name__}; its updates are those of every other scheme: leave the "
                "argument out"
            )
    both = given["policy"] is not None and given["policy_factory"] is not None
    if both and given["weight_updater"] is not None:
        raise TypeError("policy_factory: expected policy or policy_factory, got both; drop one")


def only(value: Any, name: str) -> Any:
    """The one worker's value, of torchrl's lists with an entry a worker."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return value
    if len(value) != 1:
        raise ValueError(
            f"{name}: expected one for the one worker, got {len(value)}; pass it alone"
        )
    return value[0]


def collector_options(given: dict[str, Any], devices: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of torchrl's ``Collector`` in the worker."""
    options = {
        name: given[name]
        for name, default in OF_COLLECTOR.items()
        if given[name] is not None and given[name] != default
    }
    kwargs = only(given["create_env_kwargs"], "create_env_kwargs")
    if options.get("init_random_frames"):
        stored = getattr(given["replay_buffer"], "write_count", 0)
        options["init_random_frames"] = max(options["init_random_frames"] - stored, 0)
    return {
        **options,
        **devices,
        "create_env_kwargs": dict(kwargs or {}),
        "frames_per_batch": given["frames_per_batch"],
        "total_frames": -1,
        "reset_at_each_iter": given["reset_at_each_iter"],
        "return_same_td": True,  # it is copied into shared memory before there is another
    }


def dialog_options(given: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """The arguments of :class:`fusedrl.LLMCollector` in the worker."""
    options = dict(more)
    queue = options.pop("queue", None)
    if options.get("flatten_data") is None:
        options["flatten_data"] = None if given["replay_buffer"] is None and queue is None else True
    return {
        **options,
        "dialog_turns_per_batch": given["frames_per_batch"],
        "total_dialog_turns": -1 if given["total_frames"] is None else given["total_frames"],
        "reset_at_each_iter": given["reset_at_each_iter"],
    }


def environment(given: dict[str, Any], dialogs: bool) -> Any:
    """What the worker's collector takes as its environment."""
    env = only(given["create_env_fn"], "create_env_fn")
    kwargs = only(given["create_env_kwargs"], "create_env_kwargs")
    return functools.partial(env, **kwargs) if dialogs and kwargs else env
