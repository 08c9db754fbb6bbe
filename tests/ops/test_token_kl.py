"""token_kl: estimators, the penalised reward, missing and masked values, every representation."""

from __future__ import annotations

import pytest
import torch
from accuracy import no_worse
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedrl import token_kl
from fusedrl.ops.token_kl import ESTIMATORS
from fusedrl.ops.token_kl.samples import pack_samples

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def textbook(p, q, estimator):
    """The estimators as papers write them."""
    d = q - p
    return {"k1": -d, "k2": d**2 / 2, "k3": d.exp() - 1 - d, "abs": d.abs()}[estimator]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_no_worse_than_torch_in_the_same_dtype(dtype, estimator):
    p = (-torch.rand(20000) * 8).to(dtype)
    q = (p.double() + torch.randn(20000).double() * torch.logspace(-6, 0.5, 20000)).to(dtype)
    ours = token_kl(p, q, estimator=estimator).kl
    assert ours.dtype == dtype
    truth = textbook(p.double(), q.double(), estimator)
    no_worse(ours, textbook(p, q, estimator), truth, 1e-12)


def test_k3_is_right_where_its_terms_cancel():
    """exp(d) - 1 - d in float32 is all rounding error below 1e-4; ours keeps its digits."""
    d = torch.logspace(-12, 0.3, 2000, dtype=torch.float64)
    d = torch.cat([d, -d]).float()
    ours = token_kl(torch.zeros_like(d), d, estimator="k3").kl
    exact = d.double()
    truth = torch.where(
        exact.abs() < 1e-3,
        exact**2 / 2 * (1 + exact / 3 * (1 + exact / 4 * (1 + exact / 5))),
        torch.expm1(exact) - exact,
    )
    torch.testing.assert_close(ours.double(), truth, rtol=1e-6, atol=0)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_infinite_log_probs(estimator):
    inf = float("inf")
    p = torch.tensor([-inf, -1.0, -inf, 0.0, -1.0])
    q = torch.tensor([-1.0, -inf, -inf, -120.0, float("nan")])
    truth = textbook(p.double(), q.double(), estimator).float()
    if estimator == "k3":
        truth[0] = inf  # the limit; the textbook's inf - inf is NaN
    for impl in ("cpu", "reference"):
        for dtype in (torch.float32, torch.float64):
            kl = token_kl(p.to(dtype), q.to(dtype), estimator=estimator, impl=impl).kl
            torch.testing.assert_close(kl, truth.to(dtype), equal_nan=True)


def test_nan_propagates_unless_it_means_missing():
    nan = float("nan")
    p, q = torch.tensor([nan, -1.0, -1.0]), torch.tensor([-1.0, nan, -2.0])
    reward = torch.tensor([5.0, 6.0, 7.0])
    kl, penalised = token_kl(p, q, reward=reward)
    assert kl.isnan().tolist() == penalised.isnan().tolist() == [True, True, False]
    kl, penalised = token_kl(p, q, reward=reward, nan="missing", coeff=0.5)
    assert kl.tolist() == [0.0, 0.0, 1.0]
    assert penalised.tolist() == [5.0, 6.0, 6.5]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("nan", ["propagate", "missing"])
def test_gradient_equals_the_reference(estimator, nan):
    base = torch.randn(3, 40, dtype=torch.float64)
    mask = torch.rand(40) < 0.7
    base[0, ~mask] = float("nan")
    if nan == "missing":
        base[1, 3] = float("nan")
    upstream = torch.randn(2, 40, dtype=torch.float64)
    grads = []
    for impl in ("cpu", "reference"):
        p, q, r = (x.clone().requires_grad_() for x in base)
        out = token_kl(p, q, mask, reward=r, coeff=0.3, estimator=estimator, nan=nan, impl=impl)
        torch.autograd.backward(list(out), list(upstream))
        grads.append(torch.stack([p.grad, q.grad, r.grad]))
    assert grads[0].isfinite().all()
    torch.testing.assert_close(*grads)
    assert (grads[0][:2, ~mask] == 0).all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gradcheck(estimator):
    p, q, r = torch.randn(3, 9, dtype=torch.float64).unbind()
    for x in (p, q, r):
        x.requires_grad_()

    def function(p, q, r):
        return tuple(token_kl(p, q, reward=r, coeff=0.7, estimator=estimator))

    assert torch.autograd.gradcheck(function, (p, q, r))


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_the_kl_is_constant_where_only_the_reward_is_differentiated(impl):
    p, q = torch.randn(2, 5).unbind()
    upstream = torch.arange(1.0, 6.0)
    reward = torch.randn(5, requires_grad=True)
    out = token_kl(p, q, reward=reward, coeff=0.3, impl=impl)
    assert not out.kl.requires_grad
    out.reward.backward(upstream)
    assert torch.equal(reward.grad, upstream)


