"""``fusedrl check``: every op against its definition in plain torch, on each device.

A case runs three times on the same inputs: the compiled kernel and the definition in the dtype
under test, and the definition in float64, which is taken as the truth. A kernel is allowed the
error of the definition and a few float32 roundings more.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from itertools import groupby, product
from typing import Any, NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from fusedrl.cli.console import Console
from fusedrl.native import NativeLibraryError
from fusedrl.ops import (
    exact_kl,
    importance_weights,
    linear_exact_kl,
    linear_policy_loss,
    linear_token_log_probs,
    linear_top_k_kl,
    token_kl,
    token_log_probs,
    top_k_kl,
)
from fusedrl.ops.exact_kl import DIRECTIONS
from fusedrl.ops.importance_weights import LEVELS
from fusedrl.ops.linear_policy_loss.losses import RECIPES
from fusedrl.ops.token_kl import ESTIMATORS
from fusedrl.ops.top_k_kl.teachers import TAILS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = 16 * torch.finfo(torch.float32).eps

ERROR_COLUMNS = ("value\nerror", "allowed", "gradient\nerror", "allowed")
LEGEND = (
    "An error is the largest difference from float64, relative to 1 + |value|.\n"
    f"Allowed is the error of plain torch in the same dtype plus {TOLERANCE:.1e}.\n"
    "- stands where a kernel did not run, or has no gradient."
)

EXAMPLES = """\
examples:
  fusedrl check             # a row for each op, and the cases that failed
  fusedrl check -v          # a row for each case and dtype
  fusedrl check --failed    # the cases that failed, and the summary

exit codes:
  0    no error is larger than what is allowed
  1    one is, or a kernel did not run
"""


class Case(NamedTuple):
    """``call(*inputs, impl=...)`` returns tensors of float32 ``inputs``, constants or none."""

    op: str
    name: str
    inputs: tuple[Tensor, ...]
    call: Callable[..., tuple[Tensor, ...]]


class Errors(NamedTuple):
    """Largest error of the kernel and of the definition; of a value x, relative to ``1 + |x|``."""

    kernel: float
    definition: float

    @property
    def allowed(self) -> float:
        """The largest error that a kernel passes with."""
        return self.definition + TOLERANCE


class Result(NamedTuple):
    """What came of one case in one dtype; ``failure`` says why a kernel did not run.

    ``gradient`` is ``None`` too where the results are constants.
    """

    case: Case
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
    rows = parser.add_mutually_exclusive_group()
    rows.add_argument("-v", "--verbose", action="store_true", help="print a row for each case")
    rows.add_argument("--failed", action="store_true", help="print only the cases that failed")


def run(args: argparse.Namespace) -> int:
    """Run every case, and print a row for each op and each case that failed; 1 if any did."""
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    console = Console()
    failed = 0
    for device in devices:
        results = list(check(device))
        failures = [result for result in results if not result.passed]
        if not args.verbose and not args.failed:
            console.print(_summary(device, results))
        for op, group in _by_op(results if args.verbose else failures):
            console.print(_table(f"{op} on {device}", group))
        for why in sorted({result.failure for result in failures if result.failure}):
            console.print(why, markup=False, highlight=False, soft_wrap=True)
        console.print(
            f"{device}: {len(results) - len(failures)} passed, {len(failures)} failed\n{LEGEND}",
            highlight=False,
            soft_wrap=True,
        )
        failed += len(failures)
    return 1 if failed else 0


def _by_op(results: list[Result]) -> Iterator[tuple[str, list[Result]]]:
    for op, group in groupby(results, key=lambda result: result.case.op):
        yield op, list(group)


def _summary(device: torch.device, results: list[Result]) -> Table:
    """A row for each op: how many cases passed, and the errors of those nearest to failing."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))  # no wider than 80 columns
    table.add_column(f"op on {device}", min_width=22)  # the longest name is not cut
    for column in ("passed", *ERROR_COLUMNS, ""):
        table.add_column(column)
    for op, group in _by_op(results):
        passed = sum(result.passed for result in group)
        table.add_row(
            op,
            f"{passed} of {len(group)}",
            *_shown(_worst([result.forward for result in group])),
            *_shown(_worst([result.gradient for result in group])),
            "[green]pass" if passed == len(group) else "[bold red]FAIL",
        )
    return table


def _worst(found: list[Errors | None]) -> Errors | None:
    compared = [errors for errors in found if errors is not None]
    return max(compared, key=lambda errors: errors.kernel - errors.allowed, default=None)


