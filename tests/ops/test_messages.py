"""Every refusal of an op names the argument, what was expected, what came, and the remedy."""

from __future__ import annotations

import inspect
import itertools
import re

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
    "top_k_kl": {
        "logits": ROWS,
        "ids": torch.tensor([[0, 1]]).expand(T, K),
        "teacher_log_probs": torch.full((T, K), -2.0),
    },
    "linear_policy_loss": HEAD | {"tokens": TOKENS, "mask": None, "advantages": VALUES},
    "token_kl": {"log_probs": VALUES, "ref_log_probs": VALUES},
    "importance_weights": {"log_probs": VALUES, "rollout_log_probs": VALUES},
}
GOOD["linear_top_k_kl"] = HEAD | {k: v for k, v in GOOD["top_k_kl"].items() if k != "logits"}

OF_LOGITS = ["token_log_probs", "exact_kl", "top_k_kl"]
OF_HIDDEN = [name for name in GOOD if name.startswith("linear")]
OF_ROWS = [*OF_LOGITS, *OF_HIDDEN]
OF_VALUES = ["token_kl", "importance_weights"]
WITH_TOKENS = ["token_log_probs", "linear_token_log_probs", "linear_policy_loss"]
WITH_DIRECTION = ["exact_kl", "linear_exact_kl", "top_k_kl", "linear_top_k_kl"]
WITH_TEACHER = ["top_k_kl", "linear_top_k_kl"]
LOSS, TEACHER = ["linear_policy_loss"], torch.full((T, K), -2.0)
JS = {"direction": "jensen_shannon"}
SHORT, LIST = VALUES[:3], [VALUES]


def nested(*lengths, width=()):
    samples = [torch.zeros(n, *width) for n in lengths]
    return torch.nested.nested_tensor(samples, layout=torch.jagged)


def lists(op, **change):
    """Both columns of an op over values as lists of one sample."""
    return (op, dict.fromkeys(GOOD[op], LIST) | change)


# No flag, and no number.
FLAGS = ("shift", "entropy", "batch_invariant")
NUMBERS = ("temperature", "scale", "softcap", "ref_scale", "coeff", "low", "high", "clip")
NUMBERS += ("dual_clip", "normalizer", "kl_coeff", "entropy_coeff")


def options_of_another_type():
    """Every flag and every number of every op, in each of both implementations."""
    for op in GOOD:
        known = inspect.signature(getattr(fusedrl, op)).parameters
        flags = [name for name in known if isinstance(known[name].default, bool)]
        assert set(flags) <= set(FLAGS), "a flag that nothing checks"
        for impl in ("auto", "reference"):
            for name, value in itertools.product(flags, ("no", 0.01, 1, None, torch.tensor(True))):
                yield [op], {name: value, "impl": impl}, name
            for name in filter(known.__contains__, NUMBERS):
                yield [op], {name: True, "impl": impl}, name


