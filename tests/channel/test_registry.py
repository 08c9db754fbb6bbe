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


def test_a_death_is_told_of_after_others_have_taken_the_entry():
    with WeightChannel.create(workers.weights_of(0), max_readers=1) as channel:
        publish(channel)
        dead = killed_reader(channel)
        with channel.handle.open() as reader:
            reader.lease().release()
            told = [(r.pid, r.alive) for r in channel.readers()]
            assert told == [(dead, False), (os.getpid(), True)]
            assert [r.pid for r in channel.readers()] == [os.getpid()]
        assert channel.readers() == []
        dead = [killed_reader(channel), killed_reader(channel)]
        channel.handle.open().close()
        assert {r.pid for r in channel.readers() if not r.alive} == {dead[1]}


def test_two_deaths_in_one_entry_are_both_told_of():
    with WeightChannel.create(workers.weights_of(0), max_readers=1) as channel:
        publish(channel)
        dead = [killed_reader(channel), killed_reader(channel)]
        told = [(r.pid, r.alive, r.leased) for r in channel.readers()]
        assert told == [(pid, False, ()) for pid in dead]
        assert channel.readers() == []
