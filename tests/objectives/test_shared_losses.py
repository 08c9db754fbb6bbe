"""Losses of the ranks that share a policy: the gradients of one process, in step."""

from __future__ import annotations

from typing import Any

import pytest
import shared_losses
from rank_pool import RankPool

pytestmark = pytest.mark.heavy

LOSSES: list[tuple[str, dict[str, Any]]] = [
    ("GRPOLoss", {}),
    ("GRPOLoss", {"aggregation": "prompt_mean"}),
    ("DAPO", {"entropy_bonus": False}),
    ("CISPOLoss", {"kl_to_ref_coeff": 0.1, "kl_to_inference_coeff": 0.2}),
    ("GRPOLoss", {"kl_mask_threshold": 0.05}),
]


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


@pytest.mark.parametrize("empty", [-1, 1])
@pytest.mark.parametrize(("name", "options"), LOSSES)
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_ranks_average_their_losses(two, way, name, options, empty):
    arguments = way, name, options, False, 40, empty
    assert two.run(shared_losses.like_one_process, *arguments) == [0, 0]


@pytest.mark.parametrize("empty", [-1, 0])
@pytest.mark.parametrize(("name", "options"), LOSSES)
def test_means_over_the_tokens_of_all_ranks(two, name, options, empty):
    arguments = "fsdp", name, options, True, None, empty
    assert two.run(shared_losses.like_one_process, *arguments) == [0, 0]


def test_means_over_the_tokens_of_three_ranks(three):
    for name, options in LOSSES[1:3]:
        arguments = "ddp", name, options, True, None, 2
        assert three.run(shared_losses.like_one_process, *arguments) == [0, 0, 0]


def test_what_has_no_mean_is_refused(two):
    arguments = "fsdp", "GRPOLoss", {"aggregation": "none"}, True, None
    with pytest.raises(AssertionError, match="average_tokens_across_devices: expected a loss with"):
        two.run(shared_losses.like_one_process, *arguments)


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_an_error_of_a_rank_is_an_error_of_all(two, way):
    """Also one that torchrl raises behind the forward passes. The next call is right."""
    first, second = two.run(shared_losses.errors, way)
    told = (
        "RuntimeError: model: expected the call to succeed on every rank, got an error on rank 1;"
    )
    expected = [text for spoils in shared_losses.SPOILS.values() for _, text in spoils]
    assert all(text.startswith(told) for text in first)
    pairs = zip(second, expected, strict=True)
    assert not [pair for pair in pairs if not pair[0].startswith(pair[1])]


def test_an_interrupt_anywhere_is_an_error_of_all(two, three):
    for seed in range(2):
        two.run(shared_losses.errors_anywhere, seed, 12)
        three.run(shared_losses.errors_anywhere, seed, 12)


def test_wrappers_that_score_in_two_ways_are_an_error_of_all(two):
    first, second = two.run(shared_losses.wrappers_that_differ)
    assert first.startswith(
        "OtherRankFallsBack: model: expected data that all ranks score in the same"
    )
    assert "got an error on rank 0;" in second


def test_torchrl_computes_on_all_ranks_or_on_none(two):
    two.run(shared_losses.torchrl_computes)


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_penalties(two, way):
    two.run(shared_losses.penalties, way)


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", ["SFTLoss", "DistillationLoss"])
def test_supervised_losses(two, way, name):
    assert two.run(shared_losses.supervised, way, name) == [0, 0]
