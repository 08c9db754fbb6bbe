"""Processes end or stop at every step of the protocol, and the others go on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import channel_workers as workers
import pytest

from fusedrl import _host
from fusedrl.channel import WeightChannel

pytestmark = pytest.mark.heavy

STEPS = _host.channel_steps()
PUBLISHER_STEPS = [step for step in STEPS if step.startswith(("begin", "commit"))]
READER_STEPS = [step for step in STEPS if step not in PUBLISHER_STEPS]
# No free slot is left where a lock stays held.
SLOTS = 2


def files() -> set[str]:
    """What of ours is open, or lies where files stay."""
    opened = {os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()}
    lying = {str(path) for where in ("/dev/shm", "/tmp") for path in Path(where).iterdir()}
    return {name for name in opened | lying if "fusedrl-channel" in name}


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"


def until_stopped(pid: int) -> None:
    deadline = time.monotonic() + 10
    while not stopped(pid):
        assert time.monotonic() < deadline, "the process does not get to its step"
        time.sleep(0.005)


@pytest.mark.parametrize("step", PUBLISHER_STEPS)
def test_readers_go_on_when_the_publisher_is_killed(step):
    before = files()
    with workers.process(workers.publish_on_demand, step, signal.SIGKILL, {"slots": SLOTS}) as (
        publisher,
        pipe,
    ):
        reader = pipe.recv().open()
        pipe.send(True)
        publisher.join(10)
        assert publisher.exitcode == -signal.SIGKILL

        started = time.monotonic()
        published = step in ("commit_published", "commit_woken")
        with reader.lease(timeout=1) as lease:
            assert lease.version == workers.version_in(lease.weights) == (2 if published else 1)
        with pytest.raises(RuntimeError, match=rf"pid {publisher.pid}\) is dead"):
            reader.lease(min_version=3, timeout=5)
        assert time.monotonic() - started < 1
        reader.close()
    assert files() == before


@pytest.mark.parametrize("step", READER_STEPS)
def test_the_publisher_goes_on_when_a_reader_is_killed(step):
    before = files()
    with WeightChannel.create(workers.weights_of(0), slots=SLOTS) as channel:
        channel.publish(workers.weights_of(1))
        with workers.process(workers.lease_on_demand, channel.handle, step, signal.SIGKILL) as (
            reader,
            pipe,
        ):
            if not step.startswith("open"):
                assert pipe.recv() == "open"
                pipe.send(True)
            reader.join(10)
            assert reader.exitcode == -signal.SIGKILL

            started = time.monotonic()
            versions = [channel.publish(workers.weights_of(v), timeout=1) for v in range(2, 6)]
            assert versions == [2, 3, 4, 5]
            assert time.monotonic() - started < 1
            told = [(r.pid, r.alive, r.leased) for r in channel.readers()]
            assert told == ([] if step == "open_locked" else [(reader.pid, False, ())])
            assert channel.readers() == []
    assert files() == before


@pytest.mark.parametrize("step", PUBLISHER_STEPS)
def test_readers_go_on_while_the_publisher_is_stopped(step):
    with (
        workers.process(workers.publish_on_demand, step, signal.SIGSTOP, {"slots": SLOTS}) as (
            publisher,
            pipe,
        ),
        pipe.recv().open() as reader,
    ):
        pipe.send(True)
        until_stopped(publisher.pid)
        with reader.lease(timeout=1) as lease:
            assert workers.version_in(lease.weights) == lease.version
        with pytest.raises(TimeoutError, match=rf"pid {publisher.pid}\) runs"):
            reader.lease(min_version=3, timeout=0.1)
        os.kill(publisher.pid, signal.SIGCONT)
        assert pipe.recv() == 2
        assert reader.wait_for(2, timeout=1) == 2


@pytest.mark.parametrize("step", READER_STEPS)
def test_a_stopped_reader_costs_at_most_the_slot_that_it_holds(step):
    with WeightChannel.create(workers.weights_of(0), slots=SLOTS) as channel:
        channel.publish(workers.weights_of(1))
        with workers.process(workers.lease_on_demand, channel.handle, step, signal.SIGSTOP) as (
            reader,
            pipe,
        ):
            if not step.startswith("open"):
                assert pipe.recv() == "open"
                pipe.send(True)
            until_stopped(reader.pid)
            assert channel.publish(workers.weights_of(2), timeout=1) == 2
            if step in ("lease_locked", "lease_validated"):
                with pytest.raises(TimeoutError, match=rf"pid {reader.pid} holds versions \[1\]"):
                    channel.publish(workers.weights_of(3), timeout=0.1)
                reader.kill()
            assert channel.publish(workers.weights_of(3), timeout=1) == 3


@pytest.mark.parametrize("fork", [False, True])
def test_a_killed_reader_holds_no_slot_even_through_a_child_that_it_forked(fork):
    with WeightChannel.create(workers.weights_of(0), slots=SLOTS) as channel:
        channel.publish(workers.weights_of(1))
        with workers.process(workers.lease_and_hold, channel.handle, fork) as (reader, pipe):
            version, child = pipe.recv()
            assert version == 1
            channel.publish(workers.weights_of(2))
            with pytest.raises(TimeoutError, match=rf"pid {reader.pid} holds versions \[1\]"):
                channel.publish(workers.weights_of(3), timeout=0.05)
            reader.kill()
            reader.join()
            try:
                assert channel.publish(workers.weights_of(3), timeout=1) == 3
            finally:
                if child:
                    os.kill(child, signal.SIGKILL)


def test_a_publisher_that_forked_and_was_killed_counts_as_dead():
    with workers.process(workers.publish_and_fork) as (publisher, pipe):
        handle, child = pipe.recv()
        with handle.open() as reader:
            publisher.kill()
            publisher.join()
            try:
                with pytest.raises(RuntimeError, match=rf"pid {publisher.pid}\) is dead"):
                    reader.wait_for(2, timeout=5)
            finally:
                os.kill(child, signal.SIGKILL)