def test_only_the_kl_differentiates_without_reward():
    p, q = torch.randn(5, requires_grad=True), torch.randn(5)
    token_kl(p, q, estimator="k2").kl.sum().backward()
    torch.testing.assert_close(p.grad, p.detach() - q)


def test_masked_values_are_not_read():
    p, q = torch.randn(2, 6).unbind()
    mask = torch.tensor([True, False, True, True, False, False])
    clean = token_kl(p, q, mask, reward=torch.ones(6))
    p, q = p.masked_fill(~mask, float("nan")), q.masked_fill(~mask, float("inf"))
    dirty = token_kl(p, q, mask, reward=torch.ones(6), coeff=1.0)
    assert torch.equal(dirty.kl, clean.kl)
    assert torch.equal(dirty.reward, clean.reward)
    assert (clean.kl[~mask] == 0).all()
    assert (clean.reward[~mask] == 1).all()


def test_penalised_reward_broadcasts_one_value_a_sequence():
    lengths = [3, 0, 1, 4]
    p, q = torch.randn(2, 8).unbind()
    offsets = torch.tensor([0, 3, 3, 4, 8])
    rewards = torch.tensor([1.0, 2.0, 3.0, 4.0])
    kl, penalised = token_kl(p, q, offsets=offsets, reward=rewards, coeff=0.1)
    spread = torch.repeat_interleave(rewards, torch.tensor(lengths))
    torch.testing.assert_close(penalised, spread - 0.1 * kl)
    padded = token_kl(p.view(2, 4), q.view(2, 4), reward=rewards[:2], coeff=0.1)
    torch.testing.assert_close(padded.reward, rewards[:2, None] - 0.1 * kl.view(2, 4))
    rewards.requires_grad_()
    token_kl(p, q, offsets=offsets, reward=rewards).reward.sum().backward()
    assert rewards.grad.tolist() == [3.0, 0.0, 1.0, 4.0]


def test_broadcast_agrees_across_thread_splits():
    """Sequences that straddle the ranges of the threads keep their own reward."""
    lengths = torch.randint(0, 3000, (40,))
    count = int(lengths.sum())
    p, q = torch.randn(2, count).unbind()
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    rewards = torch.randn(40)
    kl, penalised = token_kl(p, q, offsets=offsets, reward=rewards)
    torch.testing.assert_close(penalised, torch.repeat_interleave(rewards, lengths) - kl)


@pytest.mark.parametrize("threads", [1, 2])
def test_many_samples_pack_in_order(threads):
    """Beyond torch.cat's own threshold, on one thread and several, with a sample of every kind."""
    lengths = [*torch.randint(0, 900, (150,)).tolist(), 0, 1, 20000]
    p, r = ([torch.randn(n, *trailing) for n in lengths] for trailing in ((), (1,)))
    q = [torch.randn(2 * n)[::2] for n in lengths]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        packed = pack_samples(p, q, [x > 0 for x in p], r)
    finally:
        torch.set_num_threads(before)
    assert packed.lengths == lengths
    expected = [torch.cat(p), torch.cat(q), torch.cat(p) > 0, torch.cat(r).squeeze(-1)]
    assert all(map(torch.equal, packed.columns, expected))


def test_many_one_token_rows_are_refused_as_few_are():
    """[1, T] rewards concatenate along the wrong dimension, whichever way they are packed."""
    p, r = [torch.zeros(n) for n in (4,) * 9000], [torch.zeros(1, 4)] * 9000
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for count in (1, 9000):
            with pytest.raises(ValueError, match=r"reward: sample 0: expected shape \[4\]"):
                pack_samples(p[:count], p[:count], None, r[:count])
    finally:
        torch.set_num_threads(before)


