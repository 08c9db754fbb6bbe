"""What is told of an exception, and messages of any size."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import socket
import time

import pytest
from async_workers import Odd, Unspeakable
from shared_batch_workers import open_files

from fusedrl.collectors.process.messages import PACKET, pickled, post, receive, unpickled
from fusedrl.collectors.process.worker import Job
from fusedrl.collectors.process.worker_handle import WorkerHandle


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (LookupError("lost"), LookupError, "LookupError: lost"),
        (Odd("odd", 1), RuntimeError, "Odd: odd"),
        (Unspeakable("what happened"), Unspeakable, "Unspeakable"),
        (SystemExit(3), RuntimeError, "SystemExit: 3"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_an_exception_arrives_whatever_it_is(error, kind, told):
    try:
        raise error
    except BaseException as raised:
        arrived = unpickled(pickled(raised))
    assert type(arrived) is kind
    text = str(arrived.__cause__)
    assert text.count("Traceback") == 1 and told in text and __name__.split(".")[-1] in text
    if kind is RuntimeError:
        assert told in str(arrived)


@pytest.mark.parametrize("has_file", [False, True])
def test_a_message_arrives_whatever_its_size(tmp_path, has_file):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    (tmp_path / "file").write_text("told")
    files = open_files()
    descriptor = os.open(tmp_path / "file", os.O_RDONLY) if has_file else None
    few = PACKET - len(pickle.dumps(("call", bytes(PACKET)))) + PACKET
    assert len(pickle.dumps(("call", bytes(few)))) == PACKET
    sizes = [0, few, few + 1, 10 * PACKET, 10_000_000]
    for size in sizes:
        post(ours, "call", bytes(size), descriptor=descriptor)
    if descriptor is not None:
        os.close(descriptor)
    ours.close()
    for size in sizes:
        message, arrived = receive(theirs)
        assert message == ("call", bytes(size)) and (arrived is not None) == has_file
        if arrived is not None:
            assert not os.get_inheritable(arrived)
            assert os.pread(arrived, 10, 0) == b"told"
            os.close(arrived)
    with pytest.raises(EOFError):
        receive(theirs)
    assert open_files() == files - 1
    theirs.close()


def test_a_full_socket_takes_no_part_of_a_message():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sent = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            post(ours, sent, flags=socket.MSG_DONTWAIT)
            sent += 1
    ours.close()
    assert [receive(theirs)[0] for _ in range(sent)] == [(n,) for n in range(sent)]
    with pytest.raises(EOFError):
        receive(theirs)
    theirs.close()


def test_a_thread_that_begins_after_ctrl_c_waits_for_the_worker():
    context = multiprocessing.get_context("fork")
    handle = WorkerHandle(context, Job(dict, [], None))
    handle.process = context.Process(target=time.sleep, args=(0.2,))
    handle.process.start()
    handle._worker_socket.close()
    handle.stop(10)
    handle._run()  # what the thread runs
    assert handle.process.exitcode == 0
