"""top_k_kl and linear_top_k_kl refuse what does not fit, and say what would."""

from __future__ import annotations

import pytest
import torch

from fusedrl import linear_top_k_kl, top_k_kl

IDS, TEACHER = torch.tensor([[0, 1]]).expand(4, 2), torch.full((4, 2), -2.0)
KNOWN = {"ids": IDS, "teacher_log_probs": TEACHER}
LOGITS, HEAD = {"logits": torch.zeros(4, 5)}, {"hidden": torch.zeros(4, 3)}
HEAD["weight"] = torch.zeros(5, 3)
NESTED = torch.nested.nested_tensor([torch.zeros(1, 5), torch.zeros(3, 5)], layout=torch.jagged)

# Of what both ops take.
REFUSALS = [
    ({"ids": None}, TypeError, "^ids: expected a dense tensor like .*, got NoneType; pass"),
    ({"ids": IDS.float()}, TypeError, r"^ids: expected an integer dtype .*\.long\(\)"),
    ({"ids": IDS > 0}, TypeError, "^ids: expected an integer dtype up to int64, got torch.bool"),
    ({"ids": IDS[:, 0]}, ValueError, r"^ids: expected shape \(4, k\) .* got \(4,\)"),
    ({"ids": IDS[:3]}, ValueError, r"^ids: expected shape \(4, k\) .* got \(3, 2\)"),
    ({"ids": IDS[:, :0]}, ValueError, r"^ids: expected .* k of at least 1 .*, got \(4, 0\)"),
    ({"ids": IDS.to("meta")}, ValueError, "^ids: expected device cpu, got meta"),
    ({"ids": NESTED}, TypeError, "^ids: expected a dense tensor"),
    ({"teacher_log_probs": 1.0}, TypeError, "^teacher_log_probs: .* like ids, got float"),
    ({"teacher_log_probs": IDS}, TypeError, r"^teacher_log_probs: expected a floating.*\.float"),
    (
        {"teacher_log_probs": TEACHER[:, :1]},
        ValueError,
        r"^teacher_log_probs: .* \(4, 2\) like ids, got",
    ),
    ({"teacher_log_probs": TEACHER.to("meta")}, ValueError, "^teacher_log_probs: .* device cpu"),
    ({"direction": "both"}, ValueError, "^direction: .*reverse, forward, .* got 'both'"),
    ({"tail": "none"}, ValueError, "^tail: expected one of bucket, renormalize, got 'none'"),
    ({"beta": 0.5}, ValueError, "^beta: expected none with direction 'reverse', got 0.5"),
    ({"beta": 1.5, "direction": "jensen_shannon"}, ValueError, "^beta: expected 0, 1 .* got 1.5"),
    ({"beta": "1", "direction": "jensen_shannon"}, ValueError, "^beta: expected 0, 1 .* got '1'"),
    ({"mask": torch.ones(4)}, TypeError, r"^mask: expected torch.bool.*\.bool\(\)"),
    ({"mask": torch.ones(5, dtype=torch.bool)}, ValueError, r"^mask: expected shape \(4,\)"),
    ({"shift": True}, ValueError, "^offsets: expected the sequence boundaries"),
    ({"offsets": torch.tensor([0, 3])}, ValueError, "^offsets: .* from 0 to 4"),
    ({"offsets": torch.tensor([0, 5, 4])}, ValueError, "^offsets: expected non-decreasing"),
    ({"temperature": 0.0}, ValueError, "^temperature: expected a number from 1e-30"),
    ({"temperature": torch.ones((), requires_grad=True)}, ValueError, "^temperature: .*detach"),
    ({"impl": "cuda"}, ValueError, "^impl: expected tensors on cuda with 'cuda'"),
    ({"impl": "triton"}, ValueError, "^impl: expected .*top_k_kl, got 'triton'"),
    ({"impl": "fast"}, ValueError, "^impl: expected one of"),
]
OF_LOGITS = [
    ({"logits": torch.zeros(4)}, ValueError, r"^logits: expected \[N, V\] packed"),
    ({"logits": torch.zeros(4, 0)}, ValueError, "^logits: expected V of at least 1"),
    ({"logits": torch.zeros(4, 5).long()}, TypeError, "^logits: expected a floating-point"),
    ({"logits": NESTED}, TypeError, "^ids: expected a nested tensor like logits"),
    ({"logits": [[0.0]]}, TypeError, "^logits: expected a dense tensor or a nested tensor"),
    (
        {"logits": torch.zeros(4, 5).double(), "impl": "cpu"},
        ValueError,
        "^impl: expected float32, .* with 'cpu'",
    ),
]
OF_HIDDEN = [
    ({"hidden": torch.zeros(3)}, ValueError, r"^hidden: expected \[N, H\] .*got shape \(3,\)"),
    ({"hidden": NESTED}, TypeError, "^ids: expected a nested tensor like hidden"),
    ({"weight": None}, TypeError, "^weight: expected a dense tensor, got NoneType"),
    ({"weight": torch.zeros(5, 4)}, ValueError, r"^weight: expected \[V, 3\].* got \(5, 4\)"),
    ({"bias": torch.zeros(4)}, ValueError, r"^bias: expected shape \(5,\), got \(4,\)"),
    ({"softcap": 0.0}, ValueError, "^softcap: expected a number from 1e-30"),
    ({"scale": -1.0}, ValueError, "^scale: expected a number from 1e-30"),
    ({"batch_invariant": True, "impl": "reference"}, ValueError, "^batch_invariant: expected Fal"),
]


