"""Losses of the ranks that share a model: what all refuse, and how much each counts."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from torch import Tensor

from fusedrl.models.ranks import Step
from fusedrl.objectives.scores import Scores

_MEANS = ("loss_objective", "loss_entropy")
_MEANS_OF_PLACES = ("loss_kl_to_ref", "loss_kl_to_inference")


def check_data(loss: Any, td: TensorDictBase) -> None:
    """Refuse, before a forward pass, what torchrl would refuse by itself."""
    for key in (loss.tensor_keys.action, loss.tensor_keys.advantage):
        if td.get(key, None, as_padded_tensor=True) is None:  # pyright: ignore[reportCallIssue]
            raise ValueError(
                f"{key}: expected it in the data of every rank, got none; add it, or name another "
                "key with set_keys()"
            )
    if (problem := misshapen_advantage(loss, td)) is not None:
        raise ValueError(problem)
    key = loss.tensor_keys.ref_log_probs
    if (loss.kl_to_ref_coeff or 0) > 0 and td.get(key, None, as_padded_tensor=True) is None:  # pyright: ignore[reportCallIssue]
        raise KeyError(
            f"{key}: expected log-probs of the reference for kl_to_ref_coeff, got none; add them "
            "with RetrieveLogProb"
        )
    if loss.average_tokens_across_devices and (
        "none" in (loss.aggregation, loss.reduction) or loss.kl_mask_threshold
    ):
        raise ValueError(
            "average_tokens_across_devices: expected a loss with a mean over tokens that are known "
            "before it is computed, got one without a mean or with kl_mask_threshold; set it to "
            "False"
        )


def misshapen_advantage(loss: Any, td: TensorDictBase) -> str | None:
    """What is wrong with the shape of the advantage, for an error; ``None`` if it fits."""
    key = loss.tensor_keys.advantage
    value, old = (
        td.get(name, None, as_padded_tensor=True)  # pyright: ignore[reportCallIssue]
        for name in (key, loss.tensor_keys.sample_log_prob)
    )
    if not isinstance(value, Tensor) or not isinstance(old, Tensor) or old.dim() != 2:
        return None
    (rows, tokens), shape = old.shape, value.shape
    if len(shape) == 3 and shape[0] in (1, rows) and shape[1] in (1, tokens):
        return None
    remedy = "give one value for each answer, or one for each token"
    if value.numel() == rows:
        remedy = "reshape it with .view(-1, 1, 1)"
    elif shape == old.shape:
        remedy = "append a dimension with .unsqueeze(-1)"
    return (
        f"{key}: expected shape ({rows}, 1, 1), one for each answer, or ({rows}, {tokens}, 1), "
        f"one for each token, got {tuple(shape)}; {remedy}"
    )


def shares_of(loss: Any, scores: Scores, step: Step) -> tuple[float, float]:
    """What a rank's means count among those of all ranks: those of tokens, and of all places.

    Both are 1 where each rank has as many. Torch averages the gradients of ranks, so that a rank
    with a part ``p`` of all tokens, of ``R`` ranks, counts ``p * R``.
    """
    rows, width = scores.counted.shape
    count = rows if loss.aggregation == "prompt_mean" else int(scores.counted.sum())
    ranks, counts, all_rows = step.total(1, count, rows)
    # One process would pad all rows to the longest.
    places = all_rows * step.largest(width)
    return count * ranks / max(counts, 1), rows * width * ranks / max(places, 1)


def weighed(output: Any, of_tokens: float, of_places: float) -> Any:
    """The output of a loss with its terms multiplied."""
    for names, share in ((_MEANS, of_tokens), (_MEANS_OF_PLACES, of_places)):
        for name in names:
            value = getattr(output, name, None)
            if value is not None:
                setattr(output, name, value * share)
    return output
