"""top_k_kl and linear_top_k_kl refuse what does not fit, and say what would."""

from __future__ import annotations

import pytest
import torch

from fusedrl import linear_top_k_kl, top_k_kl

IDS, TEACHER = torch.tensor([[0, 1]]).expand(4, 2), torch.full((4, 2), -2.0)
KNOWN = {"ids": IDS, "teacher_log_probs": TEACHER}
LOGITS, HEAD = {"logits": torch.zeros(4, 5)}, {"hidden": torch.zeros(4, 3)}
HEAD["weight"] = torch.zeros(5, 3)


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
