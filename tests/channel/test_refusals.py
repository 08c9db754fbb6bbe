"""What the kernel refuses is blamed on what it was."""

from __future__ import annotations

import errno
import os
import resource
import socket
from contextlib import contextmanager

import channel_workers as workers
import pytest
from channel_workers import publish
from children import in_child

from fusedrl import _host
from fusedrl.channel import WeightChannel

TOO_MANY = r"open files: expected fewer than this process's \d+ \(ulimit -n\), got all in use"


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


def test_too_many_open_files_at_either_end_of_a_socket(channel):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with no_free_descriptors(), pytest.raises(RuntimeError, match=TOO_MANY):
            channel.send_to(ours)
        channel.send_to(ours)
        with no_free_descriptors(), pytest.raises(RuntimeError, match=TOO_MANY):
            channel.handle.open(theirs)
        channel.send_to(ours)
        channel.handle.open(theirs).close()


def test_a_socket_without_a_channel(channel):
    ours, theirs = socket.socketpair()
    with theirs:
        ours.send(b"x")
        with pytest.raises(RuntimeError, match=r"socket: expected .* got no file; call send_to"):
            channel.handle.open(theirs)
        ours.close()
        with pytest.raises(RuntimeError, match="got its end; call send_to"):
            channel.handle.open(theirs)


def test_a_publisher_that_has_ended_and_one_that_has_closed(channel):
    with workers.process(workers.publish_on_demand, "", 0, {}) as (child, pipe):
        handle = pipe.recv()
        child.kill()
        child.join()
        with pytest.raises(
            RuntimeError, match=rf"pid {child.pid}, seen by .*it has ended, or this"
        ):
            handle.open()
    channel.close()
    with pytest.raises(RuntimeError, match="with its channel open, got a process of that pid"):
        channel.handle.open()


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENFILE, r"fs\.file-max"),
        (errno.EMFILE, "ulimit -n"),
        (errno.EACCES, "of this user .*no access to /proc/.*send_to"),
        (errno.EPERM, "of this user .*no access to /proc/.*send_to"),
        (errno.ENOMEM, "room to map the channel.*vm.max_map_count"),
        (errno.EIO, "got 'it is so'"),
    ],
)
def test_each_refusal_of_an_open_has_its_remedy(channel, monkeypatch, number, message):
    def refuse(*_: object) -> None:
        raise OSError(number, "it is so")

    monkeypatch.setattr(_host, "Reader", refuse)
    with pytest.raises(RuntimeError, match=message) as error:
        channel.handle.open()
    assert isinstance(error.value.__cause__, OSError)


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.ENOSPC, errno.EFBIG])
def test_memory_that_is_refused_at_last_has_the_same_remedy(monkeypatch, number):
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(_host, "Publisher", refuse)
    with pytest.raises(RuntimeError, match=r"room for 196608 bytes.*fewer slots.*bfloat16"):
        WeightChannel.create(workers.weights_of(0))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_a_publisher_of_another_user(channel):
    publish(channel)

    def open_it() -> None:
        os.setresuid(65534, 65534, 65534)
        with pytest.raises(RuntimeError, match=r"of this user \(uid 65534\)"):
            channel.handle.open()

    assert in_child(open_it) == 0


def test_address_space_that_is_used_up(channel):
    """A child's own limit, far below what the mapping needs."""
    publish(channel)

    def open_it() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))
        try:
            channel.handle.open()
        except RuntimeError as error:
            os._exit(0 if "ulimit -v" in str(error) else 1)
        except MemoryError:
            os._exit(0)  # Python itself came first
        os._exit(2)

    assert in_child(open_it) == 0
