"""A channel's control page for tests to damage, and a process that does so at random."""

from __future__ import annotations

import mmap
import os
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from channel_workers import version_in, weights_of
from torch import nn

from fusedrl.channel import WeightChannel

# As csrc/host/channel_page.h has it.
HEADER = struct.Struct("8s32sq4QQ")
PUBLISHED, SEQUENCE, CLOSED, SLOTS, SLOT, ENTRY = 128, 136, 140, 256, 64, 64
ENTRIES = SLOTS + 64 * SLOT
MANIFEST = 8192  # with few readers
NUMBERS = 64


@contextmanager
def memory(channel: WeightChannel) -> Iterator[mmap.mmap]:
    """All that the channel's processes share."""
    with (
        Path(f"/proc/self/fd/{channel.handle.fd}").open("r+b") as file,
        mmap.mmap(file.fileno(), os.fstat(file.fileno()).st_size) as page,
    ):
        yield page


def edit(page: mmap.mmap, numbers: random.Random) -> None:
    """Change bytes of what readers and publishers look at."""
    spans = (
        (0, HEADER.size),
        (PUBLISHED, SEQUENCE),
        (CLOSED, CLOSED + 4),
        (SLOTS, SLOTS + 3 * SLOT),
        (ENTRIES, ENTRIES + 4 * ENTRY),
        (MANIFEST, MANIFEST + 600),
    )
    for _ in range(numbers.choice((1, 1, 1, 4, 16))):
        page[numbers.randrange(*numbers.choice(spans))] = numbers.randrange(256)


def uses(channel: WeightChannel) -> Iterator[Callable[[], bool]]:
    """What may fail, and may not be wrong, first before the channel is damaged."""
    model = nn.ParameterDict({name: torch.zeros(NUMBERS) for name in "abcd"})
    with channel.handle.open() as reader:
        for version in (1, 2, 3):
            channel.publish(weights_of(version, NUMBERS))
        with reader.lease() as lease:
            yield lambda: version_in(lease.weights) == lease.version == 3
            yield lambda: version_in(lease.weights) == lease.version == 3
            yield lambda: reader.load_into(model, timeout=0.01) == float(model["a"][7]) == 3
            yield lambda: channel.handle.open().lease(timeout=0.01).version == 3
            yield lambda: channel.readers() is not None
            yield lambda: channel.publish(weights_of(4, NUMBERS), timeout=0.01) == 4
            yield lambda: version_in(reader.lease(4, timeout=0.01).weights) == 4
            yield lambda: channel.wait_applied(4, timeout=0.01) is None
            yield lambda: version_in(lease.weights) == lease.version == 3


def edit_at_random(pipe: Any, seed: int, channels: int) -> None:
    """Damage channels, one after the other; send how many uses saw it."""
    torch.set_num_threads(1)
    numbers = random.Random(seed)
    seen = 0
    for _ in range(channels):
        with WeightChannel.create(weights_of(0, NUMBERS), max_readers=4) as channel:
            each = uses(channel)
            assert next(each)()
            with memory(channel) as page:
                edit(page, numbers)
            for use in each:
                try:
                    right = use()
                except (RuntimeError, TimeoutError):
                    seen += 1
                else:
                    assert right, "something else than what was published"
    pipe.send(seen)
