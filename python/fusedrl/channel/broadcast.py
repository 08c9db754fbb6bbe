"""Sends one version of the weights to the channels of several machines."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from fusedrl.channel.channel import WeightChannel, Writing
from fusedrl.channel.rendezvous import publish_together, rendezvous_of

__all__ = ["broadcast"]

PIECE = 2**30  # bytes: backends differ in how long a tensor they take


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
        TimeoutError: readers of a rank hold all slots, or ranks do not call this within the
            channel's ``rank_timeout``; the message names them.
        RuntimeError: another rank could not take part; the message has its error.

    Nothing is published on any rank after an error.

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
    source = channel.template if weights is None else weights

    def spread(writing: Writing) -> None:
        for piece in writing.flat.split(PIECE):
            dist.broadcast(piece, src, ranks)

    return publish_together(
        channel,
        rendezvous_of(tuple(members)),
        version if is_source else None,
        channel.limit(timeout),
        lambda: channel.places_to_publish(source) if is_source else [],
        is_source,
        spread,
    )
