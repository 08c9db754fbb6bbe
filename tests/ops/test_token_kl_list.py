"""token_kl_list: samples read where they lie, equal bit by bit to the op over packed ones."""

from __future__ import annotations

import sys

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch.utils.flop_counter import FlopCounterMode

from fusedrl import KLComputation, token_kl
from fusedrl.ops.token_kl import ESTIMATORS, in_place

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
token_kl_module = sys.modules["fusedrl.ops.token_kl"]  # the function has its name
LENGTHS = [3, 0, 1, 1024, 2500, 0]
COEFF = torch.tensor(0.3, dtype=torch.float64)


def column(*trailing, lengths=LENGTHS, dtype=torch.float32):
    return [torch.randn(n, *trailing).to(dtype) for n in lengths]


def packed_op(p, q, mask, reward, *options):
    """The op over concatenated samples, with a reward a token."""
    spread = [r.reshape(-1).expand(len(x)) for r, x in zip(reward, p, strict=bool(reward))]
    columns = [torch.cat(x) if x else None for x in (mask, spread)]
    return torch.ops.fusedrl.token_kl(
        torch.cat(p), torch.cat(q), columns[0], None, columns[1], *options
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("estimator", range(len(ESTIMATORS)))
@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_equals_the_packed_op(dtype, estimator, missing, masked):
    p, q = column(dtype=dtype), column(dtype=dtype)
    p[3][5] = q[4][2000] = torch.nan
    mask = [torch.rand(n) < 0.7 for n in LENGTHS] if masked else []
    one = [torch.randn(1, 1).to(dtype) for _ in p]
    a_token = column(1, dtype=dtype)
    for reward in ([], column(dtype=dtype), a_token, one, [*a_token[:3], one[0][0], *one[4:]]):
        options = (COEFF, estimator, missing)
        ours = torch.ops.fusedrl.token_kl_list(p, q, mask, reward, *options)
        found = in_place.by_address(p, q, mask or None, reward or None, *options)
        # Rewards of one and of two dimensions are left to packing, which refuses some of them.
        assert (found is None) == (len({x.dim() for x in reward}) > 1)
        expected = packed_op(p, q, mask, reward, *options)
        for columns in (ours, *([] if found is None else [found.columns])):
            for mine, packed in zip(columns, expected, strict=len(columns) == 2):
                torch.testing.assert_close(mine, packed, rtol=0, atol=0, equal_nan=True)


def test_results_are_no_views_of_a_single_sample():
    p, q, r = column(lengths=[4]), column(lengths=[4]), column(lengths=[4])
    mask = [torch.zeros(4, dtype=torch.bool)]
    kl, reward = torch.ops.fusedrl.token_kl_list(p, q, mask, r, COEFF, 0, False)
    assert torch.equal(reward, r[0])
    addresses = {x.untyped_storage().data_ptr() for x in (kl, reward, p[0], q[0], r[0])}
    assert len(addresses) == 5


def zeros(*shapes, dtype=torch.float32):
    return [torch.zeros(shape, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"log_probs": [], "ref_log_probs": []}, "log_probs: expected at least one sample"),
        ({"log_probs": zeros(2, (3, 1))}, r"log_probs: sample 1: expected shape \[3\], got 3"),
        ({"ref_log_probs": zeros(2)}, "ref_log_probs: expected 2 samples, got 1"),
        ({"ref_log_probs": zeros(2, 4)}, r"ref_log_probs: sample 1: expected shape \[3\], got 4"),
        ({"ref_log_probs": zeros(2, 3, dtype=torch.float64)}, "ref_log_probs: sample 0: .* dtype"),
        ({"ref_log_probs": [torch.zeros(2), torch.zeros(6)[::2]]}, "sample 1: .*contiguous"),
        ({"mask": zeros(2, 3)}, "mask: sample 0: expected torch.bool"),
        ({"mask": zeros(2, 1, dtype=torch.bool)}, r"mask: sample 1: expected shape \[3\], got 1"),
        ({"reward": zeros(2, 2)}, r"reward: sample 1: expected shape \[3\].*one value, got 2"),
        ({"reward": zeros(2, (1, 3))}, "reward: sample 1: .* got 3 elements in 2 dimensions"),
        ({"reward": zeros(1)}, "reward: expected 2 samples, got 1"),
    ],
)
def test_the_op_refuses_lists_that_do_not_fit(change, match):
    lists = {"log_probs": zeros(2, 3), "ref_log_probs": zeros(2, 3), "mask": [], "reward": []}
    with pytest.raises(RuntimeError, match=match):
        torch.ops.fusedrl.token_kl_list(*(lists | change).values(), COEFF, 0, False)


def found_in_place(log_probs, ref_log_probs, mask=None, reward=None, impl="auto"):
    """The result without a concatenation, or ``None`` where there has to be one."""
    options = {"estimator": "k1", "coeff": 1.0, "nan": "propagate", "impl": impl}
    return token_kl_module._in_place(log_probs, ref_log_probs, mask, reward, options)


@pytest.fixture(params=["by_address", "by_handle"])
def way(request, monkeypatch):
    """How the CPU reads lists: its own way, and that of CUDA."""
    monkeypatch.setitem(in_place._IMPLEMENTATIONS, "cpu", getattr(in_place, request.param))
    return request.param


