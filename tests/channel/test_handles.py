"""How a channel gets to another process, and what must not get there."""

from __future__ import annotations

import os
import pickle
import stat
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import channel_workers as workers
import pytest
from channel_workers import publish


def test_a_view_that_was_pickled_for_another_process_does_not_stay_what_readers_read(
    channel, reader
):
    model = workers.model_of_zeros()
    for version in range(1, 8):
        publish(channel)
        reader.load_into(model)
        with reader.lease() as lease:
            assert workers.version_in(lease.weights) == lease.version == version
            ForkingPickler.dumps(lease.weights["a"])
            ForkingPickler.dumps(model["b"])
        assert {float(p[0]) for p in model.values()} == {float(version)}


def test_handles_are_small_and_do_not_show_their_secret(channel):
    publish(channel)
    text = pickle.dumps(channel.handle)
    assert len(text) < 1000
    assert channel.handle.session not in repr(channel.handle)
    with pickle.loads(text).open() as reader, reader.lease() as lease:
        assert lease.version == 1
    assert b"torch" not in text


def test_handles_of_something_else_open_nothing(channel):
    """Readers of memory that somebody may shrink would end by SIGBUS."""
    handle, unsealed = channel.handle, os.memfd_create("other")
    os.truncate(unsealed, 1 << 20)
    with Path(__file__).open() as file, os.fdopen(unsealed):
        for fd, session, message in (
            (handle.fd, "0" * 32, "another session"),
            (file.fileno(), handle.session, "is not shared memory"),
            (unsealed, handle.session, "shared memory that is not sealed"),
        ):
            with pytest.raises(RuntimeError, match=message):
                type(handle)(os.getpid(), fd, session).open()


def test_the_memory_is_this_users_alone_and_cannot_be_resized(channel):
    path = Path(f"/proc/self/fd/{channel.handle.fd}")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(PermissionError):
        os.truncate(path, 0)


def test_readers_and_channels_are_not_pickled(channel, reader):
    for end in (channel, reader):
        with pytest.raises(TypeError, match="expected a WeightHandle"):
            pickle.dumps(end)


def test_a_channel_of_another_version_of_the_package_is_refused(channel):
    [number] = os.pread(channel.handle.fd, 1, 7)
    os.pwrite(channel.handle.fd, bytes([number + 1]), 7)
    with pytest.raises(RuntimeError, match="no channel of this version of fusedrl begins with"):
        channel.handle.open()
    assert channel.readers() == []
