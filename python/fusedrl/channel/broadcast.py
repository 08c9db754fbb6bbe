"""Sends one version of the weights to the channels of several machines."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fusedrl.channel.channel import WeightChannel, Writing
from fusedrl.channel.checks import MAX_VERSION, count
from fusedrl.channel.layout import fill
from fusedrl.channel.sources import Place

__all__ = ["broadcast"]

PIECE = 2**30  # bytes: backends differ in how long a tensor they take


class _State(NamedTuple):
    """What the ranks tell each other."""

    layout: str
    last: int
    wanted: int | None
    error: str | None = None


def broadcast(
    channel: WeightChannel,
    weights: Any = None,
    version: int | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    src: int = 0,
    timeout: float | None = None,
) -> int:
    """Publish one version in the channel of every rank, for the readers of each machine.

    This is a collective call: every rank of the group calls it with a channel of its own, and the
    rank ``src`` has the weights. The bytes go from its slot straight into the slots of the others.
    No rank publishes before all have received.

    Args:
        channel: the channel of this rank. All channels have the same names, shapes and dtypes.
        weights: as for :meth:`WeightChannel.publish`, but whole, not sharded; read at ``src`` only.
        version: a number greater than that of every channel, read at ``src`` only; one more if
            ``None``.
        group: a group whose backend reaches the channels' devices; the default group if ``None``.
        src: the global rank of the process that has the weights.
        timeout: seconds that this rank waits for a free slot; the channel's own if ``None``.

    Returns:
        The version.

    Raises:
        ValueError: the channels have different layouts, the version is not greater, or ``src`` is
            not in the group.
        RuntimeError: another rank could not take part; the message has its error. A rank raises its
            own error as it is: that of its weights, or ``TimeoutError`` if readers hold all slots.
            Nothing is published on any rank then.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from fusedrl import WeightChannel
        >>> from fusedrl.channel.broadcast import broadcast
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Linear(2, 1)
        >>> with WeightChannel.create(model) as channel:
        ...     broadcast(channel, model)
        1
        >>> dist.destroy_process_group()
    """
    ranks: Any = group or dist.group.WORLD
    members = dist.get_process_group_ranks(ranks)
    if src not in members:
        raise ValueError(
            f"src: expected a rank of the group, one of {members}, got {src!r}; pass the global "
            "rank of the process that has the weights"
        )
    is_source = dist.get_rank() == src
    places: list[Place] = []
    error: Exception | None = None
    if is_source:
        try:
            if version is not None:
                count("version", version, 0, MAX_VERSION)
            places = channel.places_to_publish(channel.template if weights is None else weights)
        except Exception as raised:
            error = raised
    mine = _State(channel.layout.hash, -1 if channel.version is None else channel.version, version)
    version = _agree(_tell(mine, error, ranks), members.index(src))

    with ExitStack() as stack:
        writing: Writing | None = None
        try:
            writing = stack.enter_context(channel.writing(version, timeout=timeout))
            if is_source:
                with torch.no_grad():
                    fill(writing.views, places)
        except Exception as raised:
            error = raised
        _tell(mine, error, ranks)
        assert writing is not None
        for piece in writing.flat.split(PIECE):
            dist.broadcast(piece, src, ranks)
        dist.barrier(ranks)  # a rank that fails before this keeps all ranks from publishing
    return version


def _tell(mine: _State, error: Exception | None, group: Any) -> list[_State]:
    """Every rank's state; raises on all ranks if one has an error."""
    if error is not None:
        mine = mine._replace(error=f"{type(error).__name__}: {error}")
    states: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(states, mine, group)
    if error is not None:
        raise error
    failed = [f"rank {i}: {state.error}" for i, state in enumerate(states) if state.error]
    if failed:
        raise RuntimeError(
            f"group: expected all ranks to take part, got {'; '.join(failed)}; nothing is "
            "published: call again once that is repaired"
        )
    return states


def _agree(states: list[_State], source: int) -> int:
    if len({state.layout for state in states}) > 1:
        hashes = ", ".join(f"rank {i}: {state.layout[:12]}" for i, state in enumerate(states))
        raise ValueError(
            f"channel: expected one layout on all ranks, got {hashes}; create all channels with "
            "the same names, shapes and dtypes"
        )
    last = max(state.last for state in states)
    wanted = states[source].wanted
    if wanted is None:
        return max(last, 0) + 1
    if wanted <= last:
        raise ValueError(
            f"version: expected more than the {last} that is published, got {wanted}; versions "
            "only grow: leave it out for the next one"
        )
    return wanted
