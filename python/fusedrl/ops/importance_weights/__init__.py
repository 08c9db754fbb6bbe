"""Importance weights of tokens that another policy generated than the one that trains on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedrl import ragged
from fusedrl.ops import _dispatch, _rows
from fusedrl.ops._nested import accepts_nested
from fusedrl.ops._samples import check_lists, pack_columns
from fusedrl.ops.importance_weights import reference
from fusedrl.ops.importance_weights.staleness import check_versions, oldest_allowed

__all__ = ["LEVELS", "MODES", "ImportanceWeights", "Mismatch", "importance_weights"]

LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "mask")


class Mismatch(NamedTuple):
    """How far the policy that trains is from the one that generated, a value for each sequence.

    All fields but ``max_ratio`` are sums over the kept tokens whose log ratio is known, so that
    fields of two batches can be added. A sequence without such tokens has 0 in every field.

    Args:
        tokens: how many there are, int64 ``[B]``.
        clipped_tokens: how many of their ratios lie outside the bounds, int64 ``[B]``.
        k1_sum: of ``-d`` with the log ratio ``d = log_probs - rollout_log_probs``, float ``[B]``.
        k3_sum: of ``exp(d) - 1 - d``.
        weight_sum: of the weights.
        squared_weight_sum: of their squares.
        max_ratio: the largest ratio, before the bounds.
        stale_tokens: how many tokens ``max_token_staleness`` left out, int64 ``[B]``.
    """

    tokens: Tensor
    clipped_tokens: Tensor
    k1_sum: Tensor
    k3_sum: Tensor
    weight_sum: Tensor
    squared_weight_sum: Tensor
    max_ratio: Tensor
    stale_tokens: Tensor

    @property
    def k1(self) -> Tensor:
        """Mean k1 of a token in nats: KL(rollout || policy), unbiased, of either sign."""
        return self.k1_sum / self.tokens.clamp(min=1)

    @property
    def k3(self) -> Tensor:
        """Mean k3 of a token in nats: KL(rollout || policy), unbiased, never negative."""
        return self.k3_sum / self.tokens.clamp(min=1)

    @property
    def ess(self) -> Tensor:
        """Effective sample size in tokens, ``weight_sum**2 / squared_weight_sum``."""
        squares = self.squared_weight_sum
        return self.weight_sum.square() / squares.clamp(min=torch.finfo(squares.dtype).tiny)

    @property
    def clipped(self) -> Tensor:
        """Fraction of the tokens whose ratio lies outside the bounds."""
        return self.clipped_tokens / self.tokens.clamp(min=1)

    def total(self) -> Mismatch:
        """The same over all sequences together, as 0-dim tensors."""
        sums = Mismatch._make(field.sum() for field in self)
        return (
            sums if self.max_ratio.numel() == 0 else sums._replace(max_ratio=self.max_ratio.amax())
        )


class ImportanceWeights(NamedTuple):
    """Weights in the representation of the input, and the mismatch of each sequence."""

    weights: Any
    mismatch: Mismatch


@accepts_nested(
    "rollout_log_probs",
    optional=("mask", "token_policy_version"),
    form="[B, j]",
    fields=("weights",),
)
def importance_weights(
    log_probs: Tensor | Sequence[Tensor],
    rollout_log_probs: Tensor | Sequence[Tensor],
    mask: Tensor | Sequence[Tensor] | None = None,
    offsets: Tensor | None = None,
    *,
    level: str = "token",
    mode: str = "truncate",
    low: float | Tensor | None = None,
    high: float | Tensor | None = 2.0,
    nan: str = "propagate",
    token_policy_version: Tensor | Sequence[Tensor] | None = None,
    policy_version: int | None = None,
    max_token_staleness: int | None = None,
    impl: str = "auto",
) -> ImportanceWeights:
    r"""Importance weights of tokens that came from another policy than the one in training.

    Each token has a log ratio ``d = log_probs - rollout_log_probs``, and its ratio is
    :math:`e^{\min(x, 20)}`. At the level ``"token"``, x is d. At the level ``"sequence"``, x is the
    sum of d over the kept tokens of the sequence, and at ``"geometric"`` their mean, so that all
    tokens of a sequence have one ratio. The weight is the ratio, limited as ``mode`` says.

    Weights are constants: no gradient flows through them to the log-probs of either policy.

    Args:
        log_probs: float log-probs of the sampled tokens under the policy that trains: padded
            ``[B, T]``, a sequence a row, packed ``[N]`` with offsets, a jagged or strided nested
            tensor, or a list of 1-D tensors, one for each sequence.
        rollout_log_probs: those under the policy that generated, in the same form.
        mask: bool in the same form; ``None`` keeps all. A dropped token has weight exactly 0, and
            its log-probs are not read.
        offsets: int64 ``[B + 1]``, where each sequence of packed ``[N]`` values starts and ends. At
            the level of tokens they may be left out; all values then are one sequence.
        level: ``"token"``, ``"sequence"`` or ``"geometric"``.
        mode: what becomes of a ratio outside ``[low, high]``: ``"truncate"`` puts the bound in its
            place (TIS), ``"mask"`` puts 0 (MIS, IcePop).
        low: lower bound of the ratio, from 0 to 1e30; ``None`` for no bound. A 0-dim tensor may
            change under ``torch.compile`` without a recompile.
        high: upper bound of the ratio, in the same way.
        nan: ``"propagate"`` a NaN, or take it as ``"missing"``: a token whose log ratio is NaN then
            has ratio 1 at the level of tokens, adds nothing to the ratio of its sequence, and does
            not count in the mismatch.
        token_policy_version: the version that generated each token, int64 in the same form, as
            vLLM's policies report them. UUIDs have no age.
        policy_version: the version that trains.
        max_token_staleness: drop tokens whose version is more than this number behind
            ``policy_version``, as the mask does. ``None`` drops none.
        impl: ``"auto"`` takes the device's compiled kernel, or plain torch where there is none;
            ``"cpu"`` and ``"cuda"`` insist on the kernel, ``"reference"`` on plain torch.

    Returns:
        :class:`ImportanceWeights`: the weights in the form of ``log_probs``, float32 (float64 for
        float64), and the :class:`Mismatch` of each sequence.

    Raises:
        TypeError: a mask that is not bool, values that are not floating point, arguments of
            different forms, a sparse tensor, a bound that is no real number, versions that are no
            integers.
        ValueError: an unknown option, shapes, devices and offsets that do not fit, packed values
            without offsets where a sequence has one ratio, or bounds out of range or order. Bounds
            are not checked in a compiled graph, nor where they are tensors on the GPU.

    Example:
        >>> import torch
        >>> from fusedrl import importance_weights
        >>> policy = torch.tensor([[-1.0, -0.5, -2.0], [-1.0, -3.0, -1.0]])
        >>> rollout = torch.tensor([[-1.1, -0.5, -3.0], [-1.0, -1.0, -1.0]])
        >>> weights, mismatch = importance_weights(policy, rollout)
        >>> weights
        tensor([[1.1052, 1.0000, 2.0000],
                [1.0000, 0.1353, 1.0000]])
        >>> mismatch.max_ratio
        tensor([2.7183, 1.0000])
        >>> total = mismatch.total()
        >>> f"{total.k3:.3f} nats, {total.ess:.2f} of {total.tokens} tokens"
        '0.310 nats, 4.73 of 6 tokens'
        >>> importance_weights(policy, rollout, level="sequence", mode="mask", high=2.5).weights
        tensor([[0.0000, 0.0000, 0.0000],
                [0.1353, 0.1353, 0.1353]])
    """
    options: dict[str, Any] = {"level": level, "mode": mode, "nan": nan, "impl": impl}
    options |= {"low": low, "high": high}
    _check_options(level, mode, nan)
    if max_token_staleness is None:
        token_policy_version = None
    elif token_policy_version is None:
        raise ValueError(
            "token_policy_version: expected the version of each token with max_token_staleness, "
            "got None; pass what the policy reported"
        )
    else:
        options["oldest"] = oldest_allowed(policy_version, max_token_staleness)
    optional: Any = {"mask": mask, "token_policy_version": token_policy_version}
    if isinstance(log_probs, (list, tuple)):
        return _list(log_probs, rollout_log_probs, optional, offsets, options)
    _dispatch.check_tensor("log_probs", log_probs, _dispatch.DENSE, _dispatch.NESTED)
    assert isinstance(log_probs, Tensor)
    return _dense(log_probs, rollout_log_probs, optional, offsets, options)  # pyright: ignore[reportArgumentType]


def _check_options(level: str, mode: str, nan: str) -> None:
    _dispatch.check_choice("level", level, LEVELS)
    _dispatch.check_choice("mode", mode, MODES)
    _dispatch.check_choice("nan", nan, _dispatch.NANS)


def _list(
    log_probs: Sequence[Tensor],
    rollout_log_probs: Any,
    optional: dict[str, Any],
    offsets: Tensor | None,
    options: dict[str, Any],
) -> ImportanceWeights:
    if offsets is not None:
        raise ValueError(
            f"offsets: expected None with a list, whose samples have lengths, got "
            f"{_dispatch.kind(offsets)}; leave it out"
        )
    companions = {"rollout_log_probs": rollout_log_probs}
    companions |= {name: rows for name, rows in optional.items() if rows is not None}
    check_lists(**companions)
    if not any(map(len, (log_probs, *companions.values()))):
        counts = torch.zeros((3, 0), dtype=torch.int64, device="cpu")
        sums = torch.zeros((5, 0), dtype=torch.float32, device="cpu")
        return ImportanceWeights([], Mismatch(*counts[:2], *sums, stale_tokens=counts[2]))
    packed = pack_columns(log_probs, companions)
    policy, *others = packed.columns
    columns = dict(zip(companions, others, strict=True))
    of_samples = ragged.offsets_of(packed.lengths, policy.device)
    rollout = columns.pop("rollout_log_probs")
    weighed = _dense(policy, rollout, columns, of_samples, options)
    return weighed._replace(weights=list(weighed.weights.split(packed.lengths)))


def _dense(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    optional: Mapping[str, Tensor | None],
    offsets: Tensor | None,
    options: dict[str, Any],
) -> ImportanceWeights:
    mask, versions = optional.get("mask"), optional.get("token_policy_version")
    _check(log_probs, rollout_log_probs, mask, offsets, options["level"])
    stale = None
    if versions is not None:
        check_versions(versions)
        like = log_probs.shape, log_probs.device, " like log_probs"
        _dispatch.check_same("token_policy_version", versions, *like)
        stale = versions < options["oldest"]
        stale, mask = (stale, ~stale) if mask is None else (stale & mask, ~stale & mask)
    dtype = torch.promote_types(log_probs.dtype, rollout_log_probs.dtype)
    device = log_probs.device
    chosen = _dispatch.choose(options["impl"], "importance_weights", device, dtype)
    low, high = _bounds(options["low"], options["high"], device)
    level, mode, missing = options["level"], options["mode"], options["nan"] == "missing"
    # Constants, whichever way a caller differentiates.
    log_probs, rollout_log_probs = (x.detach().to(dtype) for x in (log_probs, rollout_log_probs))
    if chosen == "reference":
        sequences, count = _rows.sequence_of_tokens(log_probs, offsets)
        kept = None if mask is None else mask.flatten()
        values = log_probs.flatten(), rollout_log_probs.flatten()
        weights, counts, sums = reference.importance_weights(
            *values, kept, sequences, count, low, high, level, mode, missing
        )
        weights = weights.view(log_probs.shape)
    else:
        weights, counts, sums = torch.ops.fusedrl.importance_weights(
            log_probs.contiguous(),
            rollout_log_probs.contiguous(),
            None if mask is None else mask.contiguous(),
            None if offsets is None else offsets.to(torch.int64).contiguous(),
            low,
            high,
            LEVELS.index(level),
            mode == "mask",
            missing,
        )
    of_sequences = counts.new_zeros(len(counts))
    if stale is not None:
        sequences, _ = _rows.sequence_of_tokens(log_probs, offsets)
        of_sequences = of_sequences.index_add(0, sequences, stale.flatten().to(torch.int64))
    return ImportanceWeights(
        weights, Mismatch(*counts.unbind(1), *sums.unbind(1), stale_tokens=of_sequences)
    )


def _check(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    level: str,
) -> None:
    for name, value in (("log_probs", log_probs), ("rollout_log_probs", rollout_log_probs)):
        _dispatch.check_tensor(name, value, like="" if value is log_probs else " like log_probs")
        _dispatch.check_floating(name, value)
    if log_probs.dim() not in (1, 2):
        raise ValueError(
            f"log_probs: expected [N] packed or [B, T] padded, got shape "
            f"{tuple(log_probs.shape)}; give each sequence a row, or flatten all and pass offsets"
        )
    shape, device, like = log_probs.shape, log_probs.device, " like log_probs"
    _dispatch.check_same("rollout_log_probs", rollout_log_probs, shape, device, like)
    _dispatch.check_mask(mask, shape, device, like)
    if log_probs.dim() == 2 and offsets is not None:
        raise ValueError(
            "offsets: expected None with padded [B, T] log_probs (one sequence a row), "
            "got a tensor; flatten the log-probs if it is of packed values"
        )
    if log_probs.dim() == 1 and offsets is None and level != "token":
        raise ValueError(
            f"offsets: expected the sequence boundaries of packed [N] log_probs with "
            f"level={level!r}, got None; pass offsets=torch.tensor([0, N]) if all tokens are one "
            "sequence"
        )
    _dispatch.check_offsets(offsets, log_probs.numel(), log_probs.device)


def _bounds(
    low: float | Tensor | None, high: float | Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Both bounds as 0-dim float64 tensors: 0 or infinity, which no ratio passes, for ``None``."""

    def bound(name: str, value: float | Tensor | None, none: float) -> Tensor:
        if value is None:
            return torch.full((), none, dtype=torch.float64, device="cpu")
        return _dispatch.scalar_tensor(
            *(name, value, device, 0.0, _dispatch.LARGEST), remedy="None sets no bound"
        )

    least, most = bound("low", low, 0.0), bound("high", high, torch.inf)
    if low is not None and high is not None:
        known = all(x.is_cpu and _dispatch.has_values(x) for x in (least, most))
        if known and least.item() > most.item():
            raise ValueError(
                f"low: expected at most high={most.item():g}, got {least.item():g}; swap the bounds"
            )
    return least, most


def _fake(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    count, dtype = _rows.count_sequences(log_probs, offsets), _dispatch.result_dtype(log_probs)
    return (
        log_probs.new_empty(log_probs.shape, dtype=dtype),
        log_probs.new_empty((count, 2), dtype=torch.int64),
        log_probs.new_empty((count, 5), dtype=dtype),
    )


_dispatch.register_fakes({"importance_weights": _fake})
