"""token_kl: estimators, the penalised reward, missing and masked values, every representation."""

from __future__ import annotations

import pytest
import torch
from accuracy import no_worse
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedrl import token_kl
from fusedrl.ops.token_kl import ESTIMATORS
from fusedrl.ops.token_kl.samples import kl_of_samples

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
@pytest.mark.parametrize("of", [(0,), (1,), (0, 1)])
def test_gradient_equals_the_reference(estimator, nan, of):
    """Of either result, or of both."""
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
        torch.autograd.backward([out[i] for i in of], [upstream[i] for i in of])
        grads.append(torch.stack([p.grad, q.grad, torch.zeros(40) if r.grad is None else r.grad]))
    assert grads[0].isfinite().all()
    torch.testing.assert_close(*grads)
    assert (grads[0][:2, ~mask] == 0).all()


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


@settings(max_examples=40, deadline=None)
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
    of_sequences = torch.randn(len(lengths), generator=generator).to(dtype)
    reward = {"reward": of_sequences, "offsets": offsets} if broadcast else {"reward": r}
    ours, reference = (
        token_kl(p, q, mask, **reward, estimator=estimator, nan=nan, impl=impl)
        for impl in ("cpu", "reference")
    )
    for mine, other in zip(ours, reference, strict=True):
        torch.testing.assert_close(mine, other, equal_nan=True)


def test_equal_log_probs_have_a_kl_of_plain_zero():
    p = torch.randn(3)
    assert not token_kl(p, p).kl.signbit().any()


def test_whose_a_reward_is_follows_from_offsets_not_from_how_many_there_are():
    p, rewards, offsets = torch.zeros(2), torch.tensor([9.0, 5.0]), torch.tensor([0, 0, 2])
    assert token_kl(p, p, reward=rewards, offsets=offsets).reward.tolist() == [5.0, 5.0]
    assert token_kl(p, p, reward=rewards).reward.tolist() == [9.0, 5.0]
    nested, of_tokens = (torch.nested.nested_tensor_from_jagged(x, offsets) for x in (p, rewards))
    assert token_kl(nested, nested, reward=rewards).reward.values().tolist() == [5.0, 5.0]
    assert token_kl(nested, nested, reward=of_tokens).reward.values().tolist() == [9.0, 5.0]


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_a_column_changed_before_the_backward_pass_is_an_error(changed):
    """Those of a reward are not needed for the gradient, and may change."""
    p, q, reward = torch.randn(3, 6).unbind()
    given = [p.requires_grad_(), q, torch.ones(6, dtype=torch.bool)]
    penalised = token_kl(*given, reward=reward, estimator="k2").reward
    reward.zero_()
    with torch.no_grad():
        given[changed].logical_not_() if changed == 2 else given[changed].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalised.sum().backward()


def test_the_gradient_of_a_reward_alone_is_not_rounded_twice():
    """In a half type the upstream gradient and the coefficient meet in float32."""
    p, q, upstream = torch.randn(3, 500).bfloat16().unbind()
    leaf = p.clone().requires_grad_()
    penalised = token_kl(leaf, q, reward=torch.zeros_like(p), coeff=0.3, estimator="k2").reward
    (grad,) = torch.autograd.grad(penalised, leaf, upstream)
    expected = 0.3 * upstream.float() * (q.float() - p.float())
    torch.testing.assert_close(grad, expected.bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_token_are_its_own(dtype):
    """Wherever it stands, and on any number of threads."""
    count = 100_000  # more than one thread takes
    p, q, reward = (torch.randn(count).to(dtype) for _ in range(3))
    mask = torch.rand(count) < 0.7

    def run(part):
        leaf = p[part].detach().requires_grad_()
        kl, left = token_kl(leaf, q[part], mask[part], reward=reward[part], estimator="k3")
        return kl.detach(), left.detach(), *torch.autograd.grad(left.sum() + 2 * kl.sum(), leaf)

    threads = torch.get_num_threads()
    try:
        found = []
        for number in (1, 2):
            torch.set_num_threads(number)
            found.append(run(slice(None)))
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, *found))
    for first, end in ((0, 1), (1, 2), (5, 38), (1000, 2100), (count - 33, count)):
        part = slice(first, end)
        for got, whole in zip(run(part), found[0], strict=True):
            assert torch.equal(got, whole[part])


def samples(dtype, lengths=(5, 0, 1, 2500, 33)):
    p, q, reward = ([torch.randn(n, *end).to(dtype) for n in lengths] for end in ((), (), (1,)))
    p[0][1] = q[3][7] = torch.nan
    return p, q, reward


def by_the_op(p, q, reward):
    """The op over each sample."""
    every = (
        [None] * len(p)
        if reward is None
        else [r.expand(len(x), 1)[:, 0] for x, r in zip(p, reward, strict=True)]
    )
    pairs = zip(p, q, every, strict=True)
    return [token_kl(x, y, reward=r, coeff=0.3, nan="missing") for x, y, r in pairs]


def check(p, q, reward):
    kl, penalised = kl_of_samples(p, q, reward, coeff=0.3)
    expected = by_the_op(p, q, reward)
    assert all(torch.equal(x, y.kl) for x, y in zip(kl, expected, strict=True))
    assert (penalised is None) == (reward is None)
    for x, y in zip(penalised or [], expected, strict=bool(penalised)):
        assert torch.equal(x, y.reward[:, None])


@pytest.mark.parametrize("with_reward", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_samples_have_the_bits_of_the_op(dtype, with_reward):
    p, q, reward = samples(dtype)
    check(p, q, reward if with_reward else None)


FORMS = {
    "another dtype": lambda p, q, r: (p, [x.double() for x in q], r),
    "gaps": lambda p, q, r: (p, [torch.randn(10)[::2], *q[1:]], r),
    "a reward a sample": lambda p, q, r: (p, q, [torch.randn(1, 1) for _ in r]),
    "both kinds of rewards": lambda p, q, r: (p, q, [r[0][:1], *r[1:]]),
    "a parameter": lambda p, q, r: (p, [torch.nn.Parameter(q[0]), *q[1:]], r),
    "a negated view": lambda p, q, r: (p, [torch._neg_view(q[0]), *q[1:]], r),
    "a gradient": lambda p, q, r: ([p[0].requires_grad_(), *p[1:]], q, r),
    "one sample": lambda p, q, r: (p[:1], q[:1], r[:1]),
}


@pytest.mark.parametrize("title", FORMS)
def test_samples_of_any_form_are_those_of_the_op(title):
    check(*FORMS[title](*samples(torch.float32)))


def test_samples_of_two_dimensions_and_rewards_of_columns():
    p, q = ([torch.randn(n, 4) for n in (2, 3)] for _ in range(2))
    reward = [torch.randn(n, 1, 2) for n in (2, 3)]
    kl, penalised = kl_of_samples(p, q, reward, [x > 0 for x in p], coeff=0.3)
    for i, x in enumerate(kl):
        torch.testing.assert_close(x, torch.where(p[i] > 0, p[i] - q[i], 0))
        torch.testing.assert_close(penalised[i], reward[i] - 0.3 * x[..., None])


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda p, q, r: (p, q[:-1], r), "shorter|longer"),
        (lambda p, q, r: (p, [q[1], q[0], *q[2:]], r), "ref_log_probs: sample 0"),
        (lambda p, q, r: (p, q, [x[:, 0] for x in r]), "reward: sample 0"),
    ],
)
def test_samples_that_do_not_fit_are_refused(spoil, match):
    with pytest.raises(ValueError, match=match):
        kl_of_samples(*spoil(*samples(torch.float32)), coeff=0.3)
