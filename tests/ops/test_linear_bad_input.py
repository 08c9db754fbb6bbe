"""linear_token_log_probs: bad input is refused by a message that names the argument."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

from fusedrl import VocabPart, linear_token_log_probs

HIDDEN, WEIGHT = torch.linspace(-2, 2, 12).view(4, 3), torch.linspace(-1, 1, 15).view(5, 3)
TOKENS = torch.tensor([0, 1, 2, 3])
GOOD = {"hidden": HIDDEN, "weight": WEIGHT, "tokens": TOKENS}
OFFSETS = torch.tensor([0, 1, 4])


def nested(values):
    return torch.nested.nested_tensor_from_jagged(values, OFFSETS)


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("token", [5, -1, -100])
def test_tokens_out_of_range(impl, token):
    tokens = torch.tensor([0, 1, token, 2])
    mask = torch.tensor([False, True, True, True])
    with pytest.raises(
        RuntimeError, match=rf"tokens: .* \[0, 5\), got {token} at token 2; leave it out"
    ):
        linear_token_log_probs(HIDDEN, WEIGHT, tokens, mask, impl=impl)
    assert linear_token_log_probs(HIDDEN, WEIGHT, tokens, ~mask, impl=impl).log_probs[2] == 0


@pytest.mark.parametrize("kind", ["jagged", "dense"])
def test_nested_and_dense_do_not_mix(kind):
    jagged = kind == "jagged"
    hidden = nested(HIDDEN) if jagged else HIDDEN
    tokens, other = (nested(TOKENS), TOKENS) if jagged else (TOKENS, nested(TOKENS))
    want = "nested tensor like hidden" if jagged else "dense tensor like hidden"
    with pytest.raises(TypeError, match=f"tokens: expected a {want}"):
        linear_token_log_probs(hidden, WEIGHT, other)
    with pytest.raises(TypeError, match="mask: expected a "):
        linear_token_log_probs(hidden, WEIGHT, tokens, other > 0 if jagged else nested(TOKENS > 0))


def test_nested_hidden_states_carry_their_offsets():
    with pytest.raises(ValueError, match="offsets: expected None with nested hidden"):
        linear_token_log_probs(nested(HIDDEN), WEIGHT, nested(TOKENS), offsets=OFFSETS)
    with pytest.raises(ValueError, match=r"hidden: expected a nested \[B, j, columns\]"):
        linear_token_log_probs(nested(HIDDEN[:, 0]), WEIGHT, nested(TOKENS))
    shorter = torch.nested.nested_tensor_from_jagged(TOKENS, torch.tensor([0, 2, 4]))
    with pytest.raises(ValueError, match="tokens: expected the sequence lengths of hidden"):
        linear_token_log_probs(nested(HIDDEN), WEIGHT, shorter)


@pytest.mark.parametrize("name", ["hidden", "weight", "bias"])
def test_a_part_does_not_differentiate(name):
    inputs = {**GOOD, "bias": torch.zeros(5)}
    inputs[name] = inputs[name].clone().requires_grad_()
    with pytest.raises(ValueError, match=r"hidden: expected inputs .* torch.no_grad\(\)"):
        VocabPart.of(**inputs, vocab_offset=0)
    with torch.no_grad():
        assert isinstance(VocabPart.of(**inputs, vocab_offset=0), VocabPart)


@pytest.mark.parametrize(
    ("name", "value"), [("vocab_offset", 0), ("vocab_offset", 7), ("batch_invariant", True)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_the_reference_does_not_know(name, value, dtype):
    impl = "reference" if dtype == torch.float32 else "auto"
    op = VocabPart.of if name == "vocab_offset" else linear_token_log_probs
    with pytest.raises(ValueError, match=rf"{name}: expected .* got {value}; leave it out"):
        op(HIDDEN.to(dtype), WEIGHT.to(dtype), TOKENS, impl=impl, **{name: value})


@pytest.mark.parametrize("first", [-1, 2.0, True])
def test_no_first_class_of_a_shard(first):
    with pytest.raises(ValueError, match="vocab_offset: expected an integer >= 0, got"):
        VocabPart.of(**GOOD, vocab_offset=first)


def test_explicit_cpu_refuses_a_dtype_it_has_no_kernel_for():
    with pytest.raises(
        ValueError, match=r"float32, bfloat16, float16 with 'cpu', got torch\.float64"
    ):
        linear_token_log_probs(HIDDEN.double(), WEIGHT.double(), TOKENS, impl="cpu")


def test_float64_runs_through_the_reference_and_says_so_once(caplog):
    from fusedrl.ops import _dispatch

    _dispatch._warned.clear()
    for _ in range(2):
        out = linear_token_log_probs(HIDDEN.double(), WEIGHT.double(), TOKENS).log_probs
    assert out.dtype == torch.float64
    assert len([r for r in caplog.records if "reference implementation" in r.message]) == 1


def test_autocast_does_not_hide_a_dtype():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(TypeError, match="hidden: expected a floating-point dtype"):
            linear_token_log_probs(HIDDEN.long(), WEIGHT.long(), TOKENS)
        out = linear_token_log_probs(HIDDEN.double(), WEIGHT.double(), TOKENS).log_probs
    assert out.dtype == torch.float64


@pytest.mark.parametrize("name", ["hidden", "weight", "bias", "temperature"])
def test_a_forward_mode_tangent_is_refused(name):
    inputs = {**GOOD, "bias": torch.zeros(5), "temperature": torch.tensor(1.0)}
    plain = linear_token_log_probs(**inputs).log_probs
    with forward_ad.dual_level():
        assert torch.equal(linear_token_log_probs(**inputs).log_probs, plain)
        inputs[name] = forward_ad.make_dual(inputs[name], torch.ones_like(inputs[name]))
        with pytest.raises(NotImplementedError, match=f"{name}: .* impl='reference'"):
            linear_token_log_probs(**inputs)


def test_the_reference_has_forward_mode():
    def function(hidden):
        return linear_token_log_probs(hidden, WEIGHT.double(), TOKENS, impl="reference").log_probs

    hidden, direction = HIDDEN.double(), torch.randn(4, 3).double()
    tangent = torch.func.jvp(function, (hidden,), (direction,))[1]
    step = 1e-6 * direction
    truth = (function(hidden + step) - function(hidden - step)) / 2e-6
    torch.testing.assert_close(tangent, truth, rtol=1e-6, atol=1e-8)
