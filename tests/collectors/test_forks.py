"""Collectors in a process that is forked while another thread holds their locks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
from async_workers import Loading
from channel_collector import Says, policy_of
from counting_dialogs import Counting

from fusedrl import AsyncCollector, LLMCollector


def succeeds_in_a_child(check: Callable[[], bool], held: Any) -> bool:
    """What a function returns in a process that is forked while a thread holds a lock."""
    holding, over = threading.Event(), threading.Event()

    def hold() -> None:
        with held:
            holding.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    holding.wait()
    child = os.fork()
    if not child:
        os._exit(0 if check() else 1)
    over.set()
    thread.join()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_child_counts_versions():
    collector = LLMCollector(
        Counting(), policy=policy_of(Says()), dialog_turns_per_batch=2, track_policy_version=True
    )

    def count() -> bool:
        free = collector._versions._counting.acquire(blocking=False)
        collector._versions._counting.release()
        collector.increment_version()
        return free and collector.policy_version == 1

    assert succeeds_in_a_child(count, collector._versions._counting)


def test_a_child_collects():
    """Another thread of the parent was making a batch."""
    collector = LLMCollector(Counting(), policy=policy_of(Says()), dialog_turns_per_batch=2)
    collector.next()

    def collect() -> bool:
        free = collector._stream.taking.acquire(blocking=False)
        return free and collector.next().numel() == 2

    assert succeeds_in_a_child(collect, collector._stream.taking)


@pytest.mark.usefixtures("forked")
def test_a_child_shuts_down_what_is_not_its_own():
    with AsyncCollector(Loading, frames_per_batch=4, prefetch=0) as collector:

        def end() -> bool:
            collector.shutdown()
            return collector.closed

        assert succeeds_in_a_child(end, collector._ending)
        assert collector.next().shape == (4,)