def test_an_empty_tensor():
    out = token_kl(torch.zeros(0), torch.zeros(0), reward=torch.zeros(0))
    assert out.kl.shape == out.reward.shape == (0,)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_answers_nested(layout):
    lengths = [2, 5]
    p, q, r = ([torch.randn(n) for n in lengths] for _ in range(3))

    def nest(x):
        return torch.nested.nested_tensor(x, layout=layout)

    nested_p = nest(p)
    nested_q = nest(q)
    if layout == torch.jagged:
        nested_q = torch.nested.nested_tensor_from_jagged(nested_q.values(), nested_p.offsets())
    kl, penalised = token_kl(nested_p, nested_q, reward=nest(r), coeff=2.0)
    assert kl.layout == penalised.layout == layout
    for i in range(2):
        torch.testing.assert_close(kl.unbind()[i], p[i] - q[i])
        torch.testing.assert_close(penalised.unbind()[i], r[i] - 2.0 * (p[i] - q[i]))
    broadcast = token_kl(nested_p, nested_q, reward=torch.tensor([1.0, 2.0])).reward
    torch.testing.assert_close(broadcast.unbind()[1], 2.0 - (p[1] - q[1]))


def test_dtypes_promote_as_torch_promotes():
    p, q = torch.randn(7).bfloat16(), torch.randn(7)
    assert token_kl(p, q).kl.dtype == torch.float32
    out = token_kl(p, q.bfloat16(), reward=torch.randn(7))
    assert out.kl.dtype == torch.bfloat16
    assert out.reward.dtype == torch.float32


def test_float64_coefficients_are_not_rounded():
    p, q = torch.tensor([-1.0], dtype=torch.float64), torch.tensor([-2.0], dtype=torch.float64)
    penalised = token_kl(p, q, reward=torch.zeros_like(p), coeff=0.1).reward
    assert penalised.item() == -0.1


