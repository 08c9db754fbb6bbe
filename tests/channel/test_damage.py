"""Readers and publishers of a channel whose control page something else has written to."""

from __future__ import annotations

import os
import struct

import channel_workers as workers
import pytest
from channel_workers import publish
from damage_workers import (
    CLOSED,
    ENTRIES,
    ENTRY,
    HEADER,
    MANIFEST,
    PUBLISHED,
    SLOT,
    SLOTS,
    edit_at_random,
    memory,
)

from fusedrl import _host
from fusedrl.channel import WeightChannel
from fusedrl.channel.memory import Manifest

DAMAGED = "expected its control page as fusedrl wrote it, got"


def word(version: int, slot: int) -> bytes:
    return struct.pack("<Q", version << 8 | slot + 1)


@pytest.fixture
def page(channel):
    publish(channel)
    publish(channel)
    with memory(channel) as page:
        yield page


def test_the_page_is_where_these_tests_write(channel, page):
    publish(channel, 77)
    magic, session, pid, slots, nbytes, readers, manifest, _ = HEADER.unpack_from(page)
    assert (magic[:7], session.decode()) == (b"fusedrl", channel.handle.session)
    assert (pid, slots, nbytes, readers) == (os.getpid(), 3, channel.layout.nbytes, 256)
    [published] = struct.unpack_from("<Q", page, PUBLISHED)
    slot = (published & 255) - 1
    assert published >> 8 == 77
    assert struct.unpack_from("<Iq", page, SLOTS + SLOT * slot + 4)[0] == 0
    assert struct.unpack_from("<q", page, SLOTS + SLOT * slot + 8) == (77,)
    with channel.handle.open(), channel.handle.open() as reader, reader.lease():
        assert struct.unpack_from("<QQq", page, ENTRIES + ENTRY) == (os.getpid(), 1 << slot, 77)
    start = ENTRIES + 256 * ENTRY
    start += -start % 4096
    assert Manifest.of(page[start : start + manifest]).layout == channel.layout


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        (word(2, 63), "slot 63 of 3 under version 2"),
        (word(2, 64), "slot 64 of 3"),
        (word(2, 254), "slot 254 of 3"),
        (word(2, -1), "slot -1 of 3"),
        (word(2, 0), "version 2 as published in slot 0, which does not hold it"),
        (word(5, 1), "version 5 as published in slot 1, which does not hold it"),
        (b"\xff" * 8, "slot 254 of 3"),
        (word(2**56 - 1, 1), "version 72057594037927935"),
        (word(1, 0), "version 1 as published after 2"),
        (bytes(8), "version -1 as published after 2"),
    ],
)
def test_a_damaged_published_word_is_an_error_at_once(channel, reader, page, damaged, message):
    assert reader.version == 2
    page[PUBLISHED : PUBLISHED + 8] = damaged
    with channel.handle.open() as fresh:
        for end in (reader, fresh):
            if end is fresh and "after 2" in message:
                continue  # all that a new reader can know fits
            for read in (end.lease, lambda end=end: end.version, lambda end=end: end.wait_for(9)):
                with pytest.raises(_host.DamagedError, match=f"{DAMAGED}.*{message}"):
                    read()
    for call in (lambda: publish(channel, 9), lambda: channel.version, channel.wait_applied):
        with pytest.raises(RuntimeError, match=f"{DAMAGED} the published word"):
            call()


@pytest.mark.parametrize("field", [0, 8])
def test_a_damaged_slot_is_an_error_at_once(channel, reader, page, field):
    page[SLOTS + SLOT + field] ^= 3
    with pytest.raises(_host.DamagedError, match="published in slot 1, which does not hold it"):
        reader.lease()


def test_a_published_slot_that_somebody_locks_is_an_error_at_once(channel, reader):
    publish(channel)
    channel._end.commit(0, 5, 0)  # published once more, with nothing in it
    code = """
import fcntl, os, struct
file = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
fcntl.fcntl(file, 37, struct.pack("hhqqi", fcntl.F_WRLCK, 0, 1, 1, 0))  # F_OFD_SETLK
"""
    scope = {"pid": os.getpid(), "fd": channel.handle.fd}
    exec(code, scope)
    try:
        with pytest.raises(_host.DamagedError, match="in slot 0, which is locked for writing"):
            reader.lease()
    finally:
        os.close(scope["file"])


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, 2**22 + 1, "pid 4194305 in reader entry 0"),
        (0, (2**32 - 1) << 32, "pid 4294967295 in reader entry 0"),
        (8, 1 << 3, "leases of slots beyond the last in reader entry 0"),
        (16, 3, "version 3 applied by reader entry 0, of 2 published"),
        (16, 2**64 - 9, "version -9 applied"),
    ],
)
def test_a_damaged_entry_of_a_reader_is_an_error(channel, reader, page, offset, value, message):
    reader.lease().release()
    page[ENTRIES + offset : ENTRIES + offset + 8] = struct.pack("<Q", value)
    for look in (channel.readers, channel.wait_applied):
        with pytest.raises(_host.DamagedError, match=f"{DAMAGED}.*{message}"):
            look()


def test_a_damaged_mark_of_the_end_is_an_error(channel, reader, page):
    page[CLOSED] = 9
    with pytest.raises(_host.DamagedError, match="mark 9 of a channel's end"):
        reader.wait_for(3)


def test_what_is_damaged_after_a_reader_checked_it_changes_nothing_for_that_reader(
    channel, reader, page
):
    page[40 : HEADER.size] = bytes(HEADER.size - 40)
    for _ in range(4):
        version = publish(channel)
        with reader.lease() as lease:
            assert workers.version_in(lease.weights) == lease.version == version
    assert [r.pid for r in channel.readers()] == [os.getpid()]
    with pytest.raises(_host.DamagedError, match="sizes that do not add up"):
        channel.handle.open()


@pytest.mark.parametrize("offset", [40, MANIFEST, MANIFEST + 300])
def test_a_damaged_header_or_description_does_not_fit_its_digest(offset):
    with WeightChannel.create(workers.weights_of(0), max_readers=4) as channel:
        with memory(channel) as page:
            page[offset] ^= 1
        for _ in range(9):  # a reader that failed has no entry: there are four
            with pytest.raises(_host.DamagedError, match=f"{DAMAGED} .*(digest|sizes)"):
                channel.handle.open()


def test_memory_that_somebody_may_shrink_is_not_opened(channel):
    fd = os.memfd_create("other")
    os.truncate(fd, 1 << 20)
    try:
        with pytest.raises(RuntimeError, match="shared memory that is not sealed"):
            type(channel.handle)(os.getpid(), fd, channel.handle.session).open()
    finally:
        os.close(fd)


def test_edits_at_random_neither_crash_nor_hang_nor_pass_for_weights():
    with workers.process(edit_at_random, 13, 300) as (child, pipe):
        assert pipe.poll(120), f"it hangs, or ended with {child.exitcode}"
        assert pipe.recv() > 300
        child.join()
        assert child.exitcode == 0