# The ops, what is changed of their good arguments, and whose fault the message says it is.
REFUSALS = [
    *options_of_another_type(),
    (list(GOOD), {"mask": SHORT > 0}, "mask"),
    (list(GOOD), {"mask": VALUES}, "mask"),
    (list(GOOD), {"mask": nested(1, 3) > 0}, "mask"),
    (list(GOOD), {"impl": "fast"}, "impl"),
    (list(GOOD), {"impl": "cuda"}, "impl"),
    (["token_log_probs", *OF_VALUES], {"impl": "triton"}, "impl"),
    (list(GOOD), {"offsets": torch.tensor([0, 3])}, "offsets"),
    (list(GOOD), {"offsets": torch.tensor([0, 3, 2, 4])}, "offsets"),
    (list(GOOD), {"offsets": torch.tensor([0.0, 4.0])}, "offsets"),
    (list(GOOD), {"offsets": torch.tensor([[0, 4]])}, "offsets"),
    (list(GOOD), {"offsets": [0, 4]}, "offsets"),
    (OF_ROWS, {"shift": True}, "offsets"),
    (OF_ROWS, {"temperature": 0.0}, "temperature"),
    (OF_ROWS, {"temperature": "hot"}, "temperature"),
    (OF_ROWS, {"temperature": torch.ones(2)}, "temperature"),
    (OF_ROWS, {"temperature": torch.ones((), device="meta")}, "temperature"),
    (OF_LOGITS, {"logits": ROWS[0]}, "logits"),
    (OF_LOGITS, {"logits": ROWS[:, :0]}, "logits"),
    (OF_LOGITS, {"logits": ROWS.long()}, "logits"),
    (OF_LOGITS, {"logits": None}, "logits"),
    (OF_LOGITS, {"logits": {"logits": ROWS}}, "logits"),
    (OF_LOGITS, {"logits": ROWS.to_sparse()}, "logits"),
    (OF_HIDDEN, {"hidden": torch.zeros(H)}, "hidden"),
    (OF_HIDDEN, {"hidden": HEAD["hidden"].long()}, "hidden"),
    (OF_HIDDEN, {"weight": WEIGHT[:, :2]}, "weight"),
    (OF_HIDDEN, {"weight": WEIGHT.T.contiguous()}, "weight"),
    (OF_HIDDEN, {"weight": WEIGHT.bfloat16()}, "weight"),
    (OF_HIDDEN, {"weight": torch.nn.Linear(H, V)}, "weight"),
    (OF_HIDDEN, {"weight": torch.nn.Tanh()}, "weight"),
    (OF_HIDDEN, {"bias": torch.zeros(V + 1)}, "bias"),
    (OF_HIDDEN, {"softcap": 0.0}, "softcap"),
    (OF_HIDDEN, {"scale": -1.0}, "scale"),
    (WITH_TOKENS, {"tokens": TOKENS[:3]}, "tokens"),
    (WITH_TOKENS, {"tokens": VALUES}, "tokens"),
    (WITH_TOKENS, {"tokens": nested(1, 3).long()}, "tokens"),
    (WITH_TOKENS, {"tokens": TOKENS + 2}, "tokens"),
    (WITH_TOKENS, {"tokens": TOKENS + 2, "impl": "reference"}, "tokens"),
    (WITH_DIRECTION, {"direction": "both"}, "direction"),
    (WITH_DIRECTION, {"beta": 0.5}, "beta"),
    (WITH_DIRECTION, JS | {"beta": 1.5}, "beta"),
    (["exact_kl"], {"ref_logits": ROWS[:3]}, "ref_logits"),
    (["exact_kl"], {"ref_logits": ROWS.bfloat16()}, "ref_logits"),
    (["exact_kl"], {"ref_logits": None}, "ref_logits"),
    (["exact_kl"], {"logits": nested(1, 3, width=(V,))}, "ref_logits"),
    (["linear_exact_kl"], {"ref_hidden": torch.zeros(3, H)}, "ref_hidden"),
    (["linear_exact_kl"], {"ref_hidden": torch.zeros(T, H).bfloat16()}, "ref_weight"),
    (["linear_exact_kl"], {"ref_weight": torch.zeros(V + 1, H)}, "ref_weight"),
    (
        ["linear_token_log_probs", "linear_exact_kl", "linear_top_k_kl"],
        {"batch_invariant": True, "impl": "reference"},
        "batch_invariant",
    ),
    (WITH_TEACHER, {"tail": "none"}, "tail"),
    (WITH_TEACHER, {"ids": torch.zeros(3, K).long()}, "ids"),
    (WITH_TEACHER, {"ids": torch.zeros(T, K)}, "ids"),
    (WITH_TEACHER, {"ids": torch.full((T, K), V)}, "ids"),
    (WITH_TEACHER, {"ids": torch.zeros(T, K).long()}, "ids"),
    (WITH_TEACHER, {"ids": torch.full((T, K), V), "impl": "reference"}, "ids"),
    (WITH_TEACHER, {"ids": torch.zeros(T, K).long(), "impl": "reference"}, "ids"),
    (WITH_TEACHER, {"teacher_log_probs": TEACHER[:, :1]}, "teacher_log_probs"),
    (WITH_TEACHER, {"teacher_log_probs": TEACHER.long()}, "teacher_log_probs"),
    (WITH_TEACHER, {"teacher_log_probs": TEACHER + 2}, "teacher_log_probs"),
    (["linear_token_log_probs"], {"group": object()}, "vocab_offset"),
    (["linear_token_log_probs"], {"vocab_offset": -1}, "vocab_offset"),
    (["linear_token_log_probs"], {"vocab_offset": 0, "impl": "reference"}, "vocab_offset"),
    (LOSS, {"vocab_offset": 0}, "vocab_offset, group"),
    (LOSS, {"loss": "ppo"}, "loss"),
    (LOSS, {"ratio": "batch"}, "ratio"),
    (LOSS, {"loss": "cispo", "ratio": "sequence"}, "ratio"),
    (LOSS, {"aggregation": "mean"}, "aggregation"),
    (LOSS, {"kl_estimator": "k4"}, "kl_estimator"),
    (LOSS, {"clip": (0.1, 0.2, 0.3)}, "clip"),
    (LOSS, {"clip": (2.0, 0.2)}, "clip"),
    (LOSS, {"clip": "0.2"}, "clip"),
    (LOSS, {"dual_clip": 1.1}, "dual_clip"),
    (LOSS, {"dual_clip": "3"}, "dual_clip"),
    (LOSS, {"dual_clip": 3.0, "loss": "cispo"}, "dual_clip"),
    (LOSS, {"dual_clip": 3.0, "loss": "reinforce"}, "dual_clip"),
    (LOSS, {"kl_coeff": 0.1}, "ref_log_probs"),
    (LOSS, {"kl_coeff": 1e300, "ref_log_probs": VALUES}, "kl_coeff"),
    (LOSS, {"entropy_coeff": -1e300}, "entropy_coeff"),
    (LOSS, {"kl_coeff": float("nan")}, "kl_coeff"),
    (LOSS, {"entropy_coeff": "0.1"}, "entropy_coeff"),
    (LOSS, {"loss": "dr_grpo"}, "normalizer"),
    (LOSS, {"normalizer": 0.0}, "normalizer"),
    (LOSS, {"importance": {"level": "token"}}, "rollout_log_probs"),
    (LOSS, {"importance": "token"}, "importance"),
    (LOSS, {"importance": {"levels": "token"}}, "importance"),
    (LOSS, {"main_grad": WEIGHT.bfloat16()}, "main_grad"),
    (LOSS, {"main_grad": WEIGHT[:2]}, "main_grad"),
    (LOSS, {"main_grad": WEIGHT}, "main_grad"),
    (LOSS, {"main_grad": WEIGHT[:1].expand(V, H)}, "main_grad"),
    (LOSS, {"vocab_offset": 0, "group": "tensor"}, "group"),
    (["linear_token_log_probs"], {"vocab_offset": True}, "vocab_offset"),
    (LOSS, {"advantages": VALUES, "offsets": torch.tensor([0, 2, 2, 3, 4])}, "advantages"),
    (["token_kl"], {"reward": VALUES, "offsets": torch.tensor([0, 2, 2, 3, 4])}, "reward"),
    (LOSS, {"advantages": SHORT}, "advantages"),
    (LOSS, {"advantages": VALUES.clone().requires_grad_()}, "advantages"),
    (LOSS, {"old_log_probs": SHORT}, "old_log_probs"),
    (LOSS, {"ref_log_probs": SHORT}, "ref_log_probs"),
    (LOSS, {"rollout_log_probs": SHORT}, "rollout_log_probs"),
    (LOSS, {"token_weights": SHORT}, "token_weights"),
    (["token_kl"], {"estimator": "k4"}, "estimator"),
    (["token_kl"], {"ref_log_probs": SHORT}, "ref_log_probs"),
    (["token_kl"], {"coeff": 1e31}, "coeff"),
    (["token_kl"], {"reward": SHORT}, "reward"),
    (["token_kl"], {"reward": SHORT, "offsets": torch.tensor([0, 1, 4])}, "reward"),
    (["token_kl"], {"log_probs": ROWS, "ref_log_probs": ROWS, "offsets": TOKENS}, "offsets"),
    (["importance_weights"], {"level": "batch"}, "level"),
    (["importance_weights"], {"level": "sequence"}, "offsets"),
    (["importance_weights"], {"mode": "clip"}, "mode"),
    (["importance_weights"], {"rollout_log_probs": SHORT}, "rollout_log_probs"),
    (["importance_weights"], {"low": -1.0}, "low"),
    (["importance_weights"], {"low": 3.0}, "low"),
    (
        ["importance_weights"],
        {name: torch.zeros(1, 1, 1) for name in GOOD["importance_weights"]},
        "log_probs",
    ),
    (OF_VALUES, {"nan": "zero"}, "nan"),
    (OF_VALUES, {"log_probs": nested(1, 3)}, "ref_log_probs|rollout_log_probs"),
    (OF_VALUES, {"log_probs": VALUES.long()}, "log_probs"),
]
OF_LISTS = [
    *(lists(op, offsets=torch.tensor([0, 4])) for op in OF_VALUES),
    *(lists(op, log_probs=[]) for op in OF_VALUES),
    *(lists(op, log_probs=[ROWS]) for op in OF_VALUES),
    *(lists(op, log_probs=[VALUES[0]]) for op in OF_VALUES),
    *(lists(op, log_probs=LIST * 2) for op in OF_VALUES),
    *(lists(op, log_probs=[VALUES, ROWS]) for op in OF_VALUES),
    *(lists(op, mask=[SHORT > 0]) for op in OF_VALUES),
    *(lists(op, mask=VALUES > 0) for op in OF_VALUES),
    lists("token_kl", reward=[SHORT]),
    lists("token_kl", reward=LIST * 2),
    lists("token_kl", reward=VALUES),
]
NESTED = [
    ("token_log_probs", {"logits": nested(1, 3, width=(V,)), "tokens": nested(2, 2).long()}),
    ("token_log_probs", {"logits": nested(1, 3), "tokens": nested(1, 3).long()}),
    (
        "token_log_probs",
        {
            "logits": nested(1, 3, width=(V,)),
            "tokens": nested(1, 3).long(),
            "offsets": torch.tensor([0, 1, 4]),
        },
    ),
    ("token_kl", {"log_probs": nested(1, 3), "ref_log_probs": nested(1, 3), "reward": VALUES}),
]
CASES = [
    pytest.param(op, change, name, id=f"{op}-{i}-{name}")
    for i, (ops, change, name) in enumerate(REFUSALS)
    for op in ops
]
CASES += [(op, change, r"\w+(: sample \d)?") for op, change in (*OF_LISTS, *NESTED)]