GOOD = {"log_probs": torch.zeros(4), "ref_log_probs": torch.zeros(4)}


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"ref_log_probs": torch.zeros(5)}, ValueError, r"ref_log_probs: expected shape \(4,\)"),
        ({"ref_log_probs": [torch.zeros(4)]}, TypeError, "ref_log_probs: expected a dense tensor"),
        ({"log_probs": torch.zeros(4).long()}, TypeError, "log_probs: expected a floating"),
        ({"mask": torch.ones(4)}, TypeError, "mask: expected torch.bool"),
        ({"estimator": "k4"}, ValueError, "estimator: expected one of k1, k2, k3, abs, got 'k4'"),
        ({"nan": "zero"}, ValueError, "nan: expected one of propagate, missing"),
        ({"reward": torch.zeros(2)}, ValueError, "or offsets beside one for each sequence"),
        (
            {"reward": torch.zeros(3), "offsets": torch.tensor([0, 1, 4])},
            ValueError,
            r"reward: expected shape \(4,\) like log_probs, or \(2,\), one for each sequence, got",
        ),
        ({"reward": torch.zeros(4).long()}, TypeError, "reward: expected a floating"),
        ({"offsets": torch.tensor([1, 4])}, ValueError, "from 0 to 4"),
        (
            {"coeff": torch.zeros(2), "reward": torch.zeros(4)},
            ValueError,
            "coeff: expected a float",
        ),
        (
            {"coeff": torch.zeros((), requires_grad=True), "reward": torch.zeros(4)},
            ValueError,
            "coeff.detach",
        ),
        ({"impl": "triton"}, ValueError, "impl: expected .* for token_kl, got 'triton'"),
        ({"log_probs": 1.0}, TypeError, "log_probs: expected a dense tensor .* got float"),
    ],
)
def test_bad_input_names_argument_expectation_and_remedy(change, error, match):
    with pytest.raises(error, match=match):
        token_kl(**{**GOOD, **change})


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (([torch.zeros(2)], []), "ref_log_probs: expected 1 samples, got 0"),
        (([torch.zeros(2), torch.zeros(3)], [torch.zeros(2), torch.zeros(4)]), "sample 1"),
        (([torch.zeros(2)], [torch.zeros(2)], None, [torch.zeros(3)]), "reward: sample 0"),
        (
            ([torch.zeros(2)], [torch.zeros(2)], None, [torch.zeros(2)] * 2),
            "reward: expected 1 samples",
        ),
        (
            ([torch.zeros(2), torch.zeros(1)],) * 2 + (None, [torch.zeros(1)] * 3),
            "reward: expected 2 samples, got 3",
        ),
        (([torch.zeros(2)], [torch.zeros(2)], None, [torch.zeros(1, 2)]), "reward: sample 0"),
        (([torch.zeros(2), torch.tensor(0.0)],) * 2, r"log_probs: sample 1: expected a dimension"),
        (([torch.zeros(2), torch.zeros(2, device="meta")],) * 2, "sample 1: expected device cpu"),
        (([], []), "log_probs: expected at least one sample"),
    ],
)
def test_bad_lists_name_the_sample(args, match):
    with pytest.raises(ValueError, match=match):
        pack_samples(*args)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    estimator=st.sampled_from(ESTIMATORS),
    dtype=st.sampled_from(DTYPES),
    nan=st.sampled_from(["propagate", "missing"]),
    broadcast=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_random_ragged_batches_equal_the_reference(lengths, estimator, dtype, nan, broadcast, seed):
    generator = torch.Generator().manual_seed(seed)
    count = sum(lengths)
    p, q, r = torch.randn(3, count, generator=generator).to(dtype).unbind()
    p[torch.rand(count, generator=generator) < 0.2] = float("nan")
    mask = torch.rand(count, generator=generator) < 0.8
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    of_sequences = torch.randn(len(lengths), 1, generator=generator).to(dtype)
    reward = of_sequences if broadcast else r[None]  # as many sequences as tokens are no question
    ours, reference = (
        token_kl(
            p, q, mask, offsets=offsets, reward=reward, estimator=estimator, nan=nan, impl=impl
        )
        for impl in ("cpu", "reference")
    )
    for mine, other in zip(ours, reference, strict=True):
        torch.testing.assert_close(mine, other, equal_nan=True)


def test_companions_of_another_kind():
    jagged = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    for p, q, match in [
        (jagged, None, "ref_log_probs: expected a nested tensor like log_probs, got NoneType"),
        (jagged, torch.zeros(5), "expected a nested tensor like log_probs, got a dense tensor"),
        (torch.zeros(5), None, "ref_log_probs: expected a dense tensor like log_probs, got None"),
        ([torch.zeros(2)], torch.zeros(2), "log_probs: expected a dense tensor or a nested"),
    ]:
        with pytest.raises(TypeError, match=match):
            token_kl(p, q)


def test_equal_log_probs_have_a_kl_of_plain_zero():
    p = torch.randn(3)
    assert not token_kl(p, p).kl.signbit().any()


def test_as_many_samples_as_tokens():
    """One reward a sample stays that where an empty sample makes B equal to N."""
    empty, two, rewards = torch.zeros(0), torch.zeros(2), torch.tensor([9.0, 5.0])
    for reward in (rewards, list(rewards.split(1)), [r[:, None] for r in rewards.split(1)]):
        packed = pack_samples([empty, two], [empty, two], None, reward)
        assert packed.columns[3].tolist() == [5.0, 5.0]
    nested = torch.nested.nested_tensor_from_jagged(two, torch.tensor([0, 0, 2]))
    assert token_kl(nested, nested, reward=rewards).reward.values().tolist() == [5.0, 5.0]


def test_the_kernel_checks_offsets_itself():
    """A compiled graph reaches it without the check in Python."""
    z, coeff = torch.zeros(8), torch.ones((), dtype=torch.float64)
    for bounds in ([0, 3, 1, 8], [0, 3, 4], [1, 8]):
        offsets = torch.tensor(bounds)
        with pytest.raises(RuntimeError, match="offsets: expected non-decreasing"):
            torch.ops.fusedrl.token_log_probs(
                torch.zeros(8, 3), z.long(), None, offsets, True, coeff, False
            )
