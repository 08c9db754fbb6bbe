"""Releases that wait for a GPU, from wherever they come."""

from __future__ import annotations

import threading
import time
import weakref

from fusedrl.channel.cuda import Releases


def until(condition) -> bool:
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


class Held:
    """What tells that it is dropped, as the lease of a slot does."""

    def __init__(self, slot: int, released: list[int]) -> None:
        weakref.finalize(self, released.append, slot)


def test_slots_are_released_when_their_computation_has_ended():
    released, ended = [], threading.Event()
    releases = Releases()
    releases.add(Held(0, released), lambda: True)
    releases.add(Held(1, released), ended.is_set)
    assert released == [0]
    ended.set()
    assert until(lambda: released == [0, 1])


def test_what_is_released_while_others_are_polled_is_not_lost():
    """As the garbage collector does it, when it finds a lease in the polling thread."""
    released, ended = [], threading.Event()
    releases = Releases()
    once = iter([True])

    def polled() -> bool:
        if next(once, False):
            releases.add(Held(2, released), ended.is_set)
        return ended.is_set()

    polls = iter([False])  # the first is of the thread that adds
    releases.add(Held(1, released), lambda: next(polls, True) and polled())
    time.sleep(0.05)
    ended.set()
    assert until(lambda: sorted(released) == [1, 2])