def has_all_parts(said, name=r"\w+"):
    """Of one line: the argument, what was expected, what came, and what to do."""
    assert re.fullmatch(rf"(?:{name}): expected [^;]+, got [^;]+; \w[^\n]+", said), said
    assert len(said) <= 240, said


@pytest.mark.parametrize(("op", "change", "name"), CASES)
def test_a_refusal_has_all_parts(op, change, name):
    with pytest.raises((TypeError, ValueError, RuntimeError)) as refusal:
        getattr(fusedrl, op)(**GOOD[op] | change)
    has_all_parts(str(refusal.value), name)


@pytest.mark.parametrize(
    "change",
    [
        {"statistics": torch.zeros(3, 4)},
        {"entropy": True},
        {"temperature": torch.tensor(2.0)},
    ],
)
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
def test_a_class_that_does_not_exist_is_named_by_its_place(impl, shape, place):
    tokens = torch.zeros(shape, dtype=torch.int64)
    tokens.view(-1)[4] = V
    ids = torch.stack((tokens, torch.ones_like(tokens)), -1)
    hidden, teacher = torch.zeros(*shape, H), torch.full((*shape, 2), -2.0)
    logits = torch.zeros(*shape, V)
    calls = [
        lambda: fusedrl.token_log_probs(logits, tokens, impl=impl),
        lambda: fusedrl.linear_token_log_probs(hidden, WEIGHT, tokens, impl=impl),
        lambda: fusedrl.linear_policy_loss(
            hidden, WEIGHT, tokens, None, torch.zeros(shape), impl=impl
        ),
        lambda: fusedrl.top_k_kl(logits, ids, teacher, impl=impl),
        lambda: fusedrl.linear_top_k_kl(hidden, WEIGHT, ids, teacher, impl=impl),
        lambda: fusedrl.top_k_kl(logits, (ids == V).long(), teacher, impl=impl),
        lambda: fusedrl.top_k_kl(logits, ids % V, teacher + 9 * (ids == V), impl=impl),
    ]
    for call in calls[:5]:
        with pytest.raises(RuntimeError, match=f"got {V} at {place}; "):
            call()
    # The same class twice, in the first token; and too much probability, where the id was wrong.
    first = "token 0" if len(shape) == 1 else "row 0, column 0"
    with pytest.raises(RuntimeError, match=f"^ids: .* twice at {first}; "):
        calls[5]()
    with pytest.raises(RuntimeError, match=rf"^teacher_log_probs: .* got \S+ at {place}; "):
        calls[6]()
