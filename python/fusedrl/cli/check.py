"""``fusedrl check``: every kernel against its definition in plain torch, on each device.

A case runs three times on the same inputs: the compiled kernel and the definition in the dtype
under test, and the definition in float64, which is taken as the truth. A kernel is allowed the
error of the definition and a few float32 roundings more; and the gradients of a head on a GPU,
where those of its logits are rounded, an epsilon of the largest.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from fusedrl.cli.console import Console
from fusedrl.native import NativeLibraryError
from fusedrl.ops.cases import OPS, Case, cases_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = 16 * torch.finfo(torch.float32).eps

ERROR_COLUMNS = ("value\nerror", "allowed", "gradient\nerror", "allowed", "")
LEGEND = (
    "An error is the largest difference from float64, relative to 1 + |value|.\n"
    f"Allowed is the error of the definition in the same dtype plus {TOLERANCE:.1e}.\n"
    "On a GPU the gradients of a head's logits are rounded to its dtype, as in plain\n"
    "torch: its gradients are allowed an epsilon of the largest of them.\n"
    "- stands where a kernel did not run."
)

EXAMPLES = """\
examples:
  fusedrl check       # a row for each op, and the cases that failed
  fusedrl check -v    # and a row for each case and dtype

exit codes:
  0    no error is larger than what is allowed
  1    one is, or a kernel did not run
"""


class Errors(NamedTuple):
    """Largest error of a kernel, and the one it passes with; of a value x, by ``1 + |x|``."""

    kernel: float
    allowed: float


class Result(NamedTuple):
    """What came of one case in one dtype; ``failure`` says why a kernel did not run."""

    op: str
    case: str
    dtype: torch.dtype
    forward: Errors | None
    gradient: Errors | None
    failure: str | None = None

    @property
    def passed(self) -> bool:
        """Whether the kernel ran, with no larger error than is allowed."""
        return self.failure is None and all(
            errors is None or errors.kernel <= errors.allowed
            for errors in (self.forward, self.gradient)
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="print a row for each case, too"
    )


def run(args: argparse.Namespace) -> int:
    """Run every case, and print a row for each op and each case that failed; 1 if any did."""
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    console = Console()
    failed = 0
    for device in devices:
        results = list(check(device))
        failures = [result for result in results if not result.passed]
        by_op = _table(f"op on {device}", "passed")
        for op, group in _by_op(results):
            passed = sum(result.passed for result in group)
            worst = (_worst([r.forward for r in group]), _worst([r.gradient for r in group]))
            by_op.add_row(op, f"{passed} of {len(group)}", *_shown(*worst, passed == len(group)))
        console.print(by_op)
        for op, group in _by_op(results if args.verbose else failures):
            by_case = _table("case", "dtype", title=f"{op} on {device}")
            for result in group:
                dtype = str(result.dtype).removeprefix("torch.")
                shown = _shown(result.forward, result.gradient, result.passed)
                by_case.add_row(result.case, dtype, *shown)
            console.print(by_case)
        for why in sorted({result.failure for result in failures if result.failure}):
            print(why)
        print(f"{device}: {len(results) - len(failures)} passed, {len(failures)} failed\n{LEGEND}")
        failed += len(failures)
    return 1 if failed else 0


def _by_op(results: list[Result]) -> Iterator[tuple[str, list[Result]]]:
    for op, group in groupby(results, key=lambda result: result.op):
        yield op, list(group)


def _table(first: str, *columns: str, title: str | None = None) -> Table:
    """No wider than 80 columns; the first column has room for the longest name of an op."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(first, min_width=22)
    for column in (*columns, *ERROR_COLUMNS):
        table.add_column(column)
    return table


def _worst(found: list[Errors | None]) -> Errors | None:
    """The errors that are nearest to failing."""
    compared = [errors for errors in found if errors is not None]
    return max(compared, key=lambda errors: errors.kernel - errors.allowed, default=None)


def _shown(forward: Errors | None, gradient: Errors | None, passed: bool) -> list[str]:
    """The last columns of a row: errors and what is allowed, where a kernel ran."""
    cells = []
    for errors in (forward, gradient):
        cells += [f"{errors.kernel:.1e}", f"{errors.allowed:.1e}"] if errors else ["-", "-"]
    return [*cells, "[green]pass" if passed else "[bold red]FAIL"]


def check(device: torch.device) -> Iterator[Result]:
    """Every case in every dtype on ``device``."""
    for op in OPS:
        for case in cases_of(op):
            for dtype in DTYPES:
                yield _compare(op, case.to(device), dtype, device)


def _compare(op: str, case: Case, dtype: torch.dtype, device: torch.device) -> Result:
    inputs = {name: x.to(dtype) for name, x in case.inputs.items()}
    truth = _evaluate(case, {name: x.double() for name, x in inputs.items()}, "reference")
    reference = _evaluate(case, inputs, "reference")
    try:
        kernel = _evaluate(case, inputs, device.type)
    except (NativeLibraryError, RuntimeError) as error:
        return Result(op, case.name, dtype, None, None, str(error))
    forward, gradient = (
        Errors(
            max(map(_error, kernel[what], truth[what])),
            max(map(_error, reference[what], truth[what])) + TOLERANCE,
        )
        for what in ("forward", "gradient")
    )
    if "weight" in inputs and device.type == "cuda":
        rounding = torch.finfo(dtype).eps * max(x.abs().max().item() for x in truth["gradient"])
        gradient = gradient._replace(allowed=max(gradient.allowed, rounding))
    return Result(op, case.name, dtype, forward, gradient)


def _evaluate(case: Case, inputs: dict[str, Tensor], impl: str) -> dict[str, Sequence[Tensor]]:
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    outputs = case.call(leaves, impl=impl)
    # Upstream gradients that differ from token to token, as losses have them.
    upstream = [torch.linspace(-1, 1, x.numel()).view_as(x).to(x) for x in outputs]
    grads = torch.autograd.grad(outputs, list(leaves.values()), upstream)
    return {"forward": outputs, "gradient": grads}


def _error(value: Tensor, truth: Tensor) -> float:
    """Largest error; infinite where only one of the two is NaN or infinite."""
    value, truth = value.detach().double(), truth.detach().double()
    error = (value - truth).abs() / (1 + truth.abs())
    error = torch.where(value == truth, 0.0, error)
    return float(error.nan_to_num(nan=float("inf")).max()) if error.numel() else 0.0
