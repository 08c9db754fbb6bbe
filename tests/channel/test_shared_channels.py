"""Ranks that publish a sharded model: one outcome for all, in bounded time, a tensor at a time."""

from __future__ import annotations

import pytest
import shared_channels
from rank_pool import RankPool

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    pool = RankPool(3, tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    pool = RankPool(2, tmp_path_factory.mktemp("two"))
    yield pool
    pool.close()


def test_all_ranks_publish_and_the_first_has_the_slots(ranks):
    first, *others = ranks.run(shared_channels.publishes, None, "qwen2")
    assert first == [1, 1, 7, 7, "cpu", 8, (8, {2.0})]
    assert others == [[1, 1, 7, 8, None]] * len(others)


def test_every_rank_that_holds_slots_gets_each_version(ranks):
    *others, last = ranks.run(shared_channels.publishes, [1, len(ranks.workers) - 1], "llama")
    assert last == [1, 1, 7, 7, "cpu", 8, (8, {2.0})]
    assert others[0] == [1, 1, 7, 8, None]


def test_a_timeout_is_one_of_all_ranks(ranks):
    first, *others = ranks.run(shared_channels.without_a_slot)
    for error, *after in (first, *others):
        assert after == [3, 3]
        assert "TimeoutError: timeout: expected a free slot within 0.0 s, got none of 2" in error
    assert all(
        error.startswith("TimeoutError: ranks: expected every rank to succeed, got on rank 0: ")
        for error, *_ in others
    )


def test_a_rank_alone_learns_which_ranks_did_not_come(ranks):
    first, *others = ranks.run(shared_channels.alone)
    created, in_time, published, too, version = first
    late = ", ".join(str(rank) for rank in range(1, len(ranks.workers)))
    for error in (created, published):
        assert error.startswith("TimeoutError: ranks: expected all of [0, 1")
        assert f"to make this call within 1.0 s, got none from rank {late}; make it" in error
    assert in_time and too and version == 1
    assert others == [first] * len(others)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_a_rank_is_one_of_all_and_publishes_nothing(two, rank):
    found = two.run(shared_channels.errors, rank)
    calls = "ValueError: ranks: expected the same call on all ranks, got rank 0: publish "
    assert all(said.pop(0).startswith(calls) for said in found)
    told = f"RuntimeError: ranks: expected every rank to succeed, got on rank {rank}: "
    wrong = "ValueError: weights: ", "TypeError: version: ", "ValueError: timeout: "
    for text in wrong:
        assert found[rank].pop(0).startswith(text)
        assert found[1 - rank].pop(0).startswith(told + text)
    assert [said.pop(0) for said in found] == [7, 7]  # the larger of two numbers
    refused = [said.pop(0) for said in found]
    assert refused[rank].startswith("ValueError: version: expected more than the published 7")
    assert refused[1 - rank].startswith(told + "ValueError: version: ")
    failed = [said.pop(0) for said in found]  # after the slot is written
    assert failed[rank].startswith("ValueError: invalid literal")
    assert failed[1 - rank].startswith(told + "ValueError: invalid literal")
    for call, published in found:
        assert call.startswith("ValueError: ranks: expected the same call on all ranks, got rank 0")
        assert published == 8


def test_channels_that_do_not_fit_are_refused_on_all_ranks(two):
    first, second = two.run(shared_channels.layouts)
    for name in ("slots", "dtype", "max_readers", "rank_timeout"):
        text = second.pop(0)
        assert text.startswith(f"ValueError: {name}: ") and text in first.pop(0)
    for layout, slots, count, version in (first, second):
        assert layout.startswith("ValueError: ranks: expected the same call on all ranks, got rank")
        assert slots.startswith("ValueError: holds: expected True on one of the ranks [0, 1]")
        assert count.startswith("ValueError: slots: expected 2 to 64") and version == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_takes_effect_when_all_ranks_have_published(two, rank):
    found = two.run(shared_channels.interrupted, rank)
    assert found[rank] == ["KeyboardInterrupt: ", 1, 2]
    assert found[1 - rank] == [1, 1, 2]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_wait_of_the_others(tmp_path, rank):
    pool = RankPool(2, tmp_path)
    try:
        pool.send(shared_channels.killed, rank)
        text, (error, version) = pool.answer(1 - rank)
        assert text is None and "Error" in error and version is None
    finally:
        pool.close()


def test_no_rank_has_the_whole_model_beside_the_slot(two):
    """A gathered tensor and gloo's own of it; 16 of them are a model.

    A thread of gloo drops the tensors of a collective after it has told that it is done, so that
    those of the last one may still be there.
    """
    for rank, (extra, tensor, slot) in enumerate(two.run(shared_channels.peak, 1024)):
        assert tensor < extra <= 4 * tensor + (slot if rank == 0 else 0)


def test_a_scheme_publishes_where_other_ranks_do(two):
    (first, second, (version, numbers)), others = two.run(shared_channels.updates_of_a_collector)
    *others, refused = others
    assert [first, second] == others == [1, 2] and version == 2 and len(numbers) > 1
    assert refused.startswith("ValueError: channel: expected one with slots")
