"""linear_exact_kl refuses what does not fit, and says what would."""

from __future__ import annotations

import pytest
import torch

from fusedrl import linear_exact_kl

GOOD = {
    "hidden": torch.zeros(4, 3),
    "weight": torch.zeros(5, 3),
    "ref_hidden": torch.zeros(4, 2),
    "ref_weight": torch.zeros(5, 2),
}
NESTED, REF_NESTED = (
    torch.nested.nested_tensor([torch.zeros(1, n), torch.zeros(3, n)], layout=torch.jagged)
    for n in (3, 2)
)
BOTH_NESTED = {"hidden": NESTED, "ref_hidden": REF_NESTED}
OTHER_LENGTHS = torch.nested.nested_tensor([torch.zeros(2, 2)] * 2, layout=torch.jagged)
PADDED = {"hidden": torch.zeros(2, 2, 3), "ref_hidden": torch.zeros(2, 2, 2)}
REFUSALS = [
    ({"hidden": [[0.0]]}, TypeError, "^hidden: .* got list"),
    ({"hidden": torch.zeros(4, 3).to_sparse()}, TypeError, r"^hidden: .*sparse_coo"),
    ({"hidden": torch.zeros(4, 3).long()}, TypeError, "^hidden: expected a floating-point"),
    ({"hidden": torch.zeros(())}, ValueError, r"^hidden: expected \[N, H\] .*got shape \(\)"),
    ({"hidden": torch.zeros(3)}, ValueError, r"^hidden: expected \[N, H\] .*got shape \(3,\)"),
    (
        {"hidden": torch.zeros(4, 0), "weight": torch.zeros(5, 0)},
        ValueError,
        "^hidden: expected H of at least 1",
    ),
    (
        {"ref_hidden": torch.zeros(4, 0), "ref_weight": torch.zeros(5, 0)},
        ValueError,
        "^ref_hidden: expected H of at least 1",
    ),
    ({"weight": None}, TypeError, "^weight: expected a dense tensor, got NoneType"),
    ({"weight": torch.zeros(5, 4)}, ValueError, r"^weight: expected \[V, 3\].* got \(5, 4\)"),
    ({"weight": torch.zeros(3)}, ValueError, r"^weight: expected \[V, 3\].* got \(3,\)"),
    ({"weight": torch.zeros(0, 3)}, ValueError, r"^weight: expected \[V, 3\].* got \(0, 3\)"),
    ({"weight": torch.zeros(5, 3).half()}, ValueError, "^weight: expected torch.float32"),
    ({"weight": torch.zeros(5, 3, device="meta")}, ValueError, "^weight: expected device cpu"),
    ({"bias": torch.zeros(4)}, ValueError, r"^bias: expected shape \(5,\), got \(4,\)"),
    ({"bias": torch.zeros(5).half()}, ValueError, "^bias: expected torch.float32"),
    ({"bias": 1.0}, TypeError, "^bias: expected a dense tensor, got float"),
    ({"ref_hidden": None}, TypeError, "^ref_hidden: expected a dense .* got NoneType"),
    ({"ref_hidden": torch.zeros(2).long()}, TypeError, "^ref_hidden: expected a floating-point"),
    ({"ref_hidden": torch.zeros(2)}, ValueError, r"^ref_hidden: .* \[B, T, H\] .*shape \(2,\)"),
    ({"ref_hidden": torch.zeros(3, 2)}, ValueError, r"^ref_hidden: .* \(4,\) as hidden, got \(3,"),
    ({"ref_hidden": torch.zeros(2, 2, 2)}, ValueError, r"^ref_hidden: .* \(4,\) .* got \(2, 2\)"),
    (
        {"ref_hidden": torch.zeros(4, 2).half(), "ref_weight": torch.zeros(5, 2).half()},
        ValueError,
        "^ref_hidden: expected torch.float32 as hidden has, got torch.float16",
    ),
    (
        {"ref_hidden": torch.zeros(4, 2).to("meta"), "ref_weight": torch.zeros(5, 2).to("meta")},
        ValueError,
        "^ref_hidden: expected device cpu",
    ),
    ({"ref_weight": torch.zeros(5, 3)}, ValueError, r"^ref_weight: expected \[V, 2\]"),
    ({"ref_weight": torch.zeros(6, 2)}, ValueError, "^ref_weight: .* 5 classes of weight, got 6"),
    ({"ref_weight": torch.zeros(5, 2).half()}, ValueError, "^ref_weight: expected torch.float32"),
    ({"ref_bias": torch.zeros(5, 1)}, ValueError, r"^ref_bias: expected shape \(5,\)"),
    ({"hidden": NESTED}, TypeError, "^ref_hidden: expected a nested tensor like hidden"),
    ({"ref_hidden": REF_NESTED}, TypeError, "^ref_hidden: expected a dense .* got a nested"),
    (
        {"hidden": NESTED, "ref_hidden": OTHER_LENGTHS},
        ValueError,
        "^ref_hidden: expected the sequence lengths of hidden",
    ),
    (
        {**BOTH_NESTED, "offsets": torch.tensor([0, 4])},
        ValueError,
        "^offsets: expected None with nested hidden",
    ),
    (
        {**BOTH_NESTED, "mask": torch.ones(4, dtype=torch.bool)},
        TypeError,
        "^mask: expected a nested tensor",
    ),
    ({**PADDED, "offsets": torch.tensor([0, 4])}, ValueError, "^offsets: .* None with padded"),
    ({"direction": "both"}, ValueError, "^direction: .*reverse, forward, .* got 'both'"),
    ({"beta": 0.5}, ValueError, '^beta: expected none .* pass direction="jensen_shannon"'),
    ({"direction": "jensen_shannon", "beta": 2}, ValueError, "^beta: expected 0, 1 or .*got 2"),
    ({"mask": torch.ones(4)}, TypeError, r"^mask: expected torch.bool.*\.bool\(\)"),
    ({"mask": torch.ones(5, dtype=torch.bool)}, ValueError, r"^mask: expected shape \(4,\)"),
    ({"shift": True}, ValueError, "^offsets: expected the sequence boundaries"),
    ({"offsets": torch.tensor([0, 3])}, ValueError, "^offsets: .* from 0 to 4"),
    ({"offsets": torch.tensor([0, 5, 4])}, ValueError, "^offsets: expected non-decreasing"),
    ({"offsets": [0, 4]}, TypeError, "^offsets: expected a dense tensor, got list"),
    ({"temperature": 0.0}, ValueError, "^temperature: expected a number from 1e-30"),
    ({"temperature": torch.tensor(-1.0)}, ValueError, "^temperature: expected a number"),
    ({"temperature": torch.ones((), requires_grad=True)}, ValueError, "^temperature: .*detach"),
    ({"temperature": "1"}, TypeError, "^temperature: expected a real number"),
    ({"batch_invariant": True, "impl": "reference"}, ValueError, "^batch_invariant: expected Fal"),
    ({"impl": "cuda"}, ValueError, "^impl: expected tensors on cuda with 'cuda'"),
    ({"impl": "triton"}, ValueError, "^impl: expected .* for linear_exact_kl, got 'triton'"),
    ({"impl": "fast"}, ValueError, "^impl: expected one of"),
    (
        {"impl": "cpu", **{name: x.double() for name, x in GOOD.items()}},
        ValueError,
        "^impl: expected float32, bfloat16, float16 with 'cpu'",
    ),
]


@pytest.mark.parametrize(("change", "error", "match"), REFUSALS)
def test_bad_input_names_argument_expectation_and_remedy(change, error, match):
    with pytest.raises(error, match=match):
        linear_exact_kl(**{**GOOD, **change})


@pytest.mark.parametrize("name", ["scale", "ref_scale", "softcap", "ref_softcap"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1e31, "1", None])
def test_scales_and_softcaps_out_of_range(name, value):
    if value is None:
        assert torch.equal(linear_exact_kl(**GOOD, **{name: value}).kl, torch.zeros(4))
        return
    with pytest.raises(ValueError, match=rf"^{name}: expected a number from 1e-30 to 1e\+30"):
        linear_exact_kl(**GOOD, **{name: value})


def test_the_op_itself_refuses_wrong_offsets():
    head, ref_head = ((torch.zeros(4, n), torch.zeros(5, n), None, 1.0, 0.0) for n in (3, 2))
    one = torch.ones((), dtype=torch.float64)
    with pytest.raises(RuntimeError, match="offsets: expected non-decreasing values from 0 to 4"):
        torch.ops.fusedrl.linear_exact_kl(
            *head, *ref_head, None, torch.tensor([0, 9]), True, one, 1.0, False, False, 0
        )
