"""token_kl of lists of samples."""

from __future__ import annotations

import pytest
import torch

from fusedrl import token_kl
from fusedrl.ops.token_kl import ESTIMATORS

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LENGTHS = [3, 0, 1, 1024, 2500, 0]


def column(*trailing, lengths=LENGTHS, dtype=torch.float32):
    return [torch.randn(n, *trailing).to(dtype) for n in lengths]


def zeros(*shapes, dtype=torch.float32):
    return [torch.zeros(shape, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("nan", ["propagate", "missing"])
@pytest.mark.parametrize("masked", [False, True])
def test_equals_packed_columns(dtype, estimator, nan, masked):
    p, q = column(dtype=dtype), column(dtype=dtype)
    p[3][5] = q[4][2000] = torch.nan
    mask = [torch.rand(n) < 0.7 for n in LENGTHS] if masked else None
    one = [torch.randn(1, 1).to(dtype) for _ in p]
    a_token = column(1, dtype=dtype)
    for reward in (column(dtype=dtype), a_token, one, [*a_token[:3], one[0], *one[4:]]):
        options = {"estimator": estimator, "nan": nan, "coeff": 0.3}
        ours = token_kl(p, q, mask, reward=reward, **options)
        spread = [r.reshape(-1).expand(len(x)) for r, x in zip(reward, p, strict=True)]
        packed = [None if x is None else torch.cat(x) for x in (p, q, mask, spread)]
        expected = token_kl(*packed[:3], reward=packed[3], **options)
        for mine, other in zip(ours, expected, strict=True):
            torch.testing.assert_close(torch.cat(mine), other, rtol=0, atol=0, equal_nan=True)


def test_results_are_no_views_of_a_single_sample():
    p, q, r = column(lengths=[4]), column(lengths=[4]), column(lengths=[4])
    (kl,), (reward,) = token_kl(p, q, [torch.zeros(4, dtype=torch.bool)], reward=r)
    assert torch.equal(reward, r[0])
    addresses = {x.untyped_storage().data_ptr() for x in (kl, reward, p[0], q[0], r[0])}
    assert len(addresses) == 5


@pytest.mark.parametrize("shape", [None, "flat", "column", "scalar_column", "batch", "mixed"])
@pytest.mark.parametrize("lengths", [LENGTHS, [0, 2]], ids=["ragged", "as many as tokens"])
def test_lists_answer_as_the_reference(shape, lengths):
    p, q = column(lengths=lengths), column(lengths=lengths)
    mask = [torch.rand(n) < 0.7 for n in lengths]
    batch = torch.randn(len(lengths))
    one = list(batch.view(-1, 1, 1).unbind())
    reward = {
        None: None,
        "flat": column(lengths=lengths),
        "column": column(1, lengths=lengths),
        "scalar_column": one,
        "batch": batch,
        "mixed": [*column(1, lengths=lengths)[:-1], one[-1]],
    }[shape]
    options = {"estimator": "k3", "reward": reward, "coeff": 0.3}
    ours = token_kl(p, q, mask, **options)
    expected = token_kl(p, q, mask, impl="reference", **options)
    for mine, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("odd", [torch._neg_view, lambda x: torch._efficientzerotensor(4)])
def test_what_has_no_memory_of_its_values(odd):
    """A tensor may be the negative of its memory, or zeros without any."""
    p, q = column(lengths=[4, 4]), column(lengths=[4, 4])
    q[1] = odd(q[1])
    for mine, x, y in zip(token_kl(p, q), p, q, strict=True):
        torch.testing.assert_close(mine, x - y)


def test_a_trace_computes_again():
    p, q = column(lengths=[4, 4])
    traced = torch.jit.trace(lambda x, y: token_kl([x], [y])[0], (p, q))
    torch.testing.assert_close(traced(q, p), q - p)


def test_one_sample_that_requires_a_gradient():
    p, q = column(), column()
    p[3].requires_grad_()
    sum(kl.sum() for kl in token_kl(p, q)).backward()
    assert torch.equal(p[3].grad, torch.ones(1024))


def test_samples_inside_vmap():
    p, q = torch.randn(2, 4, 3)

    def row(x, y):
        return token_kl([x], [y], impl="reference")[0]

    torch.testing.assert_close(torch.vmap(row)(p, q), p - q)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"ref_log_probs": zeros(2, 4)}, ValueError, "ref_log_probs: sample 1: expected shape"),
        ({"ref_log_probs": []}, ValueError, "ref_log_probs: expected 2 samples, got 0"),
        ({"mask": zeros(2, 3)}, TypeError, "mask: expected torch.bool"),
        ({"reward": zeros(2, 2)}, ValueError, "reward: sample 1: expected shape"),
        ({"log_probs": [torch.zeros(2), 1.0]}, TypeError, "log_probs: sample 1: expected a dense"),
        ({"coeff": "1"}, TypeError, "coeff: expected a real number"),
        ({"impl": "cuda"}, ValueError, "expected tensors on cuda"),
    ],
)
def test_lists_that_do_not_fit(change, error, match):
    lists = {"log_probs": zeros(2, 3), "ref_log_probs": zeros(2, 3)}
    with pytest.raises(error, match=match):
        token_kl(**(lists | change))
