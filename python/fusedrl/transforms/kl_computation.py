"""Per-token KL between two columns of log-probs, and the reward that it penalises."""

from __future__ import annotations

from typing import Any

from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor
from torchrl.data import Composite
from torchrl.envs.llm.transforms import KLComputation as _KLComputation

from fusedrl.transforms import columns, token_columns, transitions
from fusedrl.transforms.columns import Column, Columns, SampleColumns
from fusedrl.transforms.renamed_arguments import COEFF, FULL, REF_FULL, refuse, renamed

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

    def __init__(
        self,
        gen_log_probs_full_key: NestedKey = FULL,
        ref_log_probs_full_key: NestedKey = REF_FULL,
        *,
        kl_key: NestedKey = "kl_penalty",
        add_to_reward: bool = True,
        coeff: float | Tensor = COEFF,
        padding_side: str = "left",
        **unknown: Any,
    ) -> None:
        gen_log_probs_full_key = renamed(
            "gen_log_probs_full_key", gen_log_probs_full_key, FULL, "gen_log_probs_key", unknown
        )
        ref_log_probs_full_key = renamed(
            "ref_log_probs_full_key", ref_log_probs_full_key, REF_FULL, "ref_log_probs_key", unknown
        )
        coeff = renamed("coeff", coeff, COEFF, "coef", unknown)
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
        columns.check_some(data)
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
        kl, penalised, places = token_columns.kl_of_samples(
            log_probs, ref_log_probs, self.reward_of(data), self.coeff
        )
        token_columns.store(data, self.kl_key, kl, places)
        if penalised is not None:
            token_columns.store(data, "reward", penalised, places)

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
