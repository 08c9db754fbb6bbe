"""Models that several ranks share: fast, with the gradients of one process, and in step."""

from __future__ import annotations

import pytest
import shared_models
from rank_pool import RankPool

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    pool = RankPool(2, tmp_path_factory.mktemp("two"))
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    pool = RankPool(3, tmp_path_factory.mktemp("three"))
    yield pool
    pool.close()


# Each of these compiles for 20 seconds.
WAYS = [
    pytest.param(way, marks=pytest.mark.slow) if "compiled" in way else way
    for way in shared_models.WAYS
]


@pytest.mark.parametrize("way", WAYS)
def test_values_and_gradients_are_those_of_one_process(two, way):
    """Also where a rank keeps nothing. Torch multiplies no row with the head: our kernel does."""
    rows = two.run(shared_models.like_one_process, way, "llama", [0, 1, 2, 3])
    assert all(rows) if way == "fsdp1" else rows == [0, 0]


@pytest.mark.parametrize("way", ["ddp", "ddp, adapters", "fsdp"])
def test_rows_of_one_rank_share_their_beginnings(two, way):
    """Not so with FSDP, where trying a model takes all ranks."""
    shared = 3 * 44 if way == "fsdp" else 32 + 3 * 12
    assert two.run(shared_models.rows_of_one_rank, way) == [shared, 3 * 44]


def test_tied_weights_in_a_group_with_the_norm(two):
    two.run(shared_models.like_one_process, "fsdp", "qwen2", [0, 1])


@pytest.mark.parametrize("kind", ["qwen2", "gemma2"])  # tied, and with a softcap
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_three_ranks(three, kind, way):
    rows = three.run(shared_models.like_one_process, way, kind, [0, 1, 4])
    assert rows == [0, 0, 0]


def test_experts(two):
    assert two.run(shared_models.like_one_process, "fsdp", "mixtral", [0, 1, 2]) == [0, 0]


def test_a_killed_rank_ends_the_wait_of_others(tmp_path):
    pool = RankPool(2, tmp_path)
    try:
        pool.send(shared_models.meets_a_dead_rank)
        text, error = pool.answer(0)
        assert text is None and error
    finally:
        pool.close()


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "count"), [("two", 1000), ("three", 200)])
def test_many_batches(request, ranks, count):
    pool = request.getfixturevalue(ranks)
    for first in range(0, count, 100):
        seeds = list(range(first, first + 100))
        pool.run(shared_models.like_one_process, "fsdp", "llama", seeds)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_ranks_with_parts_of_a_head(two, three, kind):
    assert two.run(shared_models.parts_of_a_head, kind) == [0, 0]
    assert three.run(shared_models.parts_of_a_head, kind) == [0, 0, 0]  # 34, 34 and 32 classes


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_gradients_that_accumulate(two, way):
    two.run(shared_models.accumulates, way)


def test_checkpoints_that_take_one_pass(two):
    """Torch's own forward is one: several bring a weight's gradient several times."""
    for text in two.run(shared_models.reentrant_checkpoints):
        assert "multiple reentrant backward passes" in text


def test_a_call_of_one_rank_is_told_from_that_of_others(two):
    """Ranks that do not make the same call have an error, and one that waits says so."""
    told = "RuntimeError: model: expected the same calls in the same order on every rank, got"
    for rank, (said, logged) in enumerate(two.run(shared_models.call_of_one_rank)):
        gradients = "log-probs with gradients" if rank else "log-probs without gradients"
        other, after = said
        assert other.startswith(f"{told} {gradients} as call 1") and after == ""
        assert rank == 1 or "rank 0: waited" in logged[0]


@pytest.mark.parametrize(
    ("way", "places"),
    [("ddp", "tokens layer head"), ("fsdp", "tokens head"), ("fsdp, head", "head")],
)
def test_an_error_of_a_rank_is_an_error_of_all(two, way, places):
    """DDP's forward has no collectives; FSDP gathers none after those of the head."""
    own = {
        "tokens": "ValueError: tokens: expected ids in [0, 100)",
        "layer": "OutOfMemoryError: no room for a layer",
        "head": "OutOfMemoryError: no room for the logits",
    }
    told = "RuntimeError: model: expected the call to succeed on every rank, got an error on rank"
    for place in places.split():
        first, second = two.run(shared_models.errors_within, way, place)
        assert first[0].startswith(own[place]) and first[1].startswith(f"{told} 1;")
        assert second[0].startswith(f"{told} 0;") and second[1].startswith(own[place])


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_all_ranks_take_the_way_of_the_slowest(two, way):
    found = [False, False, True, False, True, False, True]
    assert two.run(shared_models.differs_on_one_rank, way) == [found] * 2
