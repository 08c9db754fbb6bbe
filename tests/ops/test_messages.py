"""Every refusal of an op names the argument, what was expected, what came, and the remedy.

Numbers of every kind are taken.
"""

from __future__ import annotations

import inspect
import itertools
import re
from fractions import Fraction

import numpy as np
import pytest
import torch

import fusedrl
from fusedrl import VocabPart

T, V, H, K = 4, 5, 3, 2
ROWS, WEIGHT = torch.zeros(T, V), torch.zeros(V, H)
VALUES, TOKENS = torch.zeros(T), torch.arange(T)
HEAD = {"hidden": torch.zeros(T, H), "weight": WEIGHT}
GOOD = {
    "token_log_probs": {"logits": ROWS, "tokens": TOKENS},
    "linear_token_log_probs": HEAD | {"tokens": TOKENS},
    "exact_kl": {"logits": ROWS, "ref_logits": ROWS},
    "linear_exact_kl": HEAD | {"ref_hidden": torch.zeros(T, H), "ref_weight": WEIGHT},
    "linear_policy_loss": HEAD | {"tokens": TOKENS, "mask": None, "token_advantages": VALUES},
    "token_kl": {"log_probs": VALUES, "ref_log_probs": VALUES},
}
OPS = list(GOOD)
# What is computed in torch over them.
IDS, TEACHER = torch.tensor([[0, 1]]).expand(T, K), torch.full((T, K), -2.0)
KNOWN = {"ids": IDS, "teacher_log_probs": TEACHER}
GOOD |= {
    "top_k_kl": {"logits": ROWS} | KNOWN,
    "linear_top_k_kl": HEAD | KNOWN,
    "importance_weights": {"log_probs": VALUES, "rollout_log_probs": VALUES},
    "support_log_probs": HEAD | {"tokens": TOKENS, "support": (TOKENS, torch.arange(T + 1))},
}

OF_LOGITS = ["token_log_probs", "exact_kl", "top_k_kl"]
OF_HIDDEN = [name for name in GOOD if "hidden" in GOOD[name]]
OF_ROWS = [*OF_LOGITS, *OF_HIDDEN]
OF_VALUES = ["token_kl", "importance_weights"]
WITH_TOKENS = [name for name in GOOD if "tokens" in GOOD[name]]
WITH_TEACHER = ["top_k_kl", "linear_top_k_kl"]
OF_TWO = ["exact_kl", "linear_exact_kl"]
WITH_DIRECTION = [*OF_TWO, *WITH_TEACHER]
LOSS, WEIGHTS, SUPPORT = ["linear_policy_loss"], ["importance_weights"], ["support_log_probs"]
OF_TOKENS = ("token_advantages", "old_log_probs", "token_weights")
RECIPE = fusedrl.ops.RECIPES["grpo"]
NO_FACTORS = (0, -1.0, float("nan"), 1e31, 1e-31, "30", 1j)
NO_BETAS = (-0.1, 1e-31, float("nan"), "0.5")
JS = {"direction": "jensen_shannon"}
SHORT, LIST = VALUES[:3], [VALUES]


def nested(*lengths, width=()):
    samples = [torch.zeros(n, *width) for n in lengths]
    return torch.nested.nested_tensor(samples, layout=torch.jagged)


# No flag, and no number.
FLAGS = ("shift", "entropy", "batch_invariant")
NUMBERS = ("temperature", "scale", "softcap", "ref_scale", "coeff", "low", "high")
NUMBERS += ("kl_coeff", "entropy_coeff")


def options_of_another_type():
    """Every flag and every number of every op, in each of its implementations."""
    for op in GOOD:
        known = inspect.signature(getattr(fusedrl, op)).parameters
        flags = [name for name in known if isinstance(known[name].default, bool)]
        assert set(flags) <= set(FLAGS), "a flag that nothing checks"
        for impl in ({"impl": "auto"}, {"impl": "reference"}) if op in OPS else ({},):
            for name, value in itertools.product(flags, ("no", 1, None)):
                yield [op], {name: value} | impl, name
            for name in filter(known.__contains__, NUMBERS):
                yield [op], {name: True} | impl, name


