"""Collectors in a process that is forked while another thread holds their locks."""

from __future__ import annotations

import pytest
from async_workers import Loading
from channel_collector import Says, policy_of
from children import held_by_another_thread, in_child
from counting_dialogs import Counting

from fusedrl import AsyncCollector, LLMCollector


def test_a_child_counts_versions():
    collector = LLMCollector(
        Counting(), policy=policy_of(Says()), dialog_turns_per_batch=2, track_policy_version=True
    )

    def count() -> None:
        free = collector._versions._counting.acquire(blocking=False)
        collector._versions._counting.release()
        collector.increment_version()
        assert free and collector.policy_version == 1

    with held_by_another_thread(collector._versions._counting):
        assert in_child(count) == 0


def test_a_child_collects():
    """Another thread of the parent was making a batch."""
    collector = LLMCollector(Counting(), policy=policy_of(Says()), dialog_turns_per_batch=2)
    collector.next()

    def collect() -> None:
        free = collector._stream.taking.acquire(blocking=False)
        assert free and collector.next().numel() == 2

    with held_by_another_thread(collector._stream.taking):
        assert in_child(collect) == 0


@pytest.mark.usefixtures("forked")
def test_a_child_shuts_down_what_is_not_its_own():
    with AsyncCollector(Loading, frames_per_batch=4, prefetch=0) as collector:

        def end() -> None:
            collector.shutdown()
            assert collector.closed

        with held_by_another_thread(collector._ending):
            assert in_child(end) == 0
        assert collector.next().shape == (4,)
