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


def on_meta(tensor):
    return torch.empty_like(tensor, device="meta")


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"hidden": [[0.0]]}, TypeError, "hidden: expected a dense tensor .* got list"),
        ({"hidden": HIDDEN.to_sparse()}, TypeError, r"hidden: .*sparse_coo; .*\.to_dense"),
        ({"hidden": HIDDEN.long(), "weight": WEIGHT.long()}, TypeError, "hidden: .* got torch.int"),
        ({"hidden": HIDDEN[0]}, ValueError, r"hidden: expected \[N, H\] packed .* got shape \(3,"),
        ({"hidden": HIDDEN.view(1, 1, 4, 3)}, ValueError, r"hidden: .* \(1, 1, 4, 3\)"),
        ({"hidden": HIDDEN.sum()}, ValueError, r"weight: expected \[V, H\] for hidden .* \(\)"),
        (
            {"hidden": HIDDEN[:, :0], "weight": WEIGHT[:, :0]},
            ValueError,
            "hidden: expected H of at least 1",
        ),
        ({"weight": [1.0]}, TypeError, "weight: expected a dense tensor, got list"),
        ({"weight": WEIGHT[:, :2]}, ValueError, r"weight: expected \[V, 3\] .* got \(5, 2\)"),
        ({"weight": WEIGHT[0]}, ValueError, r"weight: expected \[V, 3\] .* got \(3,\)"),
        ({"weight": WEIGHT[None]}, ValueError, r"weight: expected \[V, 3\] .* got \(1, 5, 3\)"),
        ({"weight": WEIGHT[:0]}, ValueError, r"weight: expected \[V, 3\] .* got \(0, 3\)"),
        ({"weight": WEIGHT.double()}, ValueError, r"weight: .*float32 as hidden .*\.to\(\)"),
        ({"weight": WEIGHT.bfloat16()}, ValueError, r"weight: .*float32 as hidden .*bfloat16"),
        ({"weight": on_meta(WEIGHT)}, ValueError, r"weight: expected device cpu, got meta; .*\.to"),
        ({"bias": torch.zeros(4)}, ValueError, r"bias: expected shape \(5,\), got \(4,\)"),
        ({"bias": torch.zeros(5, 1)}, ValueError, r"bias: expected shape \(5,\), got \(5, 1\)"),
        ({"bias": torch.zeros(5).half()}, ValueError, r"bias: .*float32 as hidden .*float16"),
        ({"bias": 1.0}, TypeError, "bias: expected a dense tensor, got float; .*as_tensor"),
        ({"bias": on_meta(torch.zeros(5))}, ValueError, "bias: expected device cpu, got meta"),
        ({"tokens": TOKENS[:3]}, ValueError, r"tokens: expected shape \(4,\) .*, got \(3,\);"),
        ({"tokens": TOKENS.float()}, TypeError, r"tokens: expected an integer .*\.long"),
        ({"tokens": [0, 1]}, TypeError, "tokens: expected a dense .* like hidden"),
        ({"tokens": on_meta(TOKENS)}, ValueError, "tokens: expected device cpu, got meta"),
        ({"mask": TOKENS}, TypeError, r"mask: expected torch.bool, .*\.bool"),
        ({"mask": TOKENS[:3] > 0}, ValueError, r"mask: expected shape \(4,\)"),
        ({"shift": True}, ValueError, r"offsets: .* \[N, H\] hidden with shift=True, got None"),
        ({"offsets": torch.tensor([0, 3])}, ValueError, "offsets: .* from 0 to 4, got"),
        ({"offsets": torch.tensor([0, 3, 2, 4])}, ValueError, "offsets: .* non-decreasing"),
        ({"offsets": torch.tensor([0.0, 4.0])}, ValueError, "offsets: expected a 1-D int64"),
        ({"temperature": 0.0}, ValueError, "temperature: expected a number from 1e-30"),
        ({"temperature": torch.ones(2)}, ValueError, "temperature: expected a float"),
        ({"temperature": "hot"}, TypeError, "temperature: expected a real number"),
        ({"vocab_offset": -1}, ValueError, "vocab_offset: expected an integer >= 0, got -1"),
        ({"vocab_offset": 2.0}, ValueError, "vocab_offset: expected an integer >= 0, got 2.0"),
        ({"group": object()}, ValueError, "vocab_offset: expected the first class .* got None"),
        ({"impl": "cuda"}, ValueError, "impl: expected tensors on cuda with 'cuda', got cpu"),
        ({"impl": "triton"}, ValueError, "impl: .* cuda with 'triton', got cpu; use 'auto'"),
        ({"impl": "fast"}, ValueError, "impl: expected one of auto, cpu, .* got 'fast'"),
    ],
)
def test_bad_input_names_argument_expectation_and_remedy(change, error, match):
    with pytest.raises(error, match=match):
        linear_token_log_probs(**{**GOOD, **change})


