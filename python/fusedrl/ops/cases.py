"""Calls of every op on small inputs: what ``fusedrl check`` compares and what all tests share.

The package of each op has a module ``cases`` with a function ``cases(problem)`` and, as
``SIZES``, arguments of :class:`Problem` for which its kernel runs in different ways.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedrl.ops import OPS


def tensors(result: Any) -> list[Tensor]:
    """All tensors of what an op returns."""
    if isinstance(result, Tensor):
        return [result]
    return [x for part in result if part is not None for x in tensors(part)]


class Case(NamedTuple):
    """A call of an op.

    Args:
        op: the public function.
        name: what is special about this call.
        inputs: float32 tensors by the names of their arguments. The op differentiates with respect
            to all of them.
        others: the other arguments by name, tensors and options.
        results: takes the tensors to compare out of what the op returns.
    """

    op: Callable[..., Any]
    name: str
    inputs: dict[str, Tensor]
    others: dict[str, Any]
    results: Callable[[Any], list[Tensor]] = tensors

    def call(self, inputs: dict[str, Tensor], **options: Any) -> list[Tensor]:
        """The results of the op, with other inputs, and more options."""
        return self.results(self.op(**inputs, **self.others | options))

    def to(self, device: torch.device | str) -> Case:
        """The case with all its tensors on a device."""
        return self.mapped(lambda x: x.to(device))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Case:
        """The case with what ``change`` makes of each of its tensors."""
        inputs, others = (
            {name: change(x) if isinstance(x, Tensor) else x for name, x in values.items()}
            for values in (self.inputs, self.others)
        )
        return self._replace(inputs=inputs, others=others)


class Problem:
    """Random tensors of a padded batch, and its classes.

    Args:
        classes: size of the vocabulary, at least 2.
        sequences: number of sequences.
        length: tokens of a sequence, with padding.
        width: of the hidden states.
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
        """Hidden states, weight and bias of logits of order 1, by the names of their arguments."""
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
        """Which tokens count: about two thirds of them, the first and the last included."""
        mask = torch.rand(self.shape, generator=self._generator) < 0.7
        mask[0, 0] = mask[-1, -1] = True
        return mask

    def offsets(self) -> Tensor:
        """Sequences of the packed batch: one of a token, one of none, and two others."""
        total = self.shape[0] * self.shape[1]
        return torch.tensor([0, 1, 1, total // 2, total])


def cases_of(op: str, **size: int) -> Iterator[Case]:
    """The cases of an op: of a problem of one size, or of each of the op's ``SIZES``."""
    module = importlib.import_module(f"fusedrl.ops.{op}.cases")
    for each in (size,) if size else module.SIZES:
        for case in module.cases(Problem(**each)):
            classes = f"V={each['classes']} " if "classes" in each else ""
            yield case._replace(name=f"{classes}{case.name}")


def all_cases(**size: int) -> dict[str, Case]:
    """The cases of all ops on problems of one size, by the names of the op and the case."""
    return {f"{op}, {case.name}": case for op in OPS for case in cases_of(op, **size)}