def _table(title: str, results: list[Result]) -> Table:
    columns = ("case", "dtype", *ERROR_COLUMNS, "")
    table = Table(
        *columns, title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for result in results:
        table.add_row(
            result.case.name,
            str(result.dtype).removeprefix("torch."),
            *_shown(result.forward),
            *_shown(result.gradient),
            "[green]pass" if result.passed else "[bold red]FAIL",
        )
    return table


def _shown(errors: Errors | None) -> tuple[str, str]:
    """The kernel's error and what is allowed, where a kernel ran and has such a result."""
    return (f"{errors.kernel:.1e}", f"{errors.allowed:.1e}") if errors else ("-", "-")


def check(device: torch.device) -> Iterator[Result]:
    """Every case in every dtype on ``device``."""
    cases = (
        _token_log_probs,
        _linear_token_log_probs,
        _linear_policy_loss,
        _token_kl,
        _exact_kl,
        _linear_exact_kl,
        _top_k_kl,
        _linear_top_k_kl,
        _importance_weights,
    )
    for case in (case for op in cases for case in op(device)):
        for dtype in DTYPES:
            yield _compare(case, dtype, device)


def _compare(case: Case, dtype: torch.dtype, device: torch.device) -> Result:
    inputs = [x.to(dtype) for x in case.inputs]
    truth = _evaluate(case, [x.double() for x in inputs], "reference")
    reference = _evaluate(case, inputs, "reference")
    try:
        kernel = _evaluate(case, inputs, device.type)
    except (NativeLibraryError, RuntimeError) as error:
        return Result(case, dtype, None, None, str(error))
    forward, gradient = (
        Errors(
            max(map(_error, kernel[what], truth[what])),
            max(map(_error, reference[what], truth[what])),
        )
        if truth[what]
        else None
        for what in ("forward", "gradient")
    )
    return Result(case, dtype, forward, gradient)


def _evaluate(case: Case, inputs: list[Tensor], impl: str) -> dict[str, tuple[Tensor, ...]]:
    inputs = [x.detach().requires_grad_() for x in inputs]
    outputs = case.call(*inputs, impl=impl)
    if not any(x.requires_grad for x in outputs):
        return {"forward": outputs, "gradient": ()}
    # Upstream gradients that differ from token to token, as losses have them.
    upstream = [torch.linspace(-1, 1, x.numel()).view_as(x).to(x) for x in outputs]
    return {"forward": outputs, "gradient": torch.autograd.grad(outputs, inputs, upstream)}


def _error(value: Tensor, truth: Tensor) -> float:
    """Largest error; infinite where only one of the two is NaN or infinite."""
    value, truth = value.detach().double(), truth.detach().double()
    error = (value - truth).abs() / (1 + truth.abs())
    error = torch.where(value == truth, 0.0, error)
    return float(error.nan_to_num(nan=float("inf")).max()) if error.numel() else 0.0


def _token_log_probs(device: torch.device) -> Iterator[Case]:
    op = "token_log_probs"
    generator = torch.Generator().manual_seed(0)
    for classes in (2, 1001, 32768):
        logits = 4 * torch.randn(3, 9, classes, generator=generator)
        tokens = torch.randint(classes, (3, 9), generator=generator)
        mask = torch.rand(3, 9, generator=generator) < 0.7
        logits, tokens, mask = (x.to(device) for x in (logits, tokens, mask))

        def plain(x: Tensor, impl: str, tokens: Tensor = tokens) -> tuple[Tensor, ...]:
            return (token_log_probs(x, tokens, impl=impl),)  # pyright: ignore[reportReturnType]

        def full(
            x: Tensor, impl: str, tokens: Tensor = tokens, mask: Tensor = mask
        ) -> tuple[Tensor, ...]:
            return token_log_probs(
                x, tokens, mask, shift=True, temperature=0.7, entropy=True, impl=impl
            )  # pyright: ignore[reportReturnType]

        def packed(
            x: Tensor, impl: str, tokens: Tensor = tokens, mask: Tensor = mask
        ) -> tuple[Tensor, ...]:
            offsets = torch.tensor([0, 1, 1, 20, 27], device=x.device)
            return token_log_probs(
                x.flatten(0, 1),
                tokens.flatten(),
                mask.flatten(),
                offsets=offsets,
                shift=True,
                entropy=True,
                impl=impl,
            )  # pyright: ignore[reportReturnType]

        yield Case(op, f"V={classes}", (logits,), plain)
        yield Case(op, f"V={classes} mask shift entropy", (logits,), full)
        yield Case(op, f"V={classes} packed mask shift entropy", (logits,), packed)


def _head(
    generator: torch.Generator, classes: int, width: int, device: torch.device
) -> tuple[Tensor, ...]:
    """Hidden states of 3 x 9 tokens, weight and bias of logits of order 1."""
    hidden = torch.randn(3, 9, width, generator=generator)
    weight = torch.randn(classes, width, generator=generator) / width**0.5
    bias = torch.randn(classes, generator=generator)
    return hidden.to(device), weight.to(device), bias.to(device)


def _linear_token_log_probs(device: torch.device) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    for classes in (2, 2500):
        head = _head(generator, classes, 64, device)
        tokens = torch.randint(classes, (3, 9), generator=generator).to(device)
        mask = (torch.rand(3, 9, generator=generator) < 0.7).to(device)

        def full(
            x: Tensor,
            weight: Tensor,
            bias: Tensor,
            impl: str,
            tokens: Tensor = tokens,
            mask: Tensor = mask,
        ) -> tuple[Tensor, ...]:
            return linear_token_log_probs(
                x, weight, tokens, mask, bias=bias, softcap=5.0, shift=True, entropy=True, impl=impl
            )  # pyright: ignore[reportReturnType]

        name = f"V={classes} mask shift softcap entropy"
        yield Case("linear_token_log_probs", name, head, full)


def _exact_kl(device: torch.device) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    mask = (torch.rand(3, 9, generator=generator) < 0.7).to(device)
    for classes in (2, 1001):
        rows = 2 * torch.randn(2, 3, 9, classes, generator=generator).to(device)
        for direction in DIRECTIONS:

            def kl(
                p: Tensor, q: Tensor, impl: str, direction: str = direction
            ) -> tuple[Tensor, Tensor]:
                options = {"direction": direction, "temperature": 0.7, "impl": impl}
                return exact_kl(p, q, mask, shift=True, entropy=True, **options)  # pyright: ignore[reportReturnType]

            name = f"V={classes} {direction} mask shift entropy"
            yield Case("exact_kl", name, (rows[0], rows[1]), kl)


def _linear_exact_kl(device: torch.device) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    mask = (torch.rand(3, 9, generator=generator) < 0.7).to(device)
    for classes in (2, 2500):
        heads = [_head(generator, classes, width, device) for width in (64, 96)]
        for direction in DIRECTIONS:

            def kl(*heads: Tensor, impl: str, direction: str = direction) -> tuple[Tensor]:
                x, weight, bias, y, ref_weight, ref_bias = heads
                options = {"direction": direction, "softcap": 5.0, "impl": impl, "shift": True}
                options |= {"bias": bias, "ref_bias": ref_bias}
                if direction == "jensen_shannon":
                    options["beta"] = 0.2
                return (linear_exact_kl(x, weight, y, ref_weight, mask, **options),)  # pyright: ignore[reportReturnType]

            name = f"V={classes} {direction} mask shift softcap"
            yield Case("linear_exact_kl", name, (*heads[0], *heads[1]), kl)


def _teacher(
    generator: torch.Generator, classes: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Ids of up to 8 classes for 3 x 9 tokens, some of which have fewer, and their log-probs."""
    logits = 2 * torch.randn(3, 9, classes, generator=generator)
    log_probs, ids = logits.log_softmax(-1).topk(min(8, classes - 1))
    ids[:, 4, -1] = -1
    return ids.to(device), log_probs.to(device)


def _top_k_kl(device: torch.device) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    mask = (torch.rand(3, 9, generator=generator) < 0.7).to(device)
    for classes in (2, 9001):
        logits = 2 * torch.randn(3, 9, classes, generator=generator).to(device)
        teacher = _teacher(generator, classes, device)
        for direction, tail in product(DIRECTIONS, TAILS):
            options = {"direction": direction, "tail": tail, "temperature": 0.7}

            def kl(
                x: Tensor,
                impl: str,
                teacher: tuple[Tensor, Tensor] = teacher,
                options: dict[str, Any] = options,
            ) -> tuple[Tensor]:
                return (top_k_kl(x, *teacher, mask, shift=True, impl=impl, **options),)

            yield Case("top_k_kl", f"V={classes} {direction} {tail} mask shift", (logits,), kl)


def _linear_top_k_kl(device: torch.device) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    mask = (torch.rand(3, 9, generator=generator) < 0.7).to(device)
    for classes in (2, 2500):
        head = _head(generator, classes, 64, device)
        teacher = _teacher(generator, classes, device)
        for direction, tail in product(DIRECTIONS, TAILS):
            options = {"direction": direction, "tail": tail, "softcap": 5.0, "shift": True}

            def kl(
                *head: Tensor,
                impl: str,
                teacher: tuple[Tensor, Tensor] = teacher,
                options: dict[str, Any] = options,
            ) -> tuple[Tensor]:
                x, weight, bias = head
                known = (*teacher, mask)
                return (linear_top_k_kl(x, weight, *known, bias=bias, impl=impl, **options),)

            name = f"V={classes} {direction} {tail} mask shift softcap"
            yield Case("linear_top_k_kl", name, head, kl)


def _linear_policy_loss(device: torch.device) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    mask = (torch.rand(3, 9, generator=generator) < 0.7).to(device)
    advantages, old, ref = (torch.randn(3, 9, generator=generator).to(device) for _ in range(3))
    for classes in (2, 2500):
        head = _head(generator, classes, 64, device)
        tokens = torch.randint(0, classes, (3, 9), generator=generator).to(device)
        # Near those of the policy, so that some ratios are clipped and others not.
        hidden, weight, bias = head
        log_probs = linear_token_log_probs(
            hidden, weight, tokens, bias=bias, shift=True, impl="reference"
        )
        assert isinstance(log_probs, Tensor)
        old_log_probs = log_probs + 0.3 * old
        for loss in RECIPES:

            def policy_loss(
                *head: Tensor,
                impl: str,
                loss: str = loss,
                tokens: Tensor = tokens,
                old_log_probs: Tensor = old_log_probs,
            ) -> tuple[Tensor]:
                hidden, weight, bias = head
                options = {"bias": bias, "shift": True, "kl_coeff": 0.1, "entropy_coeff": 0.1}
                options |= {"old_log_probs": old_log_probs, "ref_log_probs": old_log_probs + ref}
                options |= {"normalizer": 27.0, "impl": impl}
                return (
                    linear_policy_loss(
                        hidden, weight, tokens, mask, advantages, loss=loss, **options
                    ).loss,
                )

            name = f"V={classes} {loss} mask shift"
            yield Case("linear_policy_loss", name, head, policy_loss)


def _importance_weights(device: torch.device) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    rollout = -3 * torch.rand(3000, generator=generator)
    log_probs = rollout + 0.05 * torch.randn(3000, generator=generator)
    mask = (torch.rand(3000, generator=generator) < 0.7).to(device)
    offsets = torch.tensor([0, 1, 1, 1500, 3000], device=device)
    for level in LEVELS:

        def weigh(p: Tensor, q: Tensor, impl: str, level: str = level) -> tuple[Tensor, ...]:
            options = {"level": level, "low": 0.9, "high": 1.1, "impl": impl}
            weights, mismatch = importance_weights(p, q, mask, offsets, **options)
            return weights, mismatch.k1, mismatch.k3, mismatch.ess

        yield Case(
            "importance_weights",
            f"{level} mask packed",
            (log_probs.to(device), rollout.to(device)),
            weigh,
        )


def _token_kl(device: torch.device) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    log_probs = -3 * torch.rand(257, generator=generator)
    # Differences from 1e-5 to 1, where k3 cancels and where it does not.
    size = 10 ** (-5 * torch.rand(257, generator=generator))
    ref_log_probs = log_probs + size * torch.randn(257, generator=generator).sign()
    mask = torch.rand(257, generator=generator) < 0.7
    reward = torch.randn(257, generator=generator)
    inputs = tuple(x.to(device) for x in (log_probs, ref_log_probs, reward))
    mask = mask.to(device)
    for estimator in ESTIMATORS:

        def kl(p: Tensor, q: Tensor, impl: str, estimator: str = estimator) -> tuple[Tensor, ...]:
            return (token_kl(p, q, estimator=estimator, impl=impl),)

        def penalised(
            p: Tensor, q: Tensor, reward: Tensor, impl: str, estimator: str = estimator
        ) -> tuple[Tensor, ...]:
            return token_kl(p, q, mask, estimator=estimator, reward=reward, coeff=0.1, impl=impl)

        yield Case("token_kl", estimator, inputs[:2], kl)
        yield Case("token_kl", f"{estimator} mask reward", inputs, penalised)
