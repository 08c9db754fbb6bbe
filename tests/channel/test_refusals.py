"""What the kernel refuses is said as the kernel says it."""

from __future__ import annotations

import os
import resource
from contextlib import contextmanager

import channel_workers as workers
import pytest
from channel_workers import publish
from children import in_child

from fusedrl.channel import WeightChannel

TOO_MANY = "[Tt]oo many open files"


@contextmanager
def no_free_descriptors(free: int = 0):
    """As many files open as this process may have, but for some."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.dup(0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe + 1, before[1]))
    opened = [probe]
    try:
        while True:
            opened.append(os.dup(0))
    except OSError:
        for _ in range(free):
            os.close(opened.pop())
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fd in opened:
            os.close(fd)


@pytest.mark.parametrize("free", [0, 1])
def test_too_many_open_files(channel, free):
    """One is not enough to open or to create: each mapping has an open file of its own."""
    for use in (channel.handle.open, lambda: WeightChannel.create(workers.weights_of(0))):
        with no_free_descriptors(free), pytest.raises(RuntimeError, match=TOO_MANY):
            use()
    channel.handle.open().close()
    assert channel.readers() == []


@pytest.mark.heavy
def test_a_publisher_that_has_ended_and_one_that_has_closed(channel):
    with workers.process(workers.publish_on_demand, "", 0, {}) as (child, pipe):
        handle = pipe.recv()
        child.kill()
        child.join()
        with pytest.raises(RuntimeError, match=rf"pid {child.pid}, with its.*No such file"):
            handle.open()
    channel.close()
    with pytest.raises(RuntimeError, match=r"its channel open.*No such file"):
        channel.handle.open()


@pytest.mark.heavy
@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_a_publisher_of_another_user(channel):
    publish(channel)

    def open_it() -> None:
        os.setresuid(65534, 65534, 65534)
        with pytest.raises(RuntimeError, match=r"of this user.*Permission denied"):
            channel.handle.open()

    assert in_child(open_it) == 0
