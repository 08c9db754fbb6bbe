"""Both ops: unusual input has a correct answer or a refusal that names the argument."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

from fusedrl import linear_token_log_probs, token_kl, token_log_probs

LOGITS, TOKENS = torch.linspace(-2, 2, 20).view(4, 5), torch.tensor([0, 1, 2, 3])
P, Q = torch.linspace(-3, -1, 4), torch.linspace(-2, -1.5, 4)
OFFSETS = torch.tensor([0, 1, 4])


def jagged(values):
    return torch.nested.nested_tensor_from_jagged(values, OFFSETS)


def strided(values):
    return torch.nested.nested_tensor(list(values.split([1, 3])))


def scaled(temperature, impl="auto", dtype=torch.float32):
    return token_log_probs(LOGITS.to(dtype), TOKENS, temperature=temperature, impl=impl).log_probs


def penalised(coeff, impl="auto"):
    return token_kl(P, Q, reward=P, coeff=coeff, impl=impl).reward


NO_NUMBERS = ["1", None, np.ones(1), np.array(2.0), 1j, [1.0]]


@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
@pytest.mark.parametrize(("op", "name"), [(scaled, "temperature"), (penalised, "coeff")])
def test_a_scalar_that_is_no_number(op, name, value):
    with pytest.raises(TypeError, match=f"{name}: expected a real number"):
        op(value)


REAL_NUMBERS = [2, np.float16(2), np.float32(2), np.float64(2), np.int64(2), Fraction(2)]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", REAL_NUMBERS, ids=repr)
def test_every_real_number_is_a_scalar(value):
    assert torch.equal(scaled(value), scaled(2.0))
    assert torch.equal(penalised(value), penalised(2.0))
    for name in ("scale", "softcap", "temperature"):
        ours, expected = (
            linear_token_log_probs(
                LOGITS, torch.eye(LOGITS.shape[-1]), TOKENS, **{name: number}
            ).log_probs
            for number in (value, 2.0)
        )
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize(
    "coeff", [pytest.param(10**400, id="huge"), float("nan"), float("inf"), -1e31]
)
def test_coefficients_that_float32_cannot_hold(coeff, impl):
    with pytest.raises(ValueError, match="coeff: expected a number from -1e\\+30"):
        penalised(coeff, impl)
    if isinstance(coeff, float):
        with pytest.raises(ValueError, match="coeff: expected a number from -1e\\+30"):
            penalised(torch.tensor(coeff, dtype=torch.float64), impl)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf"), 1e31, 1e-31])
def test_temperatures_out_of_range(temperature, impl, dtype):
    for value in (temperature, torch.tensor(temperature, dtype=torch.float64)):
        with pytest.raises(
            ValueError, match=r"temperature: expected a number from 1e-30 to 1e\+30"
        ):
            scaled(value, impl, dtype)


@pytest.mark.parametrize("temperature", [1e-30, 1e30])
def test_temperatures_at_the_ends_of_the_range(temperature):
    truth = torch.log_softmax(LOGITS.double() / temperature, -1).gather(-1, TOKENS[:, None])
    for value in (temperature, torch.tensor(temperature, dtype=torch.float64)):
        torch.testing.assert_close(scaled(value).double(), truth[:, 0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("op", "name"), [(scaled, "temperature"), (penalised, "coeff")])
def test_a_scalar_on_another_device(op, name):
    with pytest.raises(ValueError, match=f"{name}: expected a tensor on the CPU .* got meta"):
        op(torch.tensor(1.0, device="meta"))


def test_the_default_device_is_not_that_of_the_data():
    expected = scaled(0.5)
    kl = token_kl(P, Q, reward=P[:2], offsets=OFFSETS, coeff=0.1)
    with torch.device("meta"):
        assert torch.equal(scaled(0.5), expected)
        for nest in (jagged, strided):
            out = token_log_probs(nest(LOGITS), nest(TOKENS), temperature=0.5).log_probs
            assert torch.equal(torch.cat(out.unbind()), expected)
            out = token_kl(nest(P), nest(Q), reward=P[:2], coeff=0.1)
            assert torch.equal(torch.cat(out.reward.unbind()), kl.reward)


FORWARD_MODE = {
    "logits": lambda x: token_log_probs(x[:, None].expand(4, 5), TOKENS).log_probs,
    "temperature": lambda x: scaled(x[0].neg()),
    "log_probs": lambda x: token_kl(x, Q).kl,
    "ref_log_probs": lambda x: token_kl(P, x).kl,
    "reward": lambda x: token_kl(P, Q, reward=x).reward,
    "coeff": lambda x: penalised(x[0]),
}


@pytest.mark.parametrize("name", FORWARD_MODE)
def test_a_forward_mode_tangent_is_refused(name):
    function = FORWARD_MODE[name]
    plain = function(P)
    with forward_ad.dual_level():
        assert torch.equal(function(P), plain)
        for context in (torch.enable_grad(), torch.no_grad()):
            with context, pytest.raises(NotImplementedError, match=f"{name}: .* impl='reference'"):
                function(forward_ad.make_dual(P, Q))
    with pytest.raises(NotImplementedError, match=f"{name}: "):
        torch.func.jvp(function, (P,), (Q,))


def test_forward_mode_inside_vmap_is_refused():
    both = torch.stack([P, Q])
    for function in (torch.vmap(FORWARD_MODE["log_probs"]), torch.vmap(FORWARD_MODE["logits"])):
        with pytest.raises(NotImplementedError, match="forward-mode tangent"):
            torch.func.jvp(function, (both,), (both,))


def test_the_reference_has_forward_mode():
    def k2(x):
        return token_kl(x, Q, estimator="k2", impl="reference").kl

    tangent = torch.func.jvp(k2, (P,), (torch.ones(4),))[1]
    torch.testing.assert_close(tangent, P - Q)


@pytest.mark.parametrize("estimator", ["k1", "k2"])
def test_a_view_with_holes_and_a_gradient(estimator):
    starts, lengths = torch.tensor([0, 1]), torch.tensor([2, 3])
    padded = torch.randn(2, 6, 5)
    grads = []
    for packed in (False, True):
        x = padded.clone().requires_grad_()
        if packed:
            logits = torch.cat([x[0, :2], x[1, 1:4]])
            tokens = torch.tensor([0, 1, 2, 3, 4])
            log_probs = token_log_probs(logits, tokens).log_probs
            kl = token_kl(logits[:, 0], torch.zeros(5), estimator=estimator).kl
        else:
            offsets = torch.tensor([0, 2, 5])
            nested = torch.nested.narrow(x, 1, starts, lengths, layout=torch.jagged)
            tokens = torch.nested.nested_tensor_from_jagged(torch.arange(5), offsets)
            log_probs = token_log_probs(nested, tokens).log_probs.values()
            column = torch.nested.narrow(x[..., 0], 1, starts, lengths, layout=torch.jagged)
            zeros = torch.nested.nested_tensor_from_jagged(torch.zeros(5), offsets)
            kl = token_kl(column, zeros, estimator=estimator).kl.values()
        (log_probs * torch.arange(1.0, 6.0) + kl * torch.arange(6.0, 11.0)).sum().backward()
        grads.append((log_probs.detach(), kl.detach(), x.grad))
    for ours, expected in zip(*grads, strict=True):
        assert torch.equal(ours, expected)


def test_a_jagged_tensor_that_was_transposed():
    square = torch.randn(5, 5)
    offsets = torch.tensor([0, 2, 5])
    logits = torch.nested.nested_tensor_from_jagged(square, offsets)
    tokens = torch.nested.nested_tensor_from_jagged(torch.arange(5), offsets)
    with pytest.raises(ValueError, match="logits: expected a jagged tensor ragged in dimension 1"):
        token_log_probs(logits.transpose(1, 2), tokens)


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("token", [5, -1])
def test_tokens_out_of_range(dtype, impl, token):
    tokens = torch.tensor([0, token, 1, 2])
    mask = torch.tensor([False, True, True, True])
    with pytest.raises(
        RuntimeError, match=rf"tokens: .* \[0, 5\), got {token} at token 1; leave it out"
    ):
        token_log_probs(LOGITS.to(dtype), tokens, mask, impl=impl)
    assert token_log_probs(LOGITS.to(dtype), tokens, ~mask, impl=impl).log_probs[1] == 0


EMPTY = torch.nested.nested_tensor([])
FOUR = torch.zeros(4, 2, 5)
DENSE, DENSE_KL = (LOGITS, TOKENS), (P, Q)
JAGGED = (jagged(LOGITS), jagged(TOKENS))


@pytest.mark.parametrize(
    ("args", "options", "error", "match"),
    [
        (DENSE, {"offsets": [0, 4]}, TypeError, "offsets: expected a dense tensor, got list"),
        ((LOGITS.to_sparse(), TOKENS), {}, TypeError, r"logits: .*sparse_coo"),
        ((LOGITS.to_sparse_csr(), TOKENS), {}, TypeError, "logits: .*sparse_csr"),
        ((LOGITS, TOKENS.to_sparse()), {}, TypeError, "tokens: .*sparse_coo"),
        ((*DENSE, (TOKENS > 0).to_sparse()), {}, TypeError, "mask: .*sparse_coo"),
        (DENSE, {"temperature": torch.ones(1).to_sparse()}, TypeError, "temperature: .*sparse"),
        ((LOGITS, strided(TOKENS)), {}, TypeError, "tokens: expected a dense .* got a nested"),
        ((*DENSE, strided(TOKENS > 0)), {}, TypeError, "mask: expected a dense .* got a nested"),
        ((jagged(LOGITS), TOKENS), {}, TypeError, "tokens: expected a nested .* got a dense"),
        ((*JAGGED, TOKENS > 0), {}, TypeError, "mask: expected a nested .* got a dense"),
        ((EMPTY, EMPTY), {}, ValueError, "logits: expected at least one sequence"),
        ((jagged(FOUR), jagged(FOUR)), {}, ValueError, "logits: .* got one of 4 dimensions"),
        ((strided(FOUR), strided(FOUR)), {}, ValueError, "logits: .* got one of 4 dimensions"),
        ((LOGITS, TOKENS.to(torch.uint32)), {}, TypeError, r"tokens: .*uint32; .*\.long"),
    ],
)
def test_token_log_probs_refuses(args, options, error, match):
    with pytest.raises(error, match=match):
        token_log_probs(*args, **options)


@pytest.mark.parametrize(
    ("args", "options", "error", "match"),
    [
        (DENSE_KL, {"offsets": [0, 4]}, TypeError, "offsets: expected a dense tensor, got list"),
        ((P.to_sparse(), Q.to_sparse()), {}, TypeError, "^log_probs: .*sparse_coo"),
        ((P, Q.to_sparse()), {}, TypeError, "ref_log_probs: .*sparse_coo"),
        (DENSE_KL, {"reward": P.to_sparse()}, TypeError, "reward: .*sparse_coo"),
        ((EMPTY, EMPTY), {}, ValueError, "log_probs: expected at least one sequence"),
        ((jagged(LOGITS), jagged(LOGITS)), {}, ValueError, "log_probs: .* got one of 3 dimensions"),
        ((jagged(P), jagged(Q).to("meta")), {}, ValueError, "ref_log_probs: expected device cpu"),
        (
            (jagged(P), jagged(Q)),
            {"reward": torch.ones(2, device="meta")},
            ValueError,
            "reward: expected device cpu",
        ),
        (DENSE_KL, {"estimator": "k4"}, ValueError, "estimator: expected one of"),
    ],
)
def test_token_kl_refuses(args, options, error, match):
    with pytest.raises(error, match=match):
        token_kl(*args, **options)


def test_a_scalar_may_vary_under_vmap():
    temperatures = torch.tensor([0.5, 2.0])
    expected = torch.stack([scaled(0.5), scaled(2.0)])
    assert torch.equal(torch.vmap(scaled)(temperatures), expected)