# The ops, what is changed of their good arguments, and whose fault the message says it is.
WRONG_TYPES = [
    (list(GOOD), {"mask": VALUES}, "mask"),
    (list(GOOD), {"mask": nested(1, 3) > 0}, "mask"),
    (list(GOOD), {"offsets": [0, 4]}, "offsets"),
    (OF_ROWS, {"temperature": "hot"}, "temperature"),
    (OF_LOGITS, {"logits": ROWS.long()}, "logits"),
    (OF_LOGITS, {"logits": None}, "logits"),
    (OF_LOGITS, {"logits": ROWS.to_sparse()}, "logits"),
    (OF_HIDDEN, {"hidden": HEAD["hidden"].long()}, "hidden"),
    (WITH_TOKENS, {"tokens": VALUES}, "tokens"),
    (WITH_TOKENS, {"tokens": nested(1, 3).long()}, "tokens"),
    (["exact_kl"], {"ref_logits": None}, "ref_logits"),
    (["exact_kl"], {"logits": nested(1, 3, width=(V,))}, "ref_logits"),
    (["top_k_kl"], {"logits": nested(1, 3, width=(V,))}, "ids"),
    (WEIGHTS, {"log_probs": LIST}, "log_probs"),
    (LOSS, {"vocab_offset": 0, "vocab_group": "tensor"}, "vocab_group"),
    (OF_VALUES, {"log_probs": nested(1, 3)}, "ref_log_probs|rollout_log_probs"),
    (["token_kl"], {"log_probs": VALUES.long()}, "log_probs"),
    (OF_HIDDEN, {"hidden": HEAD["hidden"].to_sparse()}, "hidden"),
]
WRONG_VALUES = [
    (list(GOOD), {"mask": SHORT > 0}, "mask"),
    (OPS, {"impl": "fast"}, "impl"),
    (OPS, {"impl": "cuda"}, "impl"),
    (["token_log_probs", "token_kl"], {"impl": "triton"}, "impl"),
    (list(GOOD), {"offsets": torch.tensor([0, 3])}, "offsets"),
    (list(GOOD), {"offsets": torch.tensor([0, 3, 2, 4])}, "offsets"),
    (list(GOOD), {"offsets": torch.tensor([[0, 4]])}, "offsets"),
    (OF_ROWS, {"shift": True}, "offsets"),
    (OF_ROWS, {"temperature": 0.0}, "temperature"),
    (OF_ROWS, {"temperature": torch.ones((), device="meta")}, "temperature"),
    (OF_LOGITS, {"logits": ROWS[0]}, "logits"),
    (OF_LOGITS, {"logits": ROWS[:, :0]}, "logits"),
    (OF_HIDDEN, {"hidden": torch.zeros(H)}, "hidden"),
    (OF_HIDDEN, {"weight": WEIGHT[:, :2]}, "weight"),
    (OF_HIDDEN, {"weight": WEIGHT.T.contiguous()}, "weight"),
    (OF_HIDDEN, {"weight": WEIGHT.bfloat16()}, "weight"),
    (OF_HIDDEN, {"bias": torch.zeros(V + 1)}, "bias"),
    (WITH_TOKENS, {"tokens": TOKENS[:3]}, "tokens"),
    (WITH_DIRECTION, {"direction": "both"}, "direction"),
    (WITH_DIRECTION, {"beta": 0.5}, "beta"),
    (WITH_DIRECTION, JS | {"beta": 1.5}, "beta"),
    (["exact_kl"], {"ref_logits": ROWS[:3]}, "ref_logits"),
    (["exact_kl"], {"ref_logits": ROWS.bfloat16()}, "ref_logits"),
    (["exact_kl"], {"ref_logits": torch.zeros(T, V + 1)}, "ref_logits"),
    *((OF_TWO, {"classes": value}, "classes") for value in (0, V + 1, True, 2.0, "2")),
    (["linear_exact_kl"], {"ref_hidden": torch.zeros(3, H)}, "ref_hidden"),
    (["linear_exact_kl"], {"ref_hidden": torch.zeros(T, H).bfloat16()}, "ref_weight"),
    (["linear_exact_kl"], {"ref_weight": torch.zeros(V + 1, H)}, "ref_weight"),
    (
        ["linear_token_log_probs", "linear_exact_kl"],
        {"batch_invariant": True, "impl": "reference"},
        "batch_invariant",
    ),
    (WITH_TEACHER, {"tail": "none"}, "tail"),
    (WITH_TEACHER, {"ids": IDS[:3]}, "ids"),
    (WITH_TEACHER, {"ids": IDS.to("meta")}, "ids"),
    (WITH_TEACHER, {"teacher_log_probs": TEACHER.to("meta")}, "teacher_log_probs"),
    (WITH_TEACHER, {"teacher_log_probs": TEACHER[:, :1]}, "teacher_log_probs"),
    (WEIGHTS, {"level": "batch"}, "level"),
    (WEIGHTS, {"level": "sequence"}, "offsets"),
    (WEIGHTS, {"mode": "clip"}, "mode"),
    (WEIGHTS, {"rollout_log_probs": SHORT}, "rollout_log_probs"),
    (WEIGHTS, {"low": 3.0}, "low"),
    (WEIGHTS, {"log_probs": nested(1, 3), "rollout_log_probs": nested(2, 2)}, "rollout_log_probs"),
    (SUPPORT, {"support": (TOKENS + 2, torch.arange(T + 1))}, "support"),
    (SUPPORT, {"support": (TOKENS.flip(0), torch.arange(T + 1))}, "support"),
    (SUPPORT, {"support": (TOKENS - 1, torch.arange(T + 1))}, "support"),
    (
        SUPPORT,
        {"support": (torch.tensor([0, 0, 1, 2, 3]), torch.tensor([0, 2, 3, 4, 5]))},
        "support",
    ),
    (["linear_token_log_probs"], {"vocab_group": object()}, "vocab_offset, vocab_group"),
    (["linear_token_log_probs", *LOSS], {"vocab_offset": 0}, "vocab_offset, vocab_group"),
    (LOSS, {"loss": "ppo"}, "loss"),
    *(
        (LOSS, {"loss": RECIPE._replace(**{name: "mean"})}, rf"loss\.{name}")
        for name in ("term", "ratio", "aggregation")
    ),
    (LOSS, {"kl_coeff": 0.1}, "ref_log_probs"),
    (LOSS, {"ref_log_probs": VALUES}, "ref_log_probs"),
    (LOSS, {"ref_log_probs": SHORT, "kl_coeff": 0.1}, "ref_log_probs"),
    (LOSS, {"loss": "dr_grpo"}, "normalizer"),
    (LOSS, {"normalizer": 0}, "normalizer"),
    (LOSS, {"normalizer": torch.ones(2)}, "normalizer"),
    (LOSS, {"entropy_coeff": float("nan")}, "entropy_coeff"),
    (LOSS, {"entropy_coeff": "0.1"}, "entropy_coeff"),
    (LOSS, {"advantages": VALUES[:1]}, "advantages"),
    (LOSS, {"token_advantages": None}, "advantages"),
    (LOSS, {"token_advantages": None, "advantages": VALUES}, "advantages"),
    *((LOSS, {name: SHORT}, name) for name in OF_TOKENS),
    (["token_kl"], {"reward": VALUES, "offsets": torch.tensor([0, 2, 4])}, "reward"),
    (["token_kl"], {"estimator": "k4"}, "estimator"),
    (["token_kl"], {"ref_log_probs": SHORT}, "ref_log_probs"),
    (["token_kl"], {"coeff": 1e31}, "coeff"),
    (["token_kl"], {"reward": SHORT}, "reward"),
    (["token_kl"], {"log_probs": ROWS, "ref_log_probs": ROWS, "offsets": TOKENS}, "offsets"),
    (OF_ROWS, {"temperature": torch.tensor(-1.0)}, "temperature"),
    (OF_ROWS, {"temperature": torch.ones((), requires_grad=True)}, "temperature"),
    (OF_HIDDEN, {"weight": WEIGHT[:0]}, "weight"),
    (OF_HIDDEN, {"bias": torch.zeros(V).half()}, "bias"),
    *((OF_HIDDEN, {name: value}, name) for name in ("scale", "softcap") for value in NO_FACTORS),
    (WITH_DIRECTION, {"direction": "forward", "beta": 0.5}, "beta"),
    *((WITH_DIRECTION, JS | {"beta": value}, "beta") for value in NO_BETAS),
]
WRONG_CONTENTS = [
    ([name for name in WITH_TOKENS if name in OPS], {"tokens": TOKENS + 2, "impl": impl}, "tokens")
    for impl in ("auto", "reference")
]
WRONG_CONTENTS += [
    (WITH_TEACHER, {"ids": torch.zeros(T, K).long()}, "ids"),
    (WITH_TEACHER, {"teacher_log_probs": TEACHER + 2}, "teacher_log_probs"),
]
REFUSALS = [
    *((*entry, (TypeError, ValueError)) for entry in options_of_another_type()),
    *((*entry, TypeError) for entry in WRONG_TYPES),
    *((*entry, ValueError) for entry in WRONG_VALUES),
    *((*entry, RuntimeError) for entry in WRONG_CONTENTS),
]


