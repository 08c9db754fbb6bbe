"""exact_kl refuses what does not fit, and says what would."""

from __future__ import annotations

import pytest
import torch

from fusedrl import exact_kl


def test_the_op_itself_refuses_wrong_offsets():
    args = (torch.zeros(4, 5), torch.zeros(4, 5), None, torch.tensor([0, 9]), True)
    with pytest.raises(RuntimeError, match="offsets: expected non-decreasing values from 0 to 4"):
        torch.ops.fusedrl.exact_kl(*args, torch.ones((), dtype=torch.float64), 1.0, False)


def test_explicit_cpu_refuses_a_dtype_it_has_no_kernel_for():
    p, q = torch.zeros(2, 4, 5).double().unbind()
    with pytest.raises(ValueError, match="float32, bfloat16, float16"):
        exact_kl(p, q, impl="cpu")
    assert exact_kl(p, q).kl.dtype == torch.float64
