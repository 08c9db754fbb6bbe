"""importance_weights: levels, modes, masked, missing and infinite values, representations."""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from types import SimpleNamespace

import pytest
import torch
from accuracy import no_worse

from fusedrl import Mismatch, importance_weights
from fusedrl.ops.importance_weights import LEVELS, MODES

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INF, NAN = float("inf"), float("nan")
LARGEST = math.exp(20)


def ragged(lengths, dtype=torch.float32, gap=0.3):
    """Log-probs, those of a rollout that lies a gap apart, a mask and offsets."""
    count = sum(lengths)
    rollout = -3 * torch.rand(count)
    log_probs = rollout + gap * torch.randn(count)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    return log_probs.to(dtype), rollout.to(dtype), torch.rand(count) < 0.8, offsets


def textbook(p, q, mask, offsets, level, mode, low, high):
    """Weights and statistics as papers write them, a sequence at a time, in the dtype of ``p``."""
    weights, statistics = torch.zeros_like(p), []
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        kept = mask[begin:end]
        d = (p - q)[begin:end][kept]
        of_level = {
            "token": lambda d: d,
            "sequence": lambda d: d.sum().expand_as(d),
            "geometric": lambda d: d.mean().expand_as(d),
        }[level](d)
        ratio = of_level.exp()
        outside = (ratio < low) | (ratio > high)
        w = ratio.clamp(low, high) if mode == "truncate" else ratio.masked_fill(outside, 0)
        weights[begin:end][kept] = w
        n = max(len(d), 1)
        statistics.append(
            {
                "tokens": len(d),
                "k1": float(-d.sum() / n),
                "k3": float((torch.expm1(d) - d).sum() / n),
                "ess": float(w.sum() ** 2 / (w * w).sum()) if w.any() else 0.0,
                "max_ratio": float(ratio.max()) if len(d) else 0.0,
                "clipped": float(outside.sum() / n),
            }
        )
    return weights, statistics


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
def test_no_worse_than_torch_in_float32(dtype, level, mode):
    """Of sequences from one token to many, with an empty one."""
    p, q, mask, offsets = ragged([1500, 0, 1, 17, 700], dtype, gap=0.05)
    options = {"level": level, "mode": mode, "low": 0.9, "high": 1.25}
    ours = importance_weights(p, q, mask, offsets=offsets, **options)
    work = torch.promote_types(dtype, torch.float32)
    assert ours.weights.dtype == work
    # Where a bound itself is rounded is not the question.
    bounds = [float(torch.tensor(options[key], dtype=work)) for key in ("low", "high")]
    truth, statistics = textbook(p.double(), q.double(), mask, offsets, level, mode, *bounds)
    theirs, _ = textbook(p.to(work), q.to(work), mask, offsets, level, mode, *bounds)
    no_worse(ours.weights, theirs, truth, 3e-7)
    for name in statistics[0]:
        expected = torch.tensor([of_sequence[name] for of_sequence in statistics])
        found = getattr(ours.mismatch, name)
        torch.testing.assert_close(found.float(), expected.float(), rtol=3e-6, atol=1e-7, msg=name)
    clipped = ours.mismatch.clipped_tokens.sum()
    assert 0 < clipped < mask.sum() or level == "geometric"


def test_total_is_of_all_tokens_together():
    p, q, mask, offsets = ragged([300, 0, 5, 90])
    mismatch = importance_weights(p, q, mask, offsets=offsets, high=1.2).mismatch
    one = importance_weights(p, q, mask, offsets=torch.tensor([0, 395]), high=1.2).mismatch
    total = mismatch.total()
    for name in (*Mismatch._fields, "k1", "k3", "ess", "clipped"):
        torch.testing.assert_close(getattr(total, name), getattr(one, name)[0])
    assert total.tokens.shape == () and total.tokens == mask.sum()


