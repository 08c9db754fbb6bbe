"""Messages between a trainer and its worker, and what is told of an exception."""

from __future__ import annotations

import multiprocessing
import pickle
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from async_workers import NoException, Odd, Unsendable, Unspeakable

from fusedrl.collectors.process import process_tree
from fusedrl.collectors.process.wire import Wire
from fusedrl.collectors.process.worker_errors import Failure

BIG = b"x" * 3_000_000  # far more than a socket holds
LONG_S = 200.0  # what a broken test waits


@pytest.fixture
def wires() -> Iterator[tuple[Wire, Wire]]:
    pair = [Wire(end) for end in socket.socketpair()]
    yield pair[0], pair[1]
    for wire in pair:
        wire.hang_up()
        wire.close()


def in_threads(*targets: Any) -> None:
    threads = [threading.Thread(target=target, daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()


def test_messages_of_several_threads_do_not_mix(wires):
    ours, theirs = wires
    got: list[Any] = []

    def send(name: int) -> None:
        for number in range(20):
            ours.send((name, number, bytes([name]) * 100_000))

    def receive() -> None:
        got.extend(theirs.receive() for _ in range(60))

    in_threads(*[lambda name=name: send(name) for name in range(3)], receive)
    for name in range(3):
        own = [(number, data) for one, number, data in got if one == name]
        assert own == [(number, bytes([name]) * 100_000) for number in range(20)]


def test_big_messages_in_both_directions_at_once(wires):
    got: list[Any] = []

    def send(wire: Wire) -> None:
        for _ in range(5):
            wire.send(BIG)

    def receive(wire: Wire) -> None:
        got.extend(wire.receive() for _ in range(5))

    in_threads(*[lambda do=do, wire=wire: do(wire) for wire in wires for do in (send, receive)])
    assert got == [BIG] * 10


def test_what_was_said_before_the_end_is_heard(wires):
    ours, theirs = wires
    ours.send("last")
    ours.close()
    assert theirs.receive() == "last" and theirs.receive() is None


def test_hanging_up_ends_a_thread_that_sends_to_nobody(wires):
    ours, _ = wires
    seen: list[Exception] = []

    def send() -> None:
        try:
            ours.send(BIG)
        except OSError as error:
            seen.append(error)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    ours.hang_up()
    thread.join(LONG_S)
    assert seen


@pytest.mark.parametrize("said", [b"", b"\0" * 3, struct.pack("!Q", 100) + b"half"])
def test_half_a_message_of_a_dead_process_is_not_waited_for(wires, said):
    """Its end of the pair stays open: processes that it has started may hold it."""
    ours, theirs = wires
    process = multiprocessing.get_context("fork").Process(
        target=theirs._socket.sendall, args=(said,)
    )
    process.start()
    assert ours.receive(process) is None
    process.join()


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (LookupError("lost"), LookupError, "LookupError: lost"),
        (Odd("odd", 1), RuntimeError, "Odd: odd"),
        (NoException("what happened"), RuntimeError, "NoException: what happened"),
        (Unsendable("what happened"), RuntimeError, "Unsendable: what happened"),
        (Unspeakable("what happened"), Unspeakable, "Unspeakable"),
        (SystemExit(3), RuntimeError, "SystemExit: 3"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_an_exception_arrives_whatever_it_is(error, kind, told):
    try:
        raise error
    except BaseException as raised:
        failure = pickle.loads(pickle.dumps(Failure.of(raised)))
    arrived = failure.exception()
    assert type(arrived) is kind
    text = str(arrived.__cause__)
    assert text.count("Traceback") == 1 and told in text and __name__.split(".")[-1] in text
    if kind is RuntimeError:
        assert told in str(arrived)


def test_descendants_are_those_of_children_too():
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def child() -> None:
        grandchild = context.Process(target=time.sleep, args=(LONG_S,))
        grandchild.start()
        theirs.send(grandchild.pid)
        grandchild.join()

    process = context.Process(target=child)
    process.start()
    grandchild = ours.recv()
    assert {process.pid, grandchild} <= set(
        process_tree.descendants(multiprocessing.current_process().pid)
    )
    assert process_tree.descendants(process.pid) == [grandchild] and not process_tree.is_stopped(
        grandchild
    )
    process_tree.send(9, [process.pid, grandchild])
    process.join()
