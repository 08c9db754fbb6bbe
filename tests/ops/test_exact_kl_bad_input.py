"""exact_kl refuses what does not fit, and says what would."""

from __future__ import annotations

import pytest
import torch

from fusedrl import exact_kl

GOOD = {"logits": torch.zeros(4, 5), "ref_logits": torch.zeros(4, 5)}
NESTED = torch.nested.nested_tensor([torch.zeros(1, 5), torch.zeros(3, 5)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"logits": torch.zeros(4)}, ValueError, "logits: expected"),
        ({"logits": torch.zeros(4, 0)}, ValueError, "V of at least 1"),
        ({"logits": torch.zeros(4, 5).long()}, TypeError, "logits: expected a floating"),
        ({"ref_logits": torch.zeros(4, 6)}, ValueError, r"ref_logits: expected shape \(4, 5\)"),
        (
            {"ref_logits": torch.zeros(4, 5).bfloat16()},
            ValueError,
            r"ref_logits: expected torch.float32 like logits, .*\.to\(torch.float32\)",
        ),
        ({"ref_logits": torch.zeros(4, 5, device="meta")}, ValueError, "expected device cpu"),
        (
            {"ref_logits": None},
            TypeError,
            "ref_logits: expected a dense tensor like logits, got NoneType",
        ),
        ({"ref_logits": NESTED}, TypeError, "ref_logits: expected a dense tensor"),
        ({"logits": NESTED}, TypeError, "ref_logits: expected a nested tensor"),
        (
            {"logits": NESTED, "ref_logits": NESTED, "offsets": torch.tensor([0, 4])},
            ValueError,
            "offsets: expected None with nested",
        ),
        (
            {
                "logits": NESTED,
                "ref_logits": torch.nested.nested_tensor(
                    [torch.zeros(2, 5), torch.zeros(2, 5)], layout=torch.jagged
                ),
            },
            ValueError,
            "ref_logits: expected the sequence lengths",
        ),
        ({"direction": "both"}, ValueError, "reverse, forward, jensen_shannon, got 'both'"),
        ({"mask": torch.ones(4)}, TypeError, "mask: expected torch.bool"),
        ({"mask": torch.ones(5, dtype=torch.bool)}, ValueError, r"mask: expected shape \(4,\)"),
        ({"shift": True}, ValueError, "offsets: expected the sequence boundaries"),
        ({"offsets": torch.tensor([0, 3])}, ValueError, "from 0 to 4"),
        ({"offsets": torch.tensor([0, 5, 4])}, ValueError, "non-decreasing"),
        ({"temperature": 0.0}, ValueError, "temperature: expected a number from 1e-30"),
        ({"temperature": torch.tensor(-1.0)}, ValueError, "temperature: expected a number"),
        ({"temperature": torch.ones((), requires_grad=True)}, ValueError, "detach"),
        ({"impl": "cuda"}, ValueError, "expected tensors on cuda"),
        ({"impl": "fast"}, ValueError, "impl: expected one of"),
        (
            {"logits": [[0.0]]},
            TypeError,
            "logits: expected a dense tensor or a nested tensor, got list",
        ),
    ],
)
def test_bad_input_names_argument_expectation_and_remedy(change, error, match):
    with pytest.raises(error, match=match):
        exact_kl(**{**GOOD, **change})


@pytest.mark.parametrize("beta", [-0.1, 1.1, 1e-31, float("nan"), float("inf"), "0.5", 1j])
def test_a_beta_out_of_range(beta):
    with pytest.raises(ValueError, match=r"^beta: expected 0, 1 or a number between"):
        exact_kl(**GOOD, direction="jensen_shannon", beta=beta)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_a_beta_needs_the_divergence_that_has_one(direction):
    match = f"^beta: expected none with direction '{direction}', got 0.5; pass direction="
    with pytest.raises(ValueError, match=match):
        exact_kl(**GOOD, direction=direction, beta=0.5)


def test_padded_logits_take_no_offsets():
    with pytest.raises(ValueError, match="offsets: expected None with padded"):
        exact_kl(torch.zeros(2, 2, 5), torch.zeros(2, 2, 5), offsets=torch.tensor([0, 4]))


def test_the_op_itself_refuses_wrong_offsets():
    args = (torch.zeros(4, 5), torch.zeros(4, 5), None, torch.tensor([0, 9]), True)
    with pytest.raises(RuntimeError, match="offsets: expected non-decreasing values from 0 to 4"):
        torch.ops.fusedrl.exact_kl(*args, torch.ones((), dtype=torch.float64), 1.0, False)


def test_explicit_cpu_refuses_a_dtype_it_has_no_kernel_for():
    p, q = torch.zeros(2, 4, 5).double().unbind()
    with pytest.raises(ValueError, match="float32, bfloat16, float16"):
        exact_kl(p, q, impl="cpu")
    assert exact_kl(p, q).dtype == torch.float64
