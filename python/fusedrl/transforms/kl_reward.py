"""torchrl's legacy KL transform: scores tokens under a reference and penalises the reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, lazy_stack, unravel_key
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchrl.data import Composite
from torchrl.envs import EnvBase, Transform
from torchrl.envs.llm.transforms import KLRewardTransform as _KLRewardTransform
from torchrl.modules.llm.policies import LLMWrapperBase

from fusedrl.compat.torchrl import computing_device, step
from fusedrl.ops.token_kl.samples import kl_of_samples
from fusedrl.transforms import columns
from fusedrl.transforms.columns import Column, Columns, SampleColumns, column_rows, is_dense
from fusedrl.transforms.kl_computation import layout_for
from fusedrl.transforms.retrieve_log_prob import RetrieveLogProb
from fusedrl.transforms.wrapper_tokens import ATTENTION

_PROMPT, _ASSISTANT = ("tokens", "prompt"), ("masks", "all_assistant_mask")


class KLRewardTransform(_KLRewardTransform):
    """Subtract from the reward the KL between log-probs in the data and those of a reference.

    A drop-in for :class:`torchrl.envs.llm.transforms.KLRewardTransform`, which torchrl calls
    legacy. New programs should use :class:`fusedrl.RetrieveKL`, which scores under both models and
    also reads conversations.

    The transform reads the tokens and the policy's log-probs from the root. It writes
    ``reward - coef * kl``, the KL and the reference's log-probs to ``"next"`` if there is one, and
    to the root otherwise, as ``[T, 1]`` for each sample, or dense ``[B, T, 1]`` for dense data.
    Masked tokens have KL and log-prob 0 and keep their reward. A NaN log-prob gives KL 0.

    Args:
        ref_model: the reference as a log-prob wrapper with ``input_mode="tokens"``.
        ref_model_factory: a function that makes ``ref_model``.
        coef: weight of the KL, a float or a tensor of one element, which becomes a buffer.
        in_keys: a list with the key of the reward. A missing reward counts as 0.
        out_keys: the key of the penalised reward, optionally followed by the keys of the KL and of
            the reference's log-probs (default ``"kl_penalty"`` and ``"ref_log_probs"``). By default
            the reward is replaced.
        log_prob_key: key of the policy's log-probs in nats, ``[T]`` for each sample. If the policy
            wrote only those of its answer, under ``"response"`` instead of ``"full"``, the tokens
            of the prompt have KL 0.
        device: device of the model.
        add_to_reward: whether to write the penalised reward.
        tokenizer: value of the property ``tokenizer``; by default the model's tokenizer.
        assistant_only: keep the tokens of ``("masks", "all_assistant_mask")``, or without this mask
            the tokens after ``("tokens", "prompt")``.
        padding_side: ignored, since nothing is padded; accepted for torchrl's signature.
        use_ray_service: torchrl's old spelling of ``service_backend="ray"``, which builds a
            :class:`fusedrl.RayKLRewardTransform`; ``actor_name`` then names its actor.
        detach: compute without a gradient graph.

    Raises:
        ValueError: columns are missing or have different shapes, and are not changed; or an
            argument is invalid for torchrl's class.
        RuntimeError: a step has no tokens.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict, lazy_stack
        >>> from torchrl.modules.llm import TransformersWrapper
        >>> from fusedrl import KLRewardTransform
        >>> from fusedrl.demo.models import make_model, make_tokenizer  # tiny, not trained
        >>> tokenizer = make_tokenizer(["2 + 2? It is 4."])
        >>> reference = TransformersWrapper(make_model(len(tokenizer)), tokenizer=tokenizer,
        ...     input_mode="tokens", generate=False, return_log_probs=True)
        >>> samples = [
        ...     TensorDict({
        ...         ("tokens", "full"): torch.arange(n),
        ...         ("tokens", "prompt"): torch.arange(2),
        ...         ("log_probs", "full"): -torch.ones(n),
        ...         "reward": torch.zeros(1, 1),
        ...     })
        ...     for n in (4, 5)
        ... ]
        >>> data = KLRewardTransform(reference, coef=0.05)(lazy_stack(samples))
        >>> [tuple(row.shape) for row in data.get("reward", as_list=True)]
        [(4, 1), (5, 1)]
        >>> data.get("kl_penalty", as_list=True)[0].squeeze(-1)[:2]  # the prompt's
        tensor([0., 0.])
    """

    detach = True  # for objects pickled from torchrl's class

    def __init__(
        self,
        ref_model: LLMWrapperBase | None = None,
        *,
        ref_model_factory: Callable[[], LLMWrapperBase] | None = None,
        coef: float | Tensor = 1.0,
        in_keys: Sequence[NestedKey] | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        log_prob_key: NestedKey = ("log_probs", "full"),
        device: torch.device | None = None,
        add_to_reward: bool = True,
        tokenizer: Any = None,
        assistant_only: bool = True,
        padding_side: str = "left",
        use_ray_service: bool = False,
        detach: bool = True,
    ) -> None:
        super().__init__(
            ref_model,
            ref_model_factory=ref_model_factory,
            coef=coef,  # pyright: ignore[reportArgumentType]
            in_keys=in_keys,
            out_keys=out_keys,
            log_prob_key=log_prob_key,
            device=device,
            add_to_reward=add_to_reward,
            tokenizer=tokenizer,
            assistant_only=assistant_only,
            padding_side=padding_side,
        )
        self.detach = detach

    @property
    def columns_read(self) -> list[NestedKey]:
        """The keys read from the root, as far as they exist."""
        log_probs = [self.log_prob_full_key, _answer_key(self.log_prob_full_key)]
        return [*self.in_keys[1:], _PROMPT, _ASSISTANT, ATTENTION, *log_probs]

    def set_container(self, container: Transform | EnvBase) -> None:
        # Skip torchrl's method, which assigns the action key, here a property of the parent.
        Transform.set_container(self, container)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return columns.run(self, self._step, tensordict)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Transform a whole transition, as a replay buffer asks for with ``invert=True``."""
        return self.forward(next_tensordict)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        if tensordict.batch_dims == 0:
            return columns.step_one(self._step, tensordict, next_tensordict)
        data, target = columns.columns_of(tensordict), columns.columns_of(next_tensordict)
        key = unravel_key(self.ref_model.in_keys[0])
        tokens = data.get(key)
        if tokens is None:
            raise RuntimeError(
                f"tensordict: expected the tokens to score under {key!r}, found none; configure "
                "the policy to write them"
            )
        ids = column_rows(tokens)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.detach):
            log_probs = _policy_log_probs(data, self.log_prob_full_key, ids)
            mask = _assistant_mask(data, ids, is_dense(tokens)) if self.assistant_only else None
            reward = target.get(self.in_keys[0]) if self.add_to_reward else None
            layout = layout_for(reward)
            if reward is not None:
                reward = column_rows(reward)
            elif self.add_to_reward:
                reward = [torch.zeros_like(row).unsqueeze(-1) for row in log_probs]
            ref = self._score(tensordict, key, tokens)
            coef: Any = self.coef
            coef = coef.reshape(()).to(log_probs[0].device, torch.float64)
            kl, penalised = kl_of_samples(log_probs, ref, reward, mask, coeff=coef)
            if mask is not None:
                ref = [row.masked_fill(~kept, 0) for row, kept in zip(ref, mask, strict=True)]
            kl, ref = ([row.unsqueeze(-1) for row in rows] for rows in (kl, ref))
            for name, rows in zip(self.out_keys, (penalised, kl, ref), strict=True):
                if rows is not None:
                    target.set(name, torch.stack(rows) if is_dense(tokens) else rows, layout)
        return next_tensordict

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        keys = self.out_keys[:2] if self.out_keys[0] != "reward" else self.out_keys[1:2]
        for key in keys:
            tensordict_reset = columns.begin(tensordict, tensordict_reset, key, 1)
        return tensordict_reset

    def _score(self, td: TensorDictBase, key: NestedKey, tokens: Column) -> list[Tensor]:
        """The reference's log-probs of ``tokens``, a row for each sample."""
        if not is_dense(tokens) and (self.pad_output or isinstance(tokens, Tensor)):
            td = _readable(tokens, columns.columns_of(td).get(ATTENTION), key, self.pad_output)
        device = computing_device(self)
        td = td if device is None else td.to(device)
        # Not a submodule: the state dict would contain the model twice.
        scorer = RetrieveLogProb(self.ref_model, assistant_only=False, detach=self.detach)
        log_probs = columns.columns_of(step(scorer, td, td.empty())).get(scorer.log_probs_full_key)
        assert log_probs is not None
        # A model with pad_output returns rows padded on the left.
        pairs = zip(column_rows(log_probs), column_rows(tokens), strict=True)
        return [row[row.shape[-1] - len(ids) :].to(ids.device) for row, ids in pairs]

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        if "full_observation_spec" not in list(output_spec.keys()):
            output_spec["full_observation_spec"] = output_spec.empty()
        observations: Any = output_spec["full_observation_spec"]
        rewards: Any = output_spec.get("full_reward_spec", None)
        read, written = self.in_keys[0], self.out_keys[0]
        if self.add_to_reward:
            before = None if rewards is None else rewards.get(read, None)
            in_place = (
                rewards is not None and written == read and (before is not None or read == "reward")
            )
            dtype = torch.float32 if before is None else before.dtype
            where: Any = rewards if in_place else observations
            columns.declare_tokens(where, written, 1, dtype=dtype)
        # The reference's log-probs are not declared: torchrl would copy them to the next root.
        columns.declare_tokens(observations, self.out_keys[1], 1)
        return output_spec


