"""Who reads a channel, who died, and that each death is told of once."""

from __future__ import annotations

import os

import channel_workers as workers
import pytest
from channel_workers import publish

from fusedrl.channel import WeightChannel

pytestmark = pytest.mark.heavy


def killed_reader(channel: WeightChannel) -> int:
    """The pid of a reader that was killed while it held a lease."""
    with workers.process(workers.lease_and_hold, channel.handle, False) as (child, pipe):
        pipe.recv()
        child.kill()
        child.join()
    return child.pid


def test_each_death_is_told_of_once_unless_its_entry_is_needed():
    with WeightChannel.create(workers.weights_of(0), max_readers=2) as channel:
        publish(channel)
        first = killed_reader(channel)
        with channel.handle.open() as reader:  # in the entry that nobody has had
            reader.lease().release()
            told = [(r.pid, r.alive, r.leased) for r in channel.readers()]
            assert told == [(first, False, ()), (os.getpid(), True, ())]
            assert [r.pid for r in channel.readers()] == [os.getpid()]
        assert channel.readers() == []
        dead = [killed_reader(channel) for _ in range(2)]
        with channel.handle.open():
            told = [(r.pid, r.alive) for r in channel.readers()]
            assert told == [(os.getpid(), True), (dead[1], False)]
        assert channel.readers() == []
