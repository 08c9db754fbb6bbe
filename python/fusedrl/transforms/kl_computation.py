"""Per-token KL between two columns of log-probs, and the reward that it penalises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor
from torchrl.data import Composite
from torchrl.envs.llm.transforms import KLComputation as _KLComputation

from fusedrl import ragged
from fusedrl.ops._samples import PackedColumns
from fusedrl.ops.token_kl import kl_of_lists, token_kl
from fusedrl.transforms import columns, transitions
from fusedrl.transforms.columns import Column, Columns, SampleColumns, column_rows, is_dense
from fusedrl.transforms.renamed_arguments import accept_renamed, refuse

Data = SampleColumns | Columns


class KLComputation(_KLComputation):
    """Write the per-token KL ``log_probs - ref_log_probs``, and subtract it from the reward.

    A drop-in for :class:`torchrl.envs.llm.transforms.KLComputation` that runs one op over the whole
    batch. It reads and writes the ``"next"`` entry if there is one, and the root otherwise. The
    form of the KL follows that of the log-probs:

    - A stack of samples gets one row in each sample; the rows are views of one buffer.
    - Nested columns give a strided nested tensor, or a jagged one if the reward is jagged.
    - Dense columns ``[B, T]`` give a dense KL, where torchrl gives a nested one, or raises an
      error if there is a reward.

    The penalised reward keeps the layout of the reward, broadcast to the tokens.

    Args:
        gen_log_probs_full_key: key of the policy's log-probs in nats, a row ``[T]`` for each
            sample. A NaN means that the token has no score, and its KL is 0.
        ref_log_probs_full_key: key of the reference's log-probs, which have the same shapes.
        kl_key: where the KL goes, in nats, with the shape of the log-probs.
        add_to_reward: replace ``"reward"`` by ``reward - coeff * kl``, if there is a reward. It has
            the shape ``[T, 1]`` for each sample, or ``[1, 1]``, which is broadcast to the tokens.
        coeff: weight of the KL, a float or a 0-dim tensor.
        padding_side: without effect, because nothing is padded; torchrl's signature has it.

    Raises:
        TypeError: an unknown argument, or an argument under its former and its present name.
        ValueError: the two log-probs have one key, or columns do not fit each other or are
            missing, also in some of the samples only. The tensordict is then unchanged.

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

    @accept_renamed()
    def __init__(
        self,
        gen_log_probs_full_key: NestedKey = ("log_probs", "full"),
        ref_log_probs_full_key: NestedKey = ("ref_log_probs", "full"),
        *,
        kl_key: NestedKey = "kl_penalty",
        add_to_reward: bool = True,
        coeff: float | Tensor = 1.0,
        padding_side: str = "left",
        **unknown: Any,
    ) -> None:
        refuse(unknown)
        if unravel_key(gen_log_probs_full_key) == unravel_key(ref_log_probs_full_key):
            raise ValueError(
                f"ref_log_probs_full_key: expected another key than gen_log_probs_full_key's "
                f"{gen_log_probs_full_key!r}, got the same, of which every KL is 0; name the key "
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
        data = transitions.writable(self, tensordict)
        rows = columns.target_columns(data)
        if rows is not None:
            self._penalise(rows)
            return data
        following = transitions.following(data)
        if following is None:
            return self._step(data, data)
        return data.set("next", self._step(data, following))

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Transform a whole transition, as a replay buffer asks for with ``invert=True``."""
        return self.forward(next_tensordict)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        self._penalise(columns.columns_of(next_tensordict))
        return next_tensordict

    def reward_of(self, data: Data) -> Column | None:
        """The reward that the KL is subtracted from; ``None`` if there is none, or is not to be."""
        return data.get("reward") if self.add_to_reward else None

    def _penalise(self, data: Data) -> None:
        log_probs = data.get(self.gen_log_probs_full_key)
        ref_log_probs = data.get(self.ref_log_probs_full_key)
        for key, value in (
            (self.gen_log_probs_full_key, log_probs),
            (self.ref_log_probs_full_key, ref_log_probs),
        ):
            if value is None:
                raise ValueError(
                    f"tensordict: expected log-probs under {self.gen_log_probs_full_key!r} and "
                    f"{self.ref_log_probs_full_key!r}, found none under {key!r}; "
                    "run RetrieveLogProb before, or name the keys where they are"
                )
        assert log_probs is not None and ref_log_probs is not None
        reward = self.reward_of(data)
        given = (log_probs, ref_log_probs) if reward is None else (log_probs, ref_log_probs, reward)
        if all(map(is_dense, given)):
            self._dense(data, *given)  # pyright: ignore[reportArgumentType]
        else:
            self._ragged(data, *given)

    def _dense(
        self, data: Data, log_probs: Tensor, ref_log_probs: Tensor, reward: Tensor | None = None
    ) -> None:
        if reward is None:
            data.set(self.kl_key, token_kl(log_probs, ref_log_probs, nan="missing"))
            return
        _check_reward_dims([log_probs], [reward])
        if not reward.is_floating_point():
            reward = reward.to(log_probs.dtype)
        if reward.shape == (*log_probs.shape, 1):
            kl, penalised = token_kl(
                log_probs, ref_log_probs, reward=reward.squeeze(-1), coeff=self.coeff, nan="missing"
            )
            penalised = penalised.unsqueeze(-1)
        else:
            kl = token_kl(log_probs, ref_log_probs, nan="missing")
            penalised = reward - self.coeff * kl.unsqueeze(-1)
        data.set(self.kl_key, kl)
        data.set("reward", penalised)

    def _ragged(
        self, data: Data, log_probs: Column, ref_log_probs: Column, reward: Column | None = None
    ) -> None:
        # torchrl gives a strided KL for jagged log-probs, and raises an error for a jagged reward.
        layout = torch.jagged if isinstance(reward, NestedTensor) else torch.strided
        found = self._nested(log_probs, ref_log_probs, reward)
        if found is None:
            rows, ref_rows = column_rows(log_probs), column_rows(ref_log_probs)
            rewards = None if reward is None else column_rows(reward)
            if not _are_token_rows(rows, rewards):
                if rewards is not None:
                    _check_reward_dims(rows, rewards)
                self._each(data, rows, ref_rows, rewards, layout)
                return
            options: dict[str, Any] = {"coeff": self.coeff, "nan": "missing"}
            found = kl_of_lists(rows, ref_rows, None, rewards, integer_rewards=True, **options)
        (kl, *penalised), lengths = found
        jagged = columns.jagged_offsets(log_probs, reward, lengths)
        data.set_packed(self.kl_key, kl, lengths, jagged)
        for values in penalised:
            data.set_packed("reward", values.unsqueeze(-1), lengths, jagged)

    def _nested(
        self, log_probs: Column, ref_log_probs: Column, reward: Column | None
    ) -> PackedColumns | None:
        """The KL of nested columns without unbinding them; ``None`` unless their rows fit."""
        packed = _pack_nested(log_probs, ref_log_probs, reward)
        if packed is None:
            return None
        (p, q, *rewards), lengths = packed
        if not rewards:
            return PackedColumns([token_kl(p, q, nan="missing")], lengths)
        before = rewards[0] if rewards[0].is_floating_point() else rewards[0].to(p.dtype)
        results = token_kl(p, q, reward=before, coeff=self.coeff, nan="missing")
        return PackedColumns(list(results), lengths)

    def _each(
        self,
        data: Data,
        rows: Sequence[Tensor],
        ref_rows: Sequence[Tensor],
        rewards: Sequence[Tensor] | None,
        layout: torch.layout,
    ) -> None:
        """Compute rows of several dimensions, or rewards of several columns, sample by sample."""
        if len(rows) != len(ref_rows):
            raise ValueError(
                f"ref_log_probs: expected {len(rows)} samples, got {len(ref_rows)}; "
                "score the same batch with both models"
            )
        kl = [token_kl(x, y, nan="missing") for x, y in zip(rows, ref_rows, strict=True)]
        if rewards is not None:
            rewards = [
                reward - self.coeff * row.unsqueeze(-1)
                for reward, row in zip(rewards, kl, strict=True)
            ]
        data.set(self.kl_key, kl, layout)
        if rewards is not None:
            data.set("reward", rewards, layout)

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        return transitions.begin(tensordict, tensordict_reset, self.kl_key)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        columns.declare_tokens(observation_spec, self.kl_key)
        return observation_spec

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        before = reward_spec.get("reward", None) if self.add_to_reward else None
        if before is not None:
            columns.declare_tokens(reward_spec, "reward", 1, dtype=before.dtype)
        return reward_spec


def _are_token_rows(rows: Sequence[Tensor], rewards: Sequence[Tensor] | None) -> bool:
    """Whether each sample is one row of tokens, with a reward of one column.

    The first sample decides, because packing refuses later samples with other dimensions.
    """
    if len(rows) == 0 or rows[0].dim() != 1:
        return False
    return rewards is None or (len(rewards) > 0 and rewards[0].shape[1:] == (1,))


def _check_reward_dims(rows: Sequence[Tensor], rewards: Sequence[Tensor]) -> None:
    for i, (row, reward) in enumerate(zip(rows, rewards, strict=True)):
        fits = zip(reward.shape, row.shape, strict=False)
        if reward.dim() != row.dim() + 1 or any(size not in (1, n) for size, n in fits):
            raise ValueError(
                f"reward: sample {i}: expected one dimension more than the log-probs, "
                f"{(*row.shape, 1)}, got {tuple(reward.shape)}; add it with .unsqueeze(-1)"
            )


def _pack_nested(
    log_probs: Column, ref_log_probs: Column, reward: Column | None
) -> PackedColumns | None:
    """Nested columns as packed views, a reward as ``[N]``."""
    given = [log_probs, ref_log_probs] + ([] if reward is None else [reward])
    if not all(map(columns.is_nested, given)):
        return None
    packed = [ragged.from_nested(column) for column in given]  # pyright: ignore[reportArgumentType]
    offsets = packed[0].offsets
    values, ref_values, *rewards = (column.values for column in packed)
    if values.dim() != 1 or any(x.shape != (len(values), 1) for x in rewards):
        return None
    if any(x.offsets is not offsets and not torch.equal(offsets, x.offsets) for x in packed[1:]):
        return None
    rewards = [x.squeeze(-1) for x in rewards]
    return PackedColumns([values, ref_values, *rewards], offsets.diff().tolist())
