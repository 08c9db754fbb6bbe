"""Calls of every op on small inputs, for ``fusedrl check`` and the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedrl.ops import RECIPES
from fusedrl.ops.exact_kl import DIRECTIONS, exact_kl
from fusedrl.ops.linear_exact_kl import linear_exact_kl
from fusedrl.ops.linear_policy_loss import linear_policy_loss
from fusedrl.ops.linear_token_log_probs import linear_token_log_probs
from fusedrl.ops.token_kl import ESTIMATORS, token_kl
from fusedrl.ops.token_log_probs import token_log_probs


def tensors(result: Any) -> list[Tensor]:
    """All tensors in the result of an op."""
    if isinstance(result, Tensor):
        return [result]
    return [x for part in result if part is not None for x in tensors(part)]


class Case(NamedTuple):
    """A call of an op.

    Args:
        op: the public function.
        name: the options of this call.
        inputs: float32 tensors by argument name. The op is differentiable in all of them.
        others: all other arguments by name, tensors and options.
        results: extracts the tensors to compare from the result of the op.
    """

    op: Callable[..., Any]
    name: str
    inputs: dict[str, Tensor]
    others: dict[str, Any]
    results: Callable[[Any], list[Tensor]] = tensors

    def call(self, inputs: dict[str, Tensor], **options: Any) -> list[Tensor]:
        """The results of the op for these inputs, with more options."""
        return self.results(self.op(**inputs, **self.others | options))

    def to(self, device: torch.device | str) -> Case:
        """The case with all its tensors on a device."""
        return self.mapped(lambda x: x.to(device))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Case:
        """The case with ``change`` applied to each of its tensors."""
        inputs, others = (
            {name: change(x) if isinstance(x, Tensor) else x for name, x in values.items()}
            for values in (self.inputs, self.others)
        )
        return self._replace(inputs=inputs, others=others)


class Problem:
    """Random tensors for a padded batch.

    Args:
        classes: size of the vocabulary, at least 2.
        sequences: number of sequences.
        length: tokens of a sequence, with padding.
        width: size of the hidden states.
    """

    def __init__(
        self, classes: int = 2, sequences: int = 3, length: int = 9, width: int = 64
    ) -> None:
        self.classes, self.shape, self.width = classes, (sequences, length), width
        self._generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int) -> Tensor:
        """Normal numbers of any shape."""
        return torch.randn(shape, generator=self._generator)

    def column(self) -> Tensor:
        """A normal number for each token."""
        return self.normal(*self.shape)

    def logits(self, scale: float = 2.0) -> Tensor:
        """Logits of each token."""
        return scale * self.normal(*self.shape, self.classes)

    def head(self, prefix: str = "", width: int | None = None) -> dict[str, Tensor]:
        """Hidden states, weight and bias by argument name, for logits of order 1."""
        width = width or self.width
        return {
            f"{prefix}hidden": self.normal(*self.shape, width),
            f"{prefix}weight": self.normal(self.classes, width) / width**0.5,
            f"{prefix}bias": self.normal(self.classes),
        }

    def tokens(self) -> Tensor:
        """A class for each token."""
        return torch.randint(self.classes, self.shape, generator=self._generator)

    def mask(self) -> Tensor:
        """A mask that keeps about two thirds of the tokens, including the first and the last."""
        mask = torch.rand(self.shape, generator=self._generator) < 0.7
        mask[0, 0] = mask[-1, -1] = True
        return mask

    def offsets(self) -> Tensor:
        """Offsets of the packed batch: sequences of one token, of none, and two longer ones."""
        total = self.shape[0] * self.shape[1]
        return torch.tensor([0, 1, 1, total // 2, total])


def _token_log_probs(problem: Problem) -> Iterator[Case]:
    tokens, mask = problem.tokens(), problem.mask()
    rows = {"logits": problem.logits(4)}
    options = {"shift": True, "entropy": True}
    packed = {"tokens": tokens.flatten(), "mask": mask.flatten(), "offsets": problem.offsets()}
    one_by_one = {"logits": rows["logits"].flatten(0, 1)}
    yield Case(token_log_probs, "plain", rows, {"tokens": tokens})
    others = {"tokens": tokens, "mask": mask, "temperature": torch.tensor(0.7)}
    yield Case(token_log_probs, "mask shift entropy", rows, others | options)
    yield Case(token_log_probs, "packed mask shift entropy", one_by_one, packed | options)


def _linear_token_log_probs(problem: Problem) -> Iterator[Case]:
    options = {"softcap": 5.0, "shift": True, "entropy": True}
    others = {"tokens": problem.tokens(), "mask": problem.mask()} | options
    yield Case(linear_token_log_probs, "mask shift softcap entropy", problem.head(), others)


def _linear_policy_loss(problem: Problem) -> Iterator[Case]:
    head: dict[str, Any] = problem.head()
    options: dict[str, Any] = {"tokens": problem.tokens(), "shift": True}
    log_probs = linear_token_log_probs(**head, **options, impl="reference").log_probs
    # Close to those of the policy, so that only some ratios are clipped.
    old_log_probs = log_probs + 0.3 * problem.column()
    others = options | {
        "mask": problem.mask(),
        "token_advantages": problem.column(),
        "old_log_probs": old_log_probs,
        "ref_log_probs": old_log_probs + problem.column(),
    }
    others |= {"kl_coeff": 0.1, "entropy_coeff": 0.1, "normalizer": 27.0}
    for loss in RECIPES:
        case = Case(linear_policy_loss, f"{loss} mask shift", head, others | {"loss": loss})
        yield case._replace(results=lambda result: [result.loss])


def _token_kl(problem: Problem) -> Iterator[Case]:
    log_probs = -problem.column().abs()
    # Differences from 1e-5, where k3 suffers from cancellation, to 1.
    size = 10 ** -problem.column().abs().clamp(max=5)
    columns = {"log_probs": log_probs, "ref_log_probs": log_probs + size * problem.column().sign()}
    mask, reward = problem.mask(), problem.column()
    for estimator in ESTIMATORS:
        options = {"estimator": estimator}
        yield Case(token_kl, estimator, columns, options)
        others = options | {"mask": mask, "coeff": torch.tensor(0.1)}
        yield Case(token_kl, f"{estimator} mask reward", columns | {"reward": reward}, others)


def _exact_kl(problem: Problem) -> Iterator[Case]:
    rows = {"logits": problem.logits(), "ref_logits": problem.logits()}
    others = {"mask": problem.mask(), "temperature": 0.7, "shift": True, "entropy": True}
    for direction in DIRECTIONS:
        options = others | {"direction": direction}
        yield Case(exact_kl, f"{direction} mask shift entropy", rows, options)


def _linear_exact_kl(problem: Problem) -> Iterator[Case]:
    heads = problem.head() | problem.head("ref_", problem.width + 32)
    others = {"mask": problem.mask(), "softcap": 5.0, "shift": True, "entropy": True}
    for direction in DIRECTIONS:
        options = others | {"direction": direction}
        if direction == "jensen_shannon":
            options["beta"] = 0.2
        yield Case(linear_exact_kl, f"{direction} mask shift softcap entropy", heads, options)


# The calls of each op, and problem sizes that cover the code paths of its kernels.
OPS: dict[str, tuple[Callable[[Problem], Iterator[Case]], list[dict[str, int]]]] = {
    "token_log_probs": (_token_log_probs, [{"classes": n} for n in (2, 1001, 32768)]),
    "linear_token_log_probs": (_linear_token_log_probs, [{"classes": 2}, {"classes": 2500}]),
    "linear_policy_loss": (_linear_policy_loss, [{"classes": 2}, {"classes": 2500}]),
    "token_kl": (_token_kl, [{"length": 1000}]),
    "exact_kl": (_exact_kl, [{"classes": 2}, {"classes": 1001}]),
    "linear_exact_kl": (_linear_exact_kl, [{"classes": 2}, {"classes": 2500}]),
}


def cases_of(op: str, **size: int) -> Iterator[Case]:
    """The cases of an op for one problem size, or by default for all sizes listed for the op."""
    calls, sizes = OPS[op]
    for each in [size] if size else sizes:
        for case in calls(Problem(**each)):
            classes = f"V={each['classes']} " if "classes" in each else ""
            yield case._replace(name=f"{classes}{case.name}")


def all_cases(**size: int) -> dict[str, Case]:
    """The cases of all ops for one problem size, by the names of the op and the case."""
    return {f"{op}, {case.name}": case for op in OPS for case in cases_of(op, **size)}
