"""Teachers of whom the log-probs of k classes are known: checks, and divergences from them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fusedrl.compat.torch import assert_on_device
from fusedrl.ops import _dispatch, _rows
from fusedrl.ops.exact_kl import Divergence, chosen_divergence
from fusedrl.ops.exact_kl.reference import divergence_of
from fusedrl.ops.token_log_probs.reference import place_of, rows_of_tokens

TAILS = ("bucket", "renormalize")
LEAST_REST = 1e-6  # float32 log-probs do not tell a smaller one from none
# What log-probs of all classes may sum to that were rounded to bfloat16.
LEAST_PROBABILITY, MOST_PROBABILITY = 0.95, 1.05
SUM_EXPECTED = "teacher_log_probs: expected log-probs whose probabilities sum to"
OR_NONE = "mask the token, or set the id to -1"
NORMALISE = "apply log_softmax over the whole vocabulary, and pass no class twice"
RENORMALISE = "apply log_softmax over the whole vocabulary, or pass tail='renormalize'"


class Teacher(NamedTuple):
    """What is known of each token's teacher, and how a student is compared with it."""

    rows: Tensor  # [tokens], which flat row of the batch each token reads
    ids: Tensor  # [..., k], -1 for no class and for those of tokens that are not compared
    log_probs: Tensor  # [..., k], -inf where there is no class
    rest: Tensor  # [..., 1], the probability of all other classes, to rounding
    keep: Tensor  # [...], which tokens are compared: those without ids are not
    complete: Tensor  # [..., 1], whether the ids are all classes
    divergence: Divergence
    tail: str


def prepare(
    rows: Tensor,
    like: str,
    classes: int,
    ids: Tensor,
    log_probs: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    shift: bool,
    direction: str,
    beta: float | None,
    tail: str,
) -> Teacher:
    """Refuse what does not fit the rows of the argument ``like``. The teacher gets no gradient."""
    chosen = chosen_divergence(direction, beta)
    _dispatch.check_choice("tail", tail, TAILS)
    _check_ids(ids, rows, like)
    _dispatch.check_tensor("teacher_log_probs", log_probs, like=" like ids")
    _dispatch.check_floating("teacher_log_probs", log_probs)
    _dispatch.check_same(
        *("teacher_log_probs", log_probs, ids.shape, rows.device),
        *(" like ids", None, "give one log-prob for each id"),
    )
    _dispatch.check_mask(mask, rows.shape[:-1], rows.device, f" for {like}", rows)
    read, present = rows_of_tokens(rows[..., 0], offsets, shift)
    keep = present.view(rows.shape[:-1])
    if mask is not None:
        keep = keep & mask
    ids = ids.to(torch.int64).contiguous()
    known = (ids >= 0) & keep[..., None]
    ids = ids.masked_fill(~known, -1)
    in_order = ids.sort(-1).values
    _check(in_order >= classes, in_order, f"ids: expected values below {classes}", OR_NONE)
    twice = (in_order.diff(dim=-1) == 0) & (in_order[..., 1:] >= 0)
    expected = "ids: expected every class at most once a token"
    _check(twice, in_order[..., 1:], expected, "set all but one of them to -1")
    dtype = _dispatch.result_dtype(rows)
    log_probs = log_probs.detach().to(dtype).masked_fill(~known, -torch.inf)
    total = log_probs.double().exp().sum(-1, keepdim=True)  # 1 less it keeps few digits
    _check(total > MOST_PROBABILITY, total, f"{SUM_EXPECTED} at most 1 a token", NORMALISE)
    keep, complete = known.any(-1), known.sum(-1, keepdim=True) == classes
    if tail == "bucket":
        less = complete & (total < LEAST_PROBABILITY)
        expected = f"{SUM_EXPECTED} 1 a token of which all classes are known"
        _check(less, total, expected, RENORMALISE)
    return Teacher(read, ids, log_probs, (1 - total).to(dtype), keep, complete, chosen, tail)


def _check(refused: Tensor, values: Tensor, expected: str, remedy: str) -> None:
    """Refuse values ``[..., n]`` of tokens; on a GPU by an assert, for which nobody waits."""
    if not (values.is_cpu and _dispatch.has_values(values)):
        assert_on_device(~refused.any(), f"{expected}, got others; {remedy}")
        return
    found = refused.flatten(0, -2).nonzero()
    if len(found):
        token, place = found[0].tolist()
        raise RuntimeError(
            f"{expected}, got {round(values.flatten(0, -2)[token, place].item(), 3)} at "
            f"{place_of(token, values.shape[:-1])}; {remedy}"
        )


def _check_ids(ids: Tensor, rows: Tensor, like: str) -> None:
    _dispatch.check_tensor("ids", ids, like=f" like {like}")
    if ids.dtype not in _rows.TOKEN_DTYPES:
        raise TypeError(
            f"ids: expected an integer dtype up to int64, got {ids.dtype}; convert it with .long()"
        )
    expected = rows.shape[:-1]
    if ids.dim() != rows.dim() or ids.shape[:-1] != expected or ids.shape[-1] == 0:
        sizes = ", ".join(map(str, (*expected, "k")))
        raise ValueError(
            f"ids: expected shape ({sizes}) with k of at least 1 for {like} of shape "
            f"{tuple(rows.shape)}, got {tuple(ids.shape)}; give k classes for each row"
        )
    _dispatch.check_device("ids", ids, rows.device)


def divergence(log_probs: Tensor, teacher: Teacher) -> Tensor:
    """The divergence of a student with log-probs ``[..., k]`` of the ids, -inf of none."""
    absent = teacher.ids < 0
    student = log_probs.masked_fill(absent, -torch.inf)
    known, dropped = teacher.log_probs, ~teacher.keep
    if teacher.tail == "renormalize":
        student, known = (
            torch.log_softmax(x.masked_fill(dropped[..., None], 0), -1) for x in (student, known)
        )
    else:
        of_ids = student.double().exp().sum(-1, keepdim=True)
        rests = ((1 - of_ids).to(student), teacher.rest)
        student, known = (
            torch.cat((x, _log_rest(rest, teacher)), -1)
            for x, rest in zip((student, known), rests, strict=True)
        )
    beta, swapped = teacher.divergence
    p, q = (known, student) if swapped else (student, known)
    return divergence_of(p, q, beta).masked_fill(dropped, 0)


def _log_rest(rest: Tensor, teacher: Teacher) -> Tensor:
    """The log-prob ``[..., 1]`` of all other classes."""
    return rest.clamp(min=LEAST_REST).log().masked_fill(teacher.complete, -torch.inf)
