"""Locks that another thread holds when a process is forked."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
from channel_collector import Says, policy_of
from counting_dialogs import Counting

from fusedrl import LLMCollector
from fusedrl.forks import free_in_children
from fusedrl.weights.worker_channels import _Calls


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


@pytest.mark.parametrize("make", [threading.Lock, threading.RLock])
def test_a_lock_is_free_in_a_child(make):
    lock, plain = free_in_children(make()), make()
    assert succeeds_in_a_child(lambda: lock.acquire(blocking=False), lock)
    assert not succeeds_in_a_child(lambda: plain.acquire(blocking=False), plain)


def test_a_child_counts_versions():
    collector = LLMCollector(
        Counting(), policy=policy_of(Says()), dialog_turns_per_batch=2, track_policy_version=True
    )

    def count() -> bool:
        free = collector._update.counting.acquire(blocking=False)
        collector._update.counting.release()
        collector.increment_version()
        return free and collector.policy_version == 1

    assert succeeds_in_a_child(count, collector._update.counting)


def test_a_child_calls_a_policy_that_follows_a_channel():
    calls = _Calls({}, shared=False)
    assert succeeds_in_a_child(lambda: calls._lock.acquire(blocking=False), calls._lock)
