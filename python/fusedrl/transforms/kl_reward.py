"""torchrl's first KL transform: it scores tokens under a reference and penalises the reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor
from torchrl.data import Composite
from torchrl.envs import EnvBase, Transform
from torchrl.envs.llm.transforms import KLRewardTransform as _KLRewardTransform
from torchrl.modules.llm.policies import LLMWrapperBase

from fusedrl.compat.torchrl import computing_device, step
from fusedrl.transforms import columns, transitions
from fusedrl.transforms.columns import Column, Columns, SampleColumns, column_rows, is_dense
from fusedrl.transforms.renamed_arguments import COEFF, refuse, renamed
from fusedrl.transforms.retrieve_log_prob import RetrieveLogProb
from fusedrl.transforms.rollout_columns import (
    ASSISTANT,
    ATTENTION,
    PROMPT,
    answer_key,
    assistant_mask,
    policy_log_probs,
    readable,
)
from fusedrl.transforms.token_columns import store, token_columns

# The key of the reference's log-probs in torchrl up to 0.10.
_NAMED_BEFORE = "ref_log_prob"


class KLRewardTransform(_KLRewardTransform):
    """Subtract from the reward the KL between log-probs in the data and those of a reference.

    A drop-in for :class:`torchrl.envs.llm.transforms.KLRewardTransform`, which torchrl calls
    legacy. New programs should use :class:`fusedrl.RetrieveKL`, which scores under both models and
    also reads conversations.

    The transform reads the tokens of the root and the log-probs that the policy wrote beside them.
    It writes ``reward - coef * kl``, the KL and the reference's log-probs, to ``"next"`` if there
    is one and to the root otherwise. Each is ``[T, 1]`` for a sample, or dense ``[B, T, 1]`` if the
    data are dense. A token that the mask drops has KL and log-prob 0 and keeps its reward. A token
    whose log-prob is NaN has KL 0.

    Args:
        ref_model: the reference as a log-prob wrapper with ``input_mode="tokens"``.
        ref_model_factory: a function that makes ``ref_model``, instead of it.
        coef: weight of the KL, a float or a tensor of one element, which becomes a buffer.
        in_keys: the key of the reward, alone in a list. Without a reward, 0 is penalised.
        out_keys: the key of the penalised reward, or three keys: of the penalised reward, the KL
            and the reference's log-probs. By default the reward is replaced. With one key, the
            others are ``"kl_penalty"`` and ``"ref_log_probs"``, and the log-probs are written under
            ``"ref_log_prob"`` too, as torchrl up to 0.10 does.
        log_prob_key: key of the policy's log-probs in nats, ``[T]`` for each sample. If the policy
            wrote only those of its answer, under ``"response"`` instead of ``"full"``, the tokens
            of the prompt have KL 0.
        device: where the model is moved to and computes.
        add_to_reward: whether the penalised reward is written.
        tokenizer: what the property ``tokenizer`` returns; by default the model's.
        assistant_only: keep the tokens of ``("masks", "all_assistant_mask")``, or those after
            ``("tokens", "prompt")`` if there is no such mask.
        padding_side: without effect, because rows stay as they are; torchrl's signature has it.
        use_ray_service: torchrl's old spelling of ``service_backend="ray"``, which builds a
            :class:`fusedrl.RayKLRewardTransform`; ``actor_name`` then names its actor.
        detach: compute without a gradient graph.

    Raises:
        TypeError: an unknown argument, or both ``coef`` and ``coeff``, which is its other name.
        ValueError: the model is missing, given twice, generates, or does not read tokens; there is
            not one key of a reward, or not one or three output keys; columns do not fit each
            other, and are then unchanged.
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

    def __init__(
        self,
        ref_model: LLMWrapperBase | None = None,
        *,
        ref_model_factory: Callable[[], LLMWrapperBase] | None = None,
        coef: float | Tensor = COEFF,
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
        **unknown: Any,
    ) -> None:
        unknown.pop("actor_name", None)  # without Ray there is no actor to name
        coef = renamed("coef", coef, COEFF, "coeff", unknown)
        refuse(unknown)
        if (ref_model is None) == (ref_model_factory is None):
            given = "neither" if ref_model is None else "both"
            raise ValueError(
                f"ref_model: expected a wrapper or ref_model_factory, got {given}; pass one of them"
            )
        read, written = _checked_keys(in_keys, out_keys)
        model: Any = ref_model if ref_model_factory is None else ref_model_factory()
        _check_model(model)
        coef = torch.as_tensor(coef)
        if coef.numel() != 1:
            raise ValueError(
                f"coef: expected one element, got shape {tuple(coef.shape)}; pass one number"
            )
        super().__init__(
            model,
            coef=coef if coef.is_floating_point() else coef.float(),  # pyright: ignore[reportArgumentType]
            in_keys=read,
            out_keys=written,
            log_prob_key=log_prob_key,
            device=device,
            add_to_reward=add_to_reward,
            tokenizer=tokenizer,
            assistant_only=assistant_only,
            padding_side=padding_side,
        )
        self.detach = detach
        self._named_before = [_NAMED_BEFORE] if len(written) == 1 else []

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of torchrl's class too, which was pickled before a patch replaced it."""
        super().__setstate__({"detach": True, "_named_before": [], **state})

    @property
    def action_key(self) -> NestedKey:
        """The key of the full conversation in the environment's input mode; tokens without one."""
        parent: Any = self.parent
        mode = "tokens" if parent is None else parent.base_env.input_mode
        if mode not in ("history", "text", "tokens"):
            raise ValueError(
                f"input_mode: expected 'history', 'text' or 'tokens' of the environment, got "
                f"{mode}; make the environment with one of them"
            )
        return (mode, "full")

    @property
    def columns_written(self) -> list[NestedKey]:
        """The keys that are written: the output keys, and a former name of the last one."""
        return [*self.out_keys, *self._named_before]

    @property
    def columns_read(self) -> tuple[list[NestedKey], list[NestedKey]]:
        """The keys that are read from the root, and those that are read from ``"next"``."""
        reward, *inputs = self.in_keys
        log_probs = [self.log_prob_full_key, answer_key(self.log_prob_full_key)]
        return [
            *inputs,
            PROMPT,
            ASSISTANT,
            ATTENTION,
            *log_probs,
        ], [reward]

    def set_container(self, container: Transform | EnvBase) -> None:
        # torchrl assigns the action key here, which is a property: it depends on the parent.
        Transform.set_container(self, container)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return transitions.run(self, self._step, tensordict)

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
            return self._without_tokens(key, next_tensordict)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.detach):
            log_probs = policy_log_probs(data, self.log_prob_full_key, tokens)
            mask = assistant_mask(data, tokens) if self.assistant_only else None
            reward = target.get(self.in_keys[0]) if self.add_to_reward else None
            ref_log_probs = self._score(tensordict, key, tokens)
            self._penalise(target, log_probs, ref_log_probs, mask, reward)
        return next_tensordict

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        tensordict_reset = super()._reset(tensordict, tensordict_reset)
        return transitions.begin(tensordict, tensordict_reset, self.out_keys[1], 1)

    def _without_tokens(self, key: NestedKey, td: TensorDictBase) -> TensorDictBase:
        if not self.missing_tolerance:
            raise RuntimeError(
                f"tensordict: expected the tokens to score under {key!r}, found none; let the "
                "policy write them, or reset the environment before"
            )
        if self.out_keys[0] != "reward":
            td.set(self.out_keys[0], torch.zeros(*td.batch_size, 1, 1, device=td.device))
        return td

    def _score(self, td: TensorDictBase, key: NestedKey, tokens: Column) -> Column:
        """The reference's log-probs of ``tokens``, in the form of the tokens."""
        if not is_dense(tokens) and (self.pad_output or isinstance(tokens, Tensor)):
            td = readable(tokens, columns.columns_of(td).get(ATTENTION), key, self.pad_output)
        device = computing_device(self)
        td = td if device is None else td.to(device)
        # Made for each call: as a submodule it would put the model into the state dict twice.
        scorer = RetrieveLogProb(self.ref_model, assistant_only=False, detach=self.detach)
        scored = step(scorer, td, td.empty())
        log_probs = columns.columns_of(scored).get(scorer.log_probs_full_key)
        assert log_probs is not None
        if is_dense(log_probs) and is_dense(tokens):
            return log_probs.to(tokens.device)
        # A model that pads gives rows of one length, which are padded on the left.
        pairs = zip(column_rows(log_probs), column_rows(tokens), strict=True)
        return [row[row.shape[-1] - len(ids) :].to(ids.device) for row, ids in pairs]

    def _penalise(
        self,
        target: SampleColumns | Columns,
        log_probs: Column,
        ref_log_probs: Column,
        mask: Column | None,
        reward: Column | None,
    ) -> None:
        tokens = token_columns(log_probs, ref_log_probs, mask, reward)
        if tokens.reward is not None and tokens.reward.shape[-1] != 1:
            raise ValueError(
                f"reward: expected one value for each token or sample, got "
                f"{tokens.reward.shape[-1]}; sum them, or choose one with in_keys"
            )
        if reward is None and self.add_to_reward:
            tokens = tokens._replace(reward=torch.zeros_like(tokens.log_probs).unsqueeze(-1))
        coeff: Any = self.coef.to(tokens.log_probs.device)
        kl, penalised = tokens.kl_and_reward(coeff)
        kept = tokens.ref_log_probs
        kept = kept if tokens.mask is None else kept.masked_fill(~tokens.mask, 0)
        if penalised is not None:
            store(target, self.out_keys[0], penalised, tokens.places)
        store(target, self.out_keys[1], kl.unsqueeze(-1), tokens.places)
        for key in self.columns_written[2:]:
            store(target, key, kept.unsqueeze(-1), tokens.places)

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
        # Not the reference's log-probs: torchrl would carry them to the root of the next turn.
        columns.declare_tokens(observations, self.out_keys[1], 1)
        return output_spec


def _checked_keys(
    in_keys: Sequence[NestedKey] | None, out_keys: Sequence[NestedKey] | None
) -> tuple[list[NestedKey], list[NestedKey]]:
    read = list(KLRewardTransform.DEFAULT_IN_KEYS if in_keys is None else in_keys)
    written = list(read if out_keys is None else out_keys)
    if len(read) != 1:
        raise ValueError(
            f"in_keys: expected one key, the reward's, got {read}; leave it out for 'reward'"
        )
    if len(written) not in (1, 3):
        raise ValueError(
            f"out_keys: expected one key, the reward's, or three, those of reward, KL and the "
            f"reference's log-probs, got {written}; leave it out for the reward alone"
        )
    return read, written


def _check_model(model: Any) -> None:
    if getattr(model, "generate", False):
        raise ValueError(
            "ref_model: expected a wrapper that scores, got one that generates; build it with "
            "generate=False and return_log_probs=True"
        )
    mode = getattr(model, "input_mode", "tokens")
    if mode != "tokens":
        raise ValueError(
            f"ref_model: expected input_mode='tokens', got {mode!r}; build it with "
            "input_mode='tokens', or use RetrieveKL"
        )
