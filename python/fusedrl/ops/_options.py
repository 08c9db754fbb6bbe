"""The options of ops for type checkers, which read them where an op has several signatures."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import TypedDict  # a part of torch's own installation


class RowOptions(TypedDict, total=False):
    """Options of ops over rows of logits."""

    offsets: Tensor | None
    shift: bool
    temperature: float | Tensor
    impl: str


class LinearOptions(RowOptions, total=False):
    """Options of an op over hidden states and their head."""

    bias: Tensor | None
    softcap: float | None
    scale: float | None
    batch_invariant: bool


class DivergenceOptions(RowOptions, total=False):
    """Options of a divergence of two distributions."""

    direction: str
    beta: float | None


class LinearDivergenceOptions(LinearOptions, DivergenceOptions, total=False):
    """Options of a divergence of two heads."""

    ref_bias: Tensor | None
    ref_softcap: float | None
    ref_scale: float | None


class EstimateOptions(TypedDict, total=False):
    """Options of an estimate of the KL divergence."""

    offsets: Tensor | None
    estimator: str
    coeff: float | Tensor
    nan: str
    impl: str