def has_all_parts(said, name=r"\w+"):
    """Of one line: the argument, what was expected, what came, and what to do."""
    assert re.fullmatch(rf"(?:{name}): expected [^;]+, got [^;]+; \w[^\n]+", said), said
    assert len(said) <= 240, said


@pytest.mark.parametrize("op", GOOD)
def test_a_refusal_has_all_parts(op):
    refusals = [entry[1:] for entry in REFUSALS if op in entry[0]]
    assert len(refusals) > 15
    for change, name, error in refusals:
        with pytest.raises(error) as refusal:
            getattr(fusedrl, op)(**GOOD[op] | change)
        has_all_parts(str(refusal.value), name)


PARTS = [{"statistics": torch.zeros(3, 4)}, {"entropy": True}, {"temperature": torch.tensor(2.0)}]


@pytest.mark.parametrize("change", PARTS)
def test_parts_that_do_not_fit(change):
    good = {"statistics": torch.zeros(2, 4), "temperature": torch.tensor(1.0), "entropy": False}
    for parts in ([VocabPart(**good), VocabPart(**good | change)], []):
        with pytest.raises(ValueError, match=r"^parts: ") as refusal:
            VocabPart.combine(parts)
        has_all_parts(str(refusal.value))


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("shape", "place"),
    [((6,), "token 4"), ((2, 3), "row 1, column 1"), ((1, 6), "row 0, column 4")],
)
@pytest.mark.parametrize("token", [V, -1])
def test_a_class_that_does_not_exist_is_named_by_its_place(impl, shape, place, token):
    tokens = torch.zeros(shape, dtype=torch.int64)
    tokens.view(-1)[4] = token
    hidden, logits = torch.zeros(*shape, H), torch.zeros(*shape, V)
    calls = [
        lambda: fusedrl.token_log_probs(logits, tokens, impl=impl),
        lambda: fusedrl.linear_token_log_probs(hidden, WEIGHT, tokens, impl=impl),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=f"got {token} at {place}; "):
            call()