@pytest.mark.parametrize(("change", "error", "match"), REFUSALS + OF_LOGITS)
def test_top_k_kl(change, error, match):
    with pytest.raises(error, match=match):
        top_k_kl(**{**LOGITS, **KNOWN, **change})


@pytest.mark.parametrize(("change", "error", "match"), REFUSALS + OF_HIDDEN)
def test_linear_top_k_kl(change, error, match):
    with pytest.raises(error, match=match):
        linear_top_k_kl(**{**HEAD, **KNOWN, **change})


@pytest.mark.parametrize("rows", [LOGITS, HEAD], ids=["logits", "hidden"])
@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": torch.tensor([[0, 1], [2, 3], [4, 5], [-1, 4]])}, "ids: .* below 5, got 5 at t"),
        ({"ids": torch.tensor([[0, 1], [-1, -1], [4, 3], [2, 2]])}, "ids: .* at most once a to"),
        ({"teacher_log_probs": torch.zeros(4, 2)}, "teacher_log_probs: .* sum to at most 1"),
        ({"teacher_log_probs": TEACHER + 20}, "teacher_log_probs: .* apply log_softmax"),
    ],
)
def test_values_that_cannot_be(rows, impl, change, message):
    op = linear_top_k_kl if rows is HEAD else top_k_kl
    with pytest.raises(RuntimeError, match=f"^{message}"):
        op(**{**rows, **KNOWN, **change}, impl=impl)
    everything_dropped = torch.zeros(4, dtype=torch.bool)
    dropped = op(**{**rows, **KNOWN, **change}, mask=everything_dropped, impl=impl)
    assert torch.equal(dropped, torch.zeros(4))


@pytest.mark.parametrize("rows", [LOGITS, HEAD], ids=["logits", "hidden"])
@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_all_classes_with_less_than_all_probability(rows, impl):
    """There is no rest that could have what is missing."""
    op = linear_top_k_kl if rows is HEAD else top_k_kl
    ids, teacher = torch.arange(5).expand(4, 5).clone(), torch.full((4, 5), 0.18).log()
    given = {**rows, "ids": ids, "teacher_log_probs": teacher, "impl": impl}
    with pytest.raises(RuntimeError, match=r"^teacher_log_probs: .* sum to 1 .*='renormalize'"):
        op(**given)
    # What is renormalised, dropped, rounded or has a rest may sum to what it does.
    for tail, mask in (("renormalize", None), ("bucket", torch.zeros(4, dtype=torch.bool))):
        assert torch.equal(op(**given, tail=tail, mask=mask), torch.zeros(4))
    assert op(**given | {"teacher_log_probs": teacher + torch.tensor(1.07).log()}).isfinite().all()
    ids[:, 2] = -1
    assert (op(**given) > 0).all()