def test_bounds_are_part_of_what_is_kept():
    ratio = torch.tensor([0.25, 0.5, 1.0, 2.0, 4.0])
    p, q = ratio.log(), torch.zeros(5)
    ratio = importance_weights(p, q, high=None).weights
    bounds = {"low": float(ratio[1]), "high": float(ratio[3])}
    masked, of_masked = importance_weights(p, q, mode="mask", **bounds)
    assert masked.tolist() == [0.0, *ratio[1:4].tolist(), 0.0]
    truncated, of_truncated = importance_weights(p, q, **bounds)
    assert truncated.tolist() == [ratio[1], *ratio[1:4], ratio[3]]
    assert of_masked.clipped.tolist() == of_truncated.clipped.tolist() == [pytest.approx(0.4)]
    assert of_masked.max_ratio == of_truncated.max_ratio == ratio[4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_infinite_log_probs(dtype):
    p = torch.tensor([-INF, -1.0, -INF, 0.0, -900.0], dtype=dtype)
    q = torch.tensor([-1.0, -INF, -INF, -900.0, 0.0], dtype=dtype)
    largest = pytest.approx(LARGEST, rel=1e-6)
    free = importance_weights(p, q, high=None).weights.tolist()
    assert free[:2] == [0.0, largest] and math.isnan(free[2]) and free[3:] == [largest, 0.0]
    weights = importance_weights(p, q, low=0.5).weights.tolist()
    assert weights[:2] == [0.5, 2.0] and math.isnan(weights[2]) and weights[3:] == [2.0, 0.5]
    weights = importance_weights(p, q, mode="mask").weights.tolist()
    assert weights[:2] == [0.0, 0.0] and math.isnan(weights[2]) and weights[3:] == [0.0, 0.0]
    offsets = torch.tensor([0, 1, 2, 3, 5])
    options = {"offsets": offsets, "level": "sequence", "high": None}
    weights, mismatch = importance_weights(p, q, **options)
    assert weights[:2].tolist() == [0.0, largest]
    assert weights[2].isnan() and weights[3:].tolist() == [1.0, 1.0]
    assert mismatch.k1[:2].tolist() == [INF, -INF]
    assert mismatch.k3[:2].tolist() == [INF, INF]


def test_a_nan_propagates_to_what_has_its_ratio():
    p, q = torch.zeros(6), torch.zeros(6)
    p[1] = NAN
    offsets = torch.tensor([0, 3, 6])
    for level, expected in (("token", [1]), ("sequence", [0, 1, 2]), ("geometric", [0, 1, 2])):
        for mode in MODES:
            options = {"level": level, "mode": mode}
            weights, mismatch = importance_weights(p, q, offsets=offsets, **options)
            assert weights.isnan().nonzero().flatten().tolist() == expected
            for name in ("k1", "k3", "ess", "max_ratio"):
                assert getattr(mismatch, name).isnan().tolist() == [True, False], name
            assert mismatch.tokens.tolist() == [3, 3]


def test_a_missing_log_prob_is_left_out():
    p, q, _, offsets = ragged([6, 1])
    q[2] = p[4] = q[6] = NAN
    p[5] = q[5] = -INF
    known = torch.tensor([0, 1, 3])
    options = {"offsets": offsets, "nan": "missing", "high": 1.1}
    weights, mismatch = importance_weights(p, q, **options)
    alone, of_known = importance_weights(p[known], q[known], high=1.1)
    assert torch.equal(weights[known], alone)
    assert weights[[2, 4, 5, 6]].tolist() == [1.0] * 4
    for name in Mismatch._fields:
        torch.testing.assert_close(getattr(mismatch, name)[:1], getattr(of_known, name))
    assert mismatch.tokens.tolist() == [3, 0]
    for level in ("sequence", "geometric"):
        of_sequence = importance_weights(p, q, level=level, **options).weights
        d = (p - q)[known].sum() / (1 if level == "sequence" else 3)
        torch.testing.assert_close(of_sequence[:6], d.exp().clamp(max=1.1).expand(6))
        assert of_sequence[6] == 1


@pytest.mark.parametrize("level", LEVELS)
def test_masked_values_are_not_read(level):
    p, q, mask, offsets = ragged([30, 4])
    options = {"level": level, "low": 0.5}
    clean = importance_weights(p, q, mask, offsets=offsets, **options)
    p, q = p.masked_fill(~mask, NAN), q.masked_fill(~mask, -INF)
    dirty = importance_weights(p, q, mask, offsets=offsets, **options)
    for mine, other in zip(flat(clean), flat(dirty), strict=True):
        assert torch.equal(mine, other)
    assert (clean.weights[~mask] == 0).all()
    assert (clean.weights[mask] > 0).all()


def flat(weighed):
    return (weighed.weights, *weighed.mismatch)


@pytest.mark.parametrize("level", LEVELS)
def test_sequences_without_tokens(level):
    p, q, _, _ = ragged([2])
    offsets, mask = torch.tensor([0, 0, 1, 2, 2]), torch.tensor([False, True])
    weights, mismatch = importance_weights(p, q, mask, offsets=offsets, level=level, low=0.9)
    assert mismatch.tokens.tolist() == [0, 0, 1, 0]
    assert weights[0] == 0 and weights[1] > 0
    for name in (*Mismatch._fields, "k1", "k3", "ess", "clipped"):
        assert getattr(mismatch, name)[[0, 1, 3]].tolist() == [0, 0, 0], name


def test_empty_batches():
    empty = torch.zeros(0)
    packed = importance_weights(empty, empty, offsets=torch.tensor([0]))
    assert packed.weights.shape == packed.mismatch.k1.shape == (0,)
    assert packed.mismatch.total() == Mismatch(*[0] * 7)
    for shape in ((0, 3), (3, 0)):
        weights, mismatch = importance_weights(torch.zeros(shape), torch.zeros(shape))
        assert weights.shape == shape and mismatch.tokens.tolist() == [0] * shape[0]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("form", ["padded", "jagged", "strided"])
def test_every_representation_says_what_packed_values_say(level, form):
    lengths = [5, 2, 9]
    p, q, mask, offsets = ragged(lengths)
    expected = importance_weights(p, q, mask, offsets=offsets, level=level)
    of_samples = [list(x.split(lengths)) for x in (p, q, mask)]
    if form == "padded":
        pad = torch.nn.utils.rnn.pad_sequence
        inputs = [pad(x, batch_first=True, padding_value=0) for x in of_samples]
        weights, mismatch = importance_weights(*inputs, level=level)
        assert (weights[0, 5:] == 0).all()
        found = [row[:n] for row, n in zip(weights, lengths, strict=True)]
    else:
        layout = {"jagged": torch.jagged, "strided": torch.strided}[form]
        inputs = [torch.nested.nested_tensor(x, layout=layout) for x in of_samples]
        weights, mismatch = importance_weights(*inputs, level=level)
        assert weights.layout == layout
        if form == "jagged":
            (weights + inputs[0] * 0).values()  # of the same ragged shape
        found = weights.unbind()
    assert torch.equal(torch.cat(list(found)), expected.weights)
    for mine, other in zip(mismatch, expected.mismatch, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_depend_on_the_sequence_alone(level, dtype):
    lengths = [1025, 3, 0, 40000, 16, 2047] * 6
    p, q, mask, offsets = ragged(lengths, dtype)
    options = {"level": level, "mode": "mask", "low": 0.8, "high": 1.3}
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(flat(importance_weights(p, q, mask, offsets=offsets, **options)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))
    for b in (0, 1, 3, 5):
        own = slice(int(offsets[b]), int(offsets[b + 1]))
        # At another address, so that vectors begin elsewhere.
        shifted = [torch.cat([x[:1], x[own]])[1:] for x in (p, q, mask)]
        bounds = torch.tensor([0, lengths[b]])
        alone = importance_weights(*shifted, offsets=bounds, **options)
        assert torch.equal(alone.weights, results[0][0][own])
        for mine, batch in zip(alone.mismatch, results[0][1:], strict=True):
            assert torch.equal(mine, batch[b : b + 1])


def test_weights_are_constants_of_every_derivative():
    q = torch.randn(2, 5)

    def loss(p):
        return (importance_weights(p, q).weights * p).sum()

    p = torch.randn(2, 5)
    weights = importance_weights(p, q).weights
    assert torch.equal(torch.func.grad(loss)(p), weights)
    assert not torch.autograd.functional.hessian(loss, p).any()


def ratio_of_trl(log_probs, rollout_log_probs, mask, mode, low, high):
    """What the statements of TRL's trainer that correct for vLLM make of a batch."""
    trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="no trl")
    source = textwrap.dedent(inspect.getsource(trainer.GRPOTrainer._generate_and_score_completions))
    wanted = "vllm_importance_sampling_ratio"
    blocks = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If)
        and "vllm_importance_sampling_correction" in ast.unparse(node.test)
        and f"{wanted} =" in ast.unparse(node.body)
    ]
    innermost = min(blocks, key=lambda node: len(ast.unparse(node)))
    scope = {
        "self": SimpleNamespace(
            vllm_importance_sampling_mode=mode,
            vllm_importance_sampling_clip_min=low,
            vllm_importance_sampling_clip_max=high,
        ),
        "old_per_token_logps": log_probs,
        "sampling_per_token_logps": rollout_log_probs,
        "completion_mask": mask.int(),
        "tool_mask": None,
        "torch": torch,
        "math": math,
    }
    exec(compile(ast.unparse(innermost.body), "trl", "exec"), scope)
    return scope[wanted]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", MODES)
@pytest.mark.parametrize(("low", "high"), [(None, 3.0), (0.8, 1.2), (0.9, None)])
@pytest.mark.parametrize("missing", [False, True])
def test_weights_are_those_of_trl(level, kind, low, high, missing):
    mask = torch.arange(40) < torch.tensor([40, 3, 17, 1, 29, 40])[:, None]
    rollout = -2 * torch.rand(6, 40)
    log_probs = rollout + 0.2 * torch.randn(6, 40)
    if missing:  # of what vLLM could not score
        rollout[0, :3] = rollout[2, 5] = float("nan")
    theirs = ratio_of_trl(log_probs, rollout, mask, f"{level}_{kind}", low, high).expand_as(
        log_probs
    )
    options = {"level": level, "mode": kind, "low": low, "high": high, "nan": "missing"}
    ours = importance_weights(log_probs, rollout, mask, **options).weights
    torch.testing.assert_close(ours[mask], theirs[mask], rtol=1e-6, atol=1e-6)
    assert (ours[~mask] == 0).all()
