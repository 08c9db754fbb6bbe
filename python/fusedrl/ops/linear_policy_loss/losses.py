"""Policy losses by name: what each is made of, and how much each token counts in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fusedrl.ops import _dispatch, _rows
from fusedrl.ops.importance_weights import LEVELS
from fusedrl.ops.token_kl import ESTIMATORS

SURROGATES = ("clip", "clipped_ratio", "cispo", "reinforce")
RATIOS = LEVELS
AGGREGATIONS = ("token", "sequence", "constant")
OF_THE_LOSS = "leave it out for that of the loss"


class Recipe(NamedTuple):
    """What a loss is made of unless the caller says otherwise."""

    surrogate: str
    ratio: str
    aggregation: str
    clip: tuple[float, float]


RECIPES = {
    "grpo": Recipe("clip", "token", "sequence", (0.2, 0.2)),
    "dapo": Recipe("clip", "token", "token", (0.2, 0.28)),
    "dr_grpo": Recipe("clip", "token", "constant", (0.2, 0.2)),
    "gspo": Recipe("clip", "geometric", "sequence", (3e-4, 4e-4)),
    "rloo": Recipe("clip", "sequence", "sequence", (0.2, 0.2)),
    "cispo": Recipe("cispo", "token", "token", (1.0, 4.0)),
    "reinforce": Recipe("reinforce", "token", "token", (0.0, 0.0)),
}


class Surrogate(NamedTuple):
    """The term of the advantages, as kernels take it.

    Args:
        kind: one of ``SURROGATES``.
        low: the lower bound of the ratio.
        high: the upper bound of the ratio.
        most: no larger ratio counts, whatever the sign of the advantage.
        estimator: of the KL terms, one of ``ESTIMATORS``.
    """

    kind: str
    low: float
    high: float
    most: float
    estimator: str

    @property
    def codes(self) -> tuple[int, float, float, float, int]:
        """The values as the compiled ops take them, in the order of their arguments."""
        return (
            SURROGATES.index(self.kind),
            *(self.low, self.high, self.most),
            ESTIMATORS.index(self.estimator),
        )


class TermWeights(NamedTuple):
    """How much each token counts in each term of the loss; ``None`` if none counts in a term."""

    objective: Tensor
    kl: Tensor | None = None
    old_kl: Tensor | None = None
    entropy: Tensor | None = None

    def stacked(self) -> Tensor:
        """The weights as kernels read them: float32 ``[..., 4]``."""
        zeros = torch.zeros_like(self.objective, dtype=torch.float32)
        columns = (zeros if column is None else column.to(zeros) for column in self)
        return torch.stack(tuple(columns), -1)


class PolicyBatch(NamedTuple):
    """What is known of each token besides its log-prob; shaped like the tokens.

    Args:
        advantages: of each token.
        old_log_probs: of the policy that generated; ``None`` if that is the policy itself.
        ref_log_probs: of the reference policy; ``None`` if the loss has no KL to one.
    """

    advantages: Tensor
    old_log_probs: Tensor | None
    ref_log_probs: Tensor | None


def recipe_of(
    loss: str,
    ratio: str | None,
    aggregation: str | None,
    clip: float | Sequence[float] | None,
    dual_clip: float | None,
    kl_estimator: str,
) -> tuple[Surrogate, str, str]:
    """The surrogate, the level of its ratio and the aggregation that these arguments ask for."""
    recipe = RECIPES[_dispatch.check_choice("loss", loss, RECIPES)]
    if ratio is None:
        ratio = recipe.ratio
    _dispatch.check_choice("ratio", ratio, RATIOS, OF_THE_LOSS)
    if recipe.surrogate != "clip" and ratio != "token":
        raise ValueError(
            f"ratio: expected 'token' with loss={loss!r}, got {ratio!r}; leave it out, or use a "
            "clipped loss, which has ratios of whole sequences"
        )
    if aggregation is None:
        aggregation = recipe.aggregation
    _dispatch.check_choice("aggregation", aggregation, AGGREGATIONS, OF_THE_LOSS)
    low, high = _bounds(recipe.clip if clip is None else clip)
    most = math.inf if dual_clip is None else _number("dual_clip", dual_clip)
    if dual_clip is not None and recipe.surrogate != "clip":
        raise ValueError(
            f"dual_clip: expected None with loss={loss!r}, which has no such bound, got "
            f"{dual_clip}; leave it out, or use a clipped loss"
        )
    if most < high:
        raise ValueError(
            f"dual_clip: expected at least 1 + clip[1] = {high:g}, got {dual_clip}; "
            "pass a larger one, or leave it out"
        )
    remedy = "leave it out for 'k3'"
    estimator = _dispatch.check_choice("kl_estimator", kl_estimator, ESTIMATORS, remedy)
    return Surrogate(recipe.surrogate, low, high, most, estimator), ratio, aggregation


def _bounds(clip: object) -> tuple[float, float]:
    pair = clip if isinstance(clip, (tuple, list)) else (clip, clip)
    if len(pair) != 2:
        raise ValueError(
            f"clip: expected a number or a pair (low, high), got {clip!r}; {OF_THE_LOSS}"
        )
    below, above = (_number("clip", value) for value in pair)
    if not (0 <= below <= 1 and above >= 0):
        raise ValueError(
            "clip: expected a low distance from 0 to 1 and a high one of at least 0, got "
            f"{clip!r}; {OF_THE_LOSS}"
        )
    return 1 - below, 1 + above


def _number(name: str, value: object) -> float:
    number = _dispatch.real_number(value)
    if number is None or math.isnan(number):
        raise ValueError(
            f"{name}: expected a number, got {value!r}; convert it with float(), or leave it out"
        )
    return float(number)


class Sequences(NamedTuple):
    """Which sequence each token belongs to, and which tokens are kept; all packed.

    Args:
        index: the number of each token's sequence.
        count: the number of sequences.
        kept: whether the token counts.
        offsets: where each sequence starts and ends.
    """

    index: Tensor
    count: int
    kept: Tensor
    offsets: Tensor

    def sums(self, values: Tensor) -> Tensor:
        """The sum of ``values`` over the kept tokens of each sequence."""
        values = torch.where(self.kept, values.flatten(), 0)
        return values.new_zeros(self.count).index_add(0, self.index, values)

    def lengths(self, dtype: torch.dtype) -> Tensor:
        """The number of kept tokens of each sequence, and 1 where there is none."""
        return self.sums(self.kept.to(dtype)).clamp(min=1)


def sequences_of(
    tokens: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    shift: bool,
) -> Sequences:
    """The sequences of a packed batch with offsets, or the rows of a padded one.

    With ``shift`` no row predicts the first token of a sequence, which therefore is not kept.
    """
    index, count = _rows.sequence_of_tokens(tokens, offsets)
    if offsets is None:
        offsets = torch.arange(count + 1, device=tokens.device) * tokens.shape[-1]
    places = torch.arange(tokens.numel(), device=tokens.device)
    kept = places >= 0
    if mask is not None:
        kept = kept & mask.flatten()
    if shift:
        kept = kept & (places != offsets[:-1][index])
    return Sequences(index, count, kept, offsets)


def log_ratios(log_ratio: Tensor, level: str, sequences: Sequences) -> Tensor:
    """The log-ratio of each token, or their sum or mean over the kept tokens of its sequence."""
    if level == "token":
        return log_ratio
    of_sequences = sequences.sums(log_ratio)
    if level == "geometric":
        of_sequences = of_sequences / sequences.lengths(log_ratio.dtype)
    return of_sequences[sequences.index].view(log_ratio.shape)


def shares(
    sequences: Sequences, aggregation: str, normalizer: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """How much each token counts in the loss, packed; 0 for a dropped one.

    With ``"token"``, 1 divided by the number of kept tokens. With ``"sequence"``, 1 divided by the
    number of sequences and by that of the kept tokens of its own sequence. With ``"constant"``, 1
    divided by ``normalizer``, which for the other two replaces the number of tokens or sequences.
    """
    kept = sequences.kept.to(dtype)
    if aggregation == "sequence":
        divisor = max(sequences.count, 1) if normalizer is None else normalizer
        return kept / sequences.lengths(dtype)[sequences.index] / divisor
    divisor = kept.sum().clamp(min=1) if normalizer is None else normalizer
    return kept / divisor