LOGITS = torch.linspace(-2, 2, 20).view(4, 5)
P, Q = torch.linspace(-3, -1, 4), torch.linspace(-2, -1.5, 4)


def scaled(temperature):
    return fusedrl.token_log_probs(LOGITS, TOKENS, temperature=temperature).log_probs


def of_numbers(x):
    head = {"temperature": x, "scale": x, "softcap": x}
    return (
        fusedrl.linear_token_log_probs(LOGITS, torch.eye(V), TOKENS, **head).log_probs,
        fusedrl.token_kl(P, Q, reward=P, coeff=x).reward,
        scaled(x),
    )


REAL_NUMBERS = [2, np.float16(2), np.float32(2), np.float64(2), np.int64(2), Fraction(2)]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", REAL_NUMBERS, ids=repr)
def test_every_real_number_is_a_scalar(value):
    assert all(map(torch.equal, of_numbers(value), of_numbers(2.0)))


def test_a_scalar_may_vary_under_vmap():
    temperatures = torch.tensor([0.5, 2.0])
    expected = torch.stack([scaled(0.5), scaled(2.0)])
    assert torch.equal(torch.vmap(scaled)(temperatures), expected)


@pytest.mark.parametrize("name", ["hidden", "weight", "bias"])
def test_a_part_does_not_differentiate(name):
    inputs = HEAD | {"tokens": TOKENS, "bias": torch.zeros(V)}
    inputs[name] = inputs[name].clone().requires_grad_()
    with pytest.raises(ValueError, match=r"hidden: expected inputs .* torch.no_grad\(\)"):
        VocabPart.of(**inputs, vocab_offset=0)
    with torch.no_grad():
        assert isinstance(VocabPart.of(**inputs, vocab_offset=0), VocabPart)