def _readable(tokens: Column, attended: Column | None, key: NestedKey, pad: bool) -> TensorDictBase:
    """Tokens in the form that the wrapper reads: rows, or dense if it pads its output."""
    ids = column_rows(tokens)
    masks = [torch.ones_like(row) for row in ids] if attended is None else column_rows(attended)
    given = {key: ids, ATTENTION: [mask.bool() for mask in masks]}
    if not pad:
        parts = zip(*given.values(), strict=True)
        return lazy_stack([TensorDict(dict(zip(given, row, strict=True))) for row in parts])
    dense = {
        name: pad_sequence(list(column), batch_first=True, padding_side="left")
        for name, column in given.items()
    }
    return TensorDict(dense, batch_size=(len(ids),))


def _answer_key(key: NestedKey) -> NestedKey:
    """The key of the answer's part of a full column, as generating policies write it."""
    return (*key[:-1], "response") if isinstance(key, tuple) else key


def _policy_log_probs(
    data: SampleColumns | Columns, key: NestedKey, tokens: Sequence[Tensor]
) -> Sequence[Tensor]:
    """The policy's log-probs of ``tokens``, with NaN for the prompt if only the answer has them."""
    log_probs = data.get(key)
    if log_probs is not None:
        return column_rows(log_probs)
    answers = data.get(_answer_key(key))
    if answers is None:
        raise ValueError(
            f"tensordict: expected the policy's log-probs under {key!r}, found none; set "
            "return_log_probs=True in the policy, or pass log_prob_key"
        )
    pairs = zip(column_rows(answers), tokens, strict=True)
    behind = [(row, row.new_full((len(ids) - len(row),), torch.nan)) for row, ids in pairs]
    return [torch.cat((unscored, row)) for row, unscored in behind]


def _assistant_mask(
    data: SampleColumns | Columns, tokens: Sequence[Tensor], padded: bool
) -> list[Tensor]:
    """The mask of the assistant's tokens, or without one, of all real tokens after the prompt."""
    mask = data.get(_ASSISTANT)
    if mask is not None:
        return [row.bool() for row in column_rows(mask)]
    attended, prompts = data.get(ATTENTION), data.get(_PROMPT)
    if prompts is None or (attended is None and padded):
        raise ValueError(
            f"tensordict: expected an assistant mask under {_ASSISTANT!r}, or {_PROMPT!r} and "
            f"{ATTENTION!r} to locate the answer, found neither; pass assistant_only=False"
        )
    attended = [torch.ones_like(ids) for ids in tokens] if attended is None else attended
    pairs = zip(column_rows(attended), column_rows(prompts), strict=True)
    places = torch.arange(max(map(len, tokens)), device=tokens[0].device)
    return [row.bool() & (places[: len(row)] >= len(prompt)) for row, prompt in pairs]
