"""What kernels refuse, where no check in Python stands before them: the message alone."""

from __future__ import annotations

import pytest
import torch

OPS = torch.ops.fusedrl
ROWS, HEAD = torch.linspace(-1, 1, 15).view(3, 5), torch.linspace(-1, 1, 20).view(4, 5)
TOKENS = torch.tensor([0, 3, 1])
ONE = torch.ones((), dtype=torch.float64)


def log_probs(rows=ROWS, offsets=None, temperature=ONE):
    return OPS.token_log_probs(rows, TOKENS, None, offsets, False, temperature, False)


def linear(rows=ROWS, offsets=None, temperature=ONE):
    rest = (None, offsets, False, temperature, 1.0, 0.0, False, None, False, 0, False)
    return OPS.linear_token_log_probs(rows, HEAD.to(rows.dtype), None, TOKENS, *rest)


def exact(rows=ROWS, offsets=None, temperature=ONE):
    return OPS.exact_kl(rows, rows, None, offsets, False, temperature, 1.0, False)


def linear_exact(rows=ROWS, offsets=None, temperature=ONE):
    head = (rows, HEAD.to(rows.dtype), None, 1.0, 0.0)
    return OPS.linear_exact_kl(
        *head, *head, None, offsets, False, temperature, 1.0, False, False, 0
    )


def kl(rows=ROWS):
    return OPS.token_kl(rows[0], rows[1], None, None, ONE, 0, False)


OVER_ROWS = [log_probs, linear, exact, linear_exact]
REFUSED = [
    ({"offsets": torch.tensor([0, 2])}, "offsets: expected non-decreasing values from 0 to"),
    ({"temperature": -ONE}, "temperature: expected a finite number > 0, got -1; 1"),
    ({"rows": ROWS.int()}, r"\w+: expected dtype float32, bfloat16 or float16, .*; conv"),
]
CALLS = [(op, *refused) for op in OVER_ROWS for refused in REFUSED] + [(kl, *REFUSED[-1])]


@pytest.mark.parametrize(("op", "given", "message"), CALLS)
def test_a_call_past_python_is_refused(op, given, message):
    with pytest.raises(RuntimeError, match=f"^{message}"):
        op(**given)
