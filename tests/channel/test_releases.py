"""Releases that wait for a GPU, from wherever they come."""

from __future__ import annotations

import threading
import time

from fusedrl.channel.releases import Releases


def until(condition) -> bool:
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def test_slots_are_released_when_their_computation_has_ended():
    released, ended = [], threading.Event()
    releases = Releases(released.append)
    releases.add(0, None)
    releases.add(1, ended.is_set)
    assert released == [0]
    ended.set()
    assert until(lambda: released == [0, 1])


def test_what_is_released_while_others_are_polled_is_not_lost():
    """As the garbage collector does it, when it finds a lease in the polling thread."""
    released, ended = [], threading.Event()
    releases = Releases(released.append)
    once = iter([True])

    def polled() -> bool:
        if next(once, False):
            releases.add(2, ended.is_set)
        return ended.is_set()

    polls = iter([False])  # the first is of the thread that adds
    releases.add(1, lambda: next(polls, True) and polled())
    time.sleep(0.05)
    ended.set()
    assert until(lambda: sorted(released) == [1, 2])
