"""``fusedrl check``: every kernel against its plain-torch reference, on each device.

A case runs three times on the same inputs: the kernel and the reference in the dtype under test,
and the reference in float64 as the ground truth.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fusedrl.cli import table
from fusedrl.ops.cases import OPS, Case, cases_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = 16 * torch.finfo(torch.float32).eps

LEGEND = f"""\
value, gradient: the largest error against float64, relative to 1 + |value|; inf if not run
allowed: the error of the reference in the same dtype plus {TOLERANCE:.1e}; for gradients of a head
    on a GPU at least one epsilon of the largest, as plain torch also rounds logit gradients"""

EXAMPLES = """\
examples:
  fusedrl check       # a row for each op and each failed case
  fusedrl check -v    # a row for each case and dtype, too

exit codes:
  0    all errors are within the allowed range
  1    an error is too large, or a kernel did not run
  130  Ctrl-C
"""


class Result(NamedTuple):
    """Errors of one case in one dtype: value, allowed, gradient, allowed."""

    case: str
    errors: tuple[float, float, float, float] = (math.inf, 0.0, math.inf, 0.0)
    failure: str = ""  # why the kernel did not run

    @property
    def excess(self) -> float:
        """The larger excess of an error over the allowed one; at most 0 to pass."""
        value, value_allowed, gradient, gradient_allowed = self.errors
        return max(value - value_allowed, gradient - gradient_allowed)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("-v", "--verbose", action="store_true", help="also print every case")


def run(args: argparse.Namespace) -> int:
    """Run every case, and print a row for each op and each failed case; 1 if any failed."""
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    failures = 0
    for device in (torch.device("cpu"), *gpus):
        rows, failed, count = [], [], 0
        for op in OPS:
            found = [_compare(x.to(device), t, device) for x in cases_of(op) for t in DTYPES]
            wrong = [result for result in found if result.excess > 0]
            nearest = max(found, key=lambda result: result.excess)
            rows.append(_row(op, nearest, f" {len(found) - len(wrong)}/{len(found)}"))
            rows += [_row(f"- {x.case}", x) for x in (found if args.verbose else wrong)]
            failed, count = failed + wrong, count + len(found)
        print(table([f"op on {device}", "value", "allowed", "gradient", "allowed", ""], *rows))
        for why in sorted({result.failure for result in failed} - {""}):
            print(why)
        print(f"{device}: {count - len(failed)} passed, {len(failed)} failed\n{LEGEND}")
        failures += len(failed)
    return 1 if failures else 0


def _row(name: str, result: Result, counts: str = "") -> list[str]:
    status = "FAIL" if result.excess > 0 else "pass"
    return [name, *(f"{error:.1e}" for error in result.errors), status + counts]


def _compare(case: Case, dtype: torch.dtype, device: torch.device) -> Result:
    name = f"{case.name} {dtype}".replace("torch.", "")
    inputs = {name: x.to(dtype) for name, x in case.inputs.items()}
    truth = _evaluate(case, {name: x.double() for name, x in inputs.items()}, "reference")
    definition = _evaluate(case, inputs, "reference")
    try:
        kernel = _evaluate(case, inputs, device.type)
    except (ImportError, RuntimeError) as error:
        return Result(name, failure=str(error))
    (value, gradient), (value_allowed, gradient_allowed) = (
        [max(map(_error, *pair)) for pair in zip(found, truth, strict=True)]
        for found in (kernel, definition)
    )
    rounding = 0.0
    if "weight" in inputs and device.type == "cuda":
        rounding = torch.finfo(dtype).eps * max(x.abs().max().item() for x in truth[1])
    allowed = max(gradient_allowed + TOLERANCE, rounding)
    return Result(name, (value, value_allowed + TOLERANCE, gradient, allowed))


def _evaluate(
    case: Case, inputs: dict[str, Tensor], impl: str
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Values and gradients."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    outputs = case.call(leaves, impl=impl)
    # Upstream gradients differ between tokens, as in losses.
    upstream = [torch.linspace(-1, 1, x.numel()).view_as(x).to(x) for x in outputs]
    return outputs, torch.autograd.grad(outputs, list(leaves.values()), upstream)


def _error(value: Tensor, truth: Tensor) -> float:
    """The largest error; the largest float if exactly one is NaN or infinite."""
    value, truth = value.detach().double(), truth.detach().double()
    error = (value - truth).abs() / (1 + truth.abs())
    error = torch.where(value == truth, 0.0, error).nan_to_num(nan=torch.finfo(truth.dtype).max)
    return float(error.max()) if error.numel() else 0.0