@pytest.mark.parametrize("shape", [None, "flat", "column", "scalar_column", "batch", "mixed"])
@pytest.mark.parametrize("lengths", [LENGTHS, [0, 2]], ids=["ragged", "as many as tokens"])
def test_lists_answer_the_same_in_place(way, shape, lengths):
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
    assert found_in_place(p, q, mask, reward) is not None
    options = {"estimator": "k3", "reward": reward, "coeff": 0.3}
    ours = token_kl(p, q, mask, **options)
    expected = token_kl(p, q, mask, impl="reference", **options)
    for mine, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, other)


def test_what_has_to_be_packed(way):
    p, q, r = column(), column(), column()
    leaf = [*p[:-1], p[-1].clone().requires_grad_()]
    for lists in (
        (leaf, q),
        (p, q, None, leaf),
        (p, [x.double() for x in q]),
        (p, q, None, [*r[:-1], r[-1].double()]),
        (p, [torch.randn(2 * n)[::2] for n in LENGTHS]),
        (p, q, None, torch.cat(r)),
        (p, q, None, [*r[:-1], r[-1].unsqueeze(-1)]),
        ([torch.nn.Parameter(x, requires_grad=False) for x in p], q),
        ([x.half().to(torch.float8_e5m2) for x in p],) * 2,
    ):
        assert found_in_place(*lists) is None
    with torch.no_grad():
        assert found_in_place(leaf, q) is not None
    assert found_in_place(p, q, impl="reference") is None


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("one_value", [False, True])
def test_threads_take_parts_of_samples(threads, one_value):
    """Beyond what one thread takes, the bits are those of the packed op."""
    lengths = [0, 300_000, 5, 0, 250_000, 1, 0]
    p, q = column(lengths=lengths), column(lengths=lengths)
    reward = column(lengths=[1] * 7) if one_value else column(lengths=lengths)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found = in_place.by_address(p, q, None, reward, COEFF, 2, False)
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, found.columns, packed_op(p, q, [], reward, COEFF, 2, False)))


def test_what_has_no_address_of_its_values(way):
    """A tensor may be the negative of its memory, or zeros without any."""
    p, q = column(lengths=[4, 4]), column(lengths=[4, 4])
    for odd in (torch._neg_view(q[1]), torch._efficientzerotensor(4), torch.zeros(4).to_sparse()):
        if odd.layout == torch.strided:
            for mine, x, y in zip(token_kl(p, [q[0], odd]), p, (q[0], odd), strict=True):
                torch.testing.assert_close(mine, x - y)
        assert in_place.by_address(p, [q[0], odd], None, None, COEFF, 0, False) is None
    for odd in (None, torch.empty(4, device="meta")):
        assert in_place.by_address(p, [q[0], odd], None, None, COEFF, 0, False) is None


def test_a_trace_computes_again(way):
    p, q = column(lengths=[4, 4])
    traced = torch.jit.trace(lambda x, y: token_kl([x], [y])[0], (p, q))
    torch.testing.assert_close(traced(q, p), q - p)


def test_a_mode_sees_every_op(way):
    with FlopCounterMode(display=False):
        assert (found_in_place(column(), column()) is None) == (way == "by_address")


def test_the_first_samples_tell_without_the_op():
    p = column()
    for q, reward in (([x.double() for x in p], None), (p, [torch.randn(2, 3)[:, 0], *p[1:]])):
        assert in_place._may_read(p, p, None, p)
        assert not in_place._may_read(p, q, None, reward)


def test_gradients_are_recorded_all_the_same(way):
    p, q = column(), column()
    p[3].requires_grad_()
    sum(kl.sum() for kl in token_kl(p, q)).backward()
    assert torch.equal(p[3].grad, torch.ones(1024))


def test_samples_inside_vmap_are_packed(way):
    p, q = torch.randn(2, 4, 3)

    def row(x, y):
        assert found_in_place([x], [y]) is None
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
def test_errors_are_those_of_packing(way, change, error, match):
    lists = {"log_probs": zeros(2, 3), "ref_log_probs": zeros(2, 3)}
    with pytest.raises(error, match=match):
        token_kl(**(lists | change))


def test_other_errors_of_the_op_are_not_hidden(monkeypatch):
    def fails(*args):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setitem(in_place._IMPLEMENTATIONS, "cpu", in_place.by_handle)
    monkeypatch.setattr(torch.ops.fusedrl, "token_kl_list", fails)
    with pytest.raises(RuntimeError, match="CUDA error"):
        token_kl(zeros(2, 3), zeros(2, 3))


@pytest.mark.parametrize("one_value", [False, True])
def test_kl_computation_does_not_concatenate(way, monkeypatch, one_value):
    rewards = column(1, lengths=[1] * len(LENGTHS)) if one_value else column(1)
    given = zip(column(), column(), rewards, strict=True)
    data = lazy_stack(
        [
            TensorDict({("log_probs", "full"): p, ("ref_log_probs", "full"): q, "reward": r})
            for p, q, r in given
        ]
    )
    plain = KLComputation(coeff=0.1)
    with monkeypatch.context() as packing:
        packing.setattr(in_place, "_IMPLEMENTATIONS", {})
        expected = plain(data.clone())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        plain(data)
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts.get("fusedrl::token_kl_list", 0) == (way == "by_handle")
    assert not counts.keys() & {"aten::cat", "fusedrl::token_kl"}
    for key in ("kl_penalty", "reward"):
        rows = zip(data.get(key, as_list=True), expected.get(key, as_list=True), strict=True)
        assert all(torch.equal(mine, other) for mine, other in rows)
