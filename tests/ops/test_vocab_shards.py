"""A vocabulary in shards: parts that combine, and ranks that each hold one."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from prepared import processes
from vocab_ranks import CLASSES, on_a_rank, problem, run, run_loss

from fusedrl import VocabPart, linear_token_log_probs

BOUNDS = [0, 1100, 1107, 2300]  # uneven, one of them less than a tile


def parts_of(hidden, weight, bias, tokens, mask=None, bounds=BOUNDS, **options):
    return [
        VocabPart.of(
            *(hidden, weight[start:end], tokens, mask),
            bias=bias[start:end],
            vocab_offset=start,
            **options,
        )
        for start, end in itertools.pairwise(bounds)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_parts_in_any_order_are_the_whole(dtype, shift, masked):
    hidden, weight, bias, tokens, mask = problem(dtype)
    mask = mask if masked else None
    options = {"shift": shift, "temperature": 0.8, "softcap": 9.0, "scale": 1.5}
    truth = linear_token_log_probs(
        *(hidden.double(), weight.double(), tokens, mask),
        bias=bias.double(),
        entropy=True,
        **options,
    )
    options["entropy"] = True
    for parts in itertools.permutations(parts_of(hidden, weight, bias, tokens, mask, **options)):
        for mine, exact in zip(VocabPart.combine(parts), truth, strict=True):
            torch.testing.assert_close(mine.double(), exact, rtol=1e-6, atol=2e-6)
            assert torch.equal(mine == 0, exact == 0)


@pytest.mark.parametrize("token", [-100, -1, CLASSES, 2**40])
def test_a_token_in_no_shard_has_no_probability(token):
    hidden, weight, bias, tokens, _ = problem()
    whole = VocabPart.combine(parts_of(hidden, weight, bias, tokens, entropy=True))
    wrong = tokens.clone()
    wrong[1, 2] = token
    mine = VocabPart.combine(parts_of(hidden, weight, bias, wrong, entropy=True))
    assert mine.log_probs[1, 2] == -torch.inf
    others = wrong == tokens
    assert torch.equal(mine.log_probs[others], whole.log_probs[others])
    assert torch.equal(mine.entropy, whole.entropy)


def test_a_shard_of_banned_classes_changes_nothing():
    hidden, weight, bias, tokens, _ = problem()
    tokens = tokens % 1100
    without = VocabPart.combine(parts_of(hidden, weight, bias, tokens, bounds=[0, 1100])).log_probs
    bias[1100:] = -torch.inf
    for order in (1, -1):
        parts = parts_of(hidden, weight, bias, tokens)[::order]
        assert torch.equal(VocabPart.combine(parts).log_probs, without)


@pytest.mark.heavy
@pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch has no gloo"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bounds", [[0, 1150, CLASSES], [0, 2290, CLASSES]], ids=["even", "uneven"])
def test_ranks_with_a_shard_each_equal_the_whole(tmp_path: Path, bounds, dtype):
    started = [
        processes.Process(target=on_a_rank, args=(rank, bounds, dtype, str(tmp_path)))
        for rank in (0, 1)
    ]
    try:
        for process in started:
            process.start()
        for process in started:
            process.join(120)
        assert [process.exitcode for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()
    hidden, weight, bias, tokens, mask = problem(dtype)
    upstream = torch.randn(2, *tokens.shape)
    saved = [torch.load(tmp_path / str(rank)) for rank in (0, 1)]
    ranks, losses = zip(*saved, strict=True)
    half = {} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    for i, shift in enumerate((False, True)):
        inputs = (x.double() for x in (hidden, weight, bias))
        values, grads = run(*inputs, upstream, tokens, mask, shift=shift)
        for rank, (start, end) in enumerate(itertools.pairwise(bounds)):
            mine, of_shard = ranks[rank][i]
            for got, exact in zip(mine, values, strict=True):
                torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=2e-6)
            expected = (grads[0], grads[1][start:end], grads[2][start:end], grads[3])
            for got, exact in zip(of_shard, expected, strict=True):
                torch.testing.assert_close(got, exact.to(dtype), **half)
        # Bit by bit: training with a sharded head must not let the copies of the body drift apart.
        assert all(map(torch.equal, ranks[0][i][0], ranks[1][i][0]))
        assert all(torch.equal(ranks[0][i][1][j], ranks[1][i][1][j]) for j in (0, 3))
    whole = run_loss(*(x.double() for x in (hidden, weight, bias)), upstream, tokens, mask)
    for rank, (start, end) in enumerate(itertools.pairwise(bounds)):
        for i, (got, exact) in enumerate(zip(losses[rank], whole, strict=True)):
            exact = exact[start:end] if i % 4 > 1 else exact  # of the weight, of the bias
            torch.testing.assert_close(got, exact.to(got.dtype), **half)