@pytest.mark.parametrize("name", ["scale", "softcap"])
@pytest.mark.parametrize(
    "value", [0.0, 0, -1.0, float("nan"), float("inf"), 1e31, 1e-31, "30", 1j, [30.0]], ids=repr
)
def test_factors_of_the_logits_out_of_range(name, value):
    with pytest.raises(ValueError, match=rf"{name}: expected a number from 1e-30 to 1e\+30, got "):
        linear_token_log_probs(**GOOD, **{name: value})


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("token", [5, -1, -100])
def test_tokens_out_of_range(impl, token):
    tokens = torch.tensor([0, 1, token, 2])
    mask = torch.tensor([False, True, True, True])
    with pytest.raises(
        RuntimeError, match=rf"tokens: .* \[0, 5\), got {token} at token 2; leave it out"
    ):
        linear_token_log_probs(HIDDEN, WEIGHT, tokens, mask, impl=impl)
    assert linear_token_log_probs(HIDDEN, WEIGHT, tokens, ~mask, impl=impl)[2] == 0


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
    with pytest.raises(ValueError, match=r"group: expected the process group .* torch.no_grad\(\)"):
        linear_token_log_probs(**inputs, vocab_offset=0)
    with torch.no_grad():
        assert isinstance(linear_token_log_probs(**inputs, vocab_offset=0), VocabPart)


@pytest.mark.parametrize(
    ("name", "value"), [("vocab_offset", 0), ("vocab_offset", 7), ("batch_invariant", True)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_the_reference_does_not_know(name, value, dtype):
    impl = "reference" if dtype == torch.float32 else "auto"
    with pytest.raises(ValueError, match=rf"{name}: expected .* got {value}; leave it out"):
        linear_token_log_probs(
            HIDDEN.to(dtype), WEIGHT.to(dtype), TOKENS, impl=impl, **{name: value}
        )


def test_explicit_cpu_refuses_a_dtype_it_has_no_kernel_for():
    with pytest.raises(
        ValueError, match=r"float32, bfloat16, float16 with 'cpu', got torch\.float64"
    ):
        linear_token_log_probs(HIDDEN.double(), WEIGHT.double(), TOKENS, impl="cpu")


def test_float64_runs_through_the_reference_and_says_so_once(caplog):
    from fusedrl.ops import _dispatch

    _dispatch._warned.clear()
    for _ in range(2):
        out = linear_token_log_probs(HIDDEN.double(), WEIGHT.double(), TOKENS)
    assert out.dtype == torch.float64
    assert len([r for r in caplog.records if "reference implementation" in r.message]) == 1


def test_autocast_does_not_hide_a_dtype():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(TypeError, match="hidden: expected a floating-point dtype"):
            linear_token_log_probs(HIDDEN.long(), WEIGHT.long(), TOKENS)
        out = linear_token_log_probs(HIDDEN.double(), WEIGHT.double(), TOKENS)
    assert out.dtype == torch.float64


@pytest.mark.parametrize("name", ["hidden", "weight", "bias", "temperature"])
def test_a_forward_mode_tangent_is_refused(name):
    inputs = {**GOOD, "bias": torch.zeros(5), "temperature": torch.tensor(1.0)}
    plain = linear_token_log_probs(**inputs)
    with forward_ad.dual_level():
        assert torch.equal(linear_token_log_probs(**inputs), plain)
        inputs[name] = forward_ad.make_dual(inputs[name], torch.ones_like(inputs[name]))
        with pytest.raises(NotImplementedError, match=f"{name}: .* impl='reference'"):
            linear_token_log_probs(**inputs)


def test_the_reference_has_forward_mode():
    def function(hidden):
        return linear_token_log_probs(hidden, WEIGHT.double(), TOKENS, impl="reference")

    hidden, direction = HIDDEN.double(), torch.randn(4, 3).double()
    tangent = torch.func.jvp(function, (hidden,), (direction,))[1]
    step = 1e-6 * direction
    truth = (function(hidden + step) - function(hidden - step)) / 2e-6
    torch.testing.assert_close(tangent, truth, rtol=1e-6, atol=1e-8)
