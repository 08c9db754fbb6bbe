"""Per-token KL between two columns of log-probs, and the penalised reward."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor
from torchrl.data import Composite
from torchrl.envs.llm.transforms import KLComputation as _KLComputation

from fusedrl import ragged
from fusedrl.compat.torch import NestedTensor
from fusedrl.ops.token_kl.samples import kl_and_reward, kl_of_samples
from fusedrl.transforms import columns
from fusedrl.transforms.columns import (
    Column,
    Columns,
    SampleColumns,
    column_rows,
    is_dense,
    is_nested,
)


class KLComputation(_KLComputation):
    """Write the per-token KL ``log_probs - ref_log_probs``, and subtract it from the reward.

    A drop-in for :class:`torchrl.envs.llm.transforms.KLComputation` that runs one op over the whole
    batch. It reads and writes the ``"next"`` entry if there is one, and the root otherwise. The
    layout of the KL follows that of the log-probs:

    - Lazy stack: one row for each sample; the rows are views of one buffer.
    - Nested tensors: a strided nested tensor, or a jagged one if the reward is jagged.
    - Dense ``[B, T]``: a dense KL, where torchrl returns a nested one or, with a reward, raises.

    The penalised reward keeps the layout of the reward, broadcast to the tokens.

    Args:
        gen_log_probs_full_key: key of the policy's log-probs in nats, a row ``[T]`` for each
            sample. NaN marks a token without a log-prob; its KL is 0.
        ref_log_probs_full_key: key of the reference's log-probs, with the same shapes.
        kl_key: key of the KL in nats, with the shape of the log-probs.
        add_to_reward: replace ``"reward"`` by ``reward - coeff * kl``, if there is a reward. It has
            the shape ``[T, 1]`` for each sample, or ``[1, 1]``, which is broadcast to the tokens.
        coeff: weight of the KL, a float or a 0-dim tensor.
        padding_side: ignored, since nothing is padded; accepted for torchrl's signature.
        older: the names ``gen_log_probs_key``, ``ref_log_probs_key`` and ``coef``, which torchrl's
            examples use.

    Raises:
        ValueError: both keys are equal, or columns are missing or have different shapes, also in
            some samples only. The tensordict is not changed then.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict, lazy_stack
        >>> from fusedrl import KLComputation
        >>> samples = [
        ...     TensorDict({
        ...         ("log_probs", "full"): -torch.ones(n),
        ...         ("ref_log_probs", "full"): -2 * torch.ones(n),
        ...         "reward": torch.zeros(n, 1),
        ...     })
        ...     for n in (2, 3)
        ... ]
        >>> data = KLComputation(coeff=0.1)(lazy_stack(samples))
        >>> data.get("kl_penalty", as_list=True)
        [tensor([1., 1.]), tensor([1., 1., 1.])]
        >>> data.get("reward", as_list=True)[0].squeeze(-1)
        tensor([-0.1000, -0.1000])
    """

    def __init__(
        self,
        gen_log_probs_full_key: NestedKey = ("log_probs", "full"),
        ref_log_probs_full_key: NestedKey = ("ref_log_probs", "full"),
        *,
        kl_key: NestedKey = "kl_penalty",
        add_to_reward: bool = True,
        coeff: float | Tensor = 1.0,
        padding_side: str = "left",
        **older: Any,
    ) -> None:
        gen_log_probs_full_key, ref_log_probs_full_key, coeff = columns.renamed(
            older, gen_log_probs_full_key, ref_log_probs_full_key, coeff
        )
        if unravel_key(gen_log_probs_full_key) == unravel_key(ref_log_probs_full_key):
            raise ValueError(
                f"ref_log_probs_full_key: expected another key than gen_log_probs_full_key's "
                f"{gen_log_probs_full_key!r}, got the same, which makes every KL 0; pass the key "
                "of the reference's log-probs"
            )
        super().__init__(
            gen_log_probs_full_key,
            ref_log_probs_full_key,
            kl_key=kl_key,
            add_to_reward=add_to_reward,
            coeff=coeff,  # pyright: ignore[reportArgumentType]
            padding_side=padding_side,
        )

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        data = columns.writable(self, tensordict)
        samples = columns.target_columns(data)
        if samples is None:
            return columns.run(self, self._step, data)
        self._penalise(samples)
        return data

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Transform a whole transition, as a replay buffer asks for with ``invert=True``."""
        return self.forward(next_tensordict)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        self._penalise(columns.columns_of(next_tensordict))
        return next_tensordict

    def _penalise(self, data: SampleColumns | Columns) -> None:
        keys = self.gen_log_probs_full_key, self.ref_log_probs_full_key
        log_probs, ref_log_probs = (_log_probs(data, key) for key in keys)
        reward = data.get("reward") if self.add_to_reward else None
        layout = layout_for(reward)
        kl, penalised = _penalty(log_probs, ref_log_probs, reward, self.coeff, layout)
        data.set(self.kl_key, kl, layout)
        if penalised is not None:
            data.set("reward", penalised, layout)

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        return columns.begin(tensordict, tensordict_reset, self.kl_key)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        columns.declare_tokens(observation_spec, self.kl_key)
        return observation_spec

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        before = reward_spec.get("reward", None) if self.add_to_reward else None
        if before is not None:
            columns.declare_tokens(reward_spec, "reward", 1, dtype=before.dtype)
        return reward_spec


def _penalty(
    log_probs: Column, ref_log_probs: Column, reward: Column | None, coeff: Any, layout: Any
) -> tuple[Column, Column | None]:
    """The KL and the penalised reward: dense or nested if all columns are, otherwise rows."""
    given: list[Any] = [log_probs, ref_log_probs, *([] if reward is None else [reward])]
    if all(map(is_dense, given)):
        return kl_and_reward(*given, coeff=coeff)
    if all(map(is_nested, given)):
        values, offsets = zip(*map(ragged.from_nested, given), strict=True)
        if all(torch.equal(x, offsets[0]) for x in offsets[1:]):
            nest = ragged.to_jagged if layout == torch.jagged else ragged.to_strided
            packed = [
                ragged.Packed(x, offsets[0])
                for x in kl_and_reward(*values, coeff=coeff)
                if x is not None
            ]
            return nest(packed[0]), None if reward is None else nest(packed[1])
    return kl_of_samples(*map(column_rows, given), coeff=coeff)


def layout_for(reward: Column | None) -> torch.layout:
    """The layout of nested results: jagged for a jagged reward, otherwise strided as in torchrl."""
    return torch.jagged if isinstance(reward, NestedTensor) else torch.strided


def _log_probs(data: SampleColumns | Columns, key: NestedKey) -> Column:
    log_probs = data.get(key)
    if log_probs is None:
        raise ValueError(
            f"tensordict: expected log-probs under {key!r}, found none; run RetrieveLogProb "
            "before, or pass the keys of the log-probs"
        )
    return log_probs
