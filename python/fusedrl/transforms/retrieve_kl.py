"""The KL between two models: their log-probs, and the penalty, in one transform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data import Composite
from torchrl.envs import Compose, Transform
from torchrl.envs.llm.transforms import RetrieveKL as _RetrieveKL
from torchrl.modules.llm.policies import LLMWrapperBase

from fusedrl.transforms import columns
from fusedrl.transforms.kl_computation import KLComputation, refuse
from fusedrl.transforms.ray import RayRetrieveKL
from fusedrl.transforms.ray_service import RayService
from fusedrl.transforms.retrieve_log_prob import RetrieveLogProb


class RetrieveKL(_RetrieveKL):
    """Score a conversation under a policy and a reference, and write their per-token KL.

    A drop-in for :class:`torchrl.envs.llm.transforms.RetrieveKL`: a ``Compose`` of two
    :class:`fusedrl.RetrieveLogProb` and a :class:`fusedrl.KLComputation`. With
    ``"from_collector"`` the policy is taken from the collector at the first step.

    Args:
        gen_model: the policy as a log-prob wrapper, or ``"from_collector"``.
        ref_model: the reference as a log-prob wrapper.
        gen_model_factory: makes ``gen_model``.
        ref_model_factory: makes ``ref_model``.
        assistant_only: KL 0 for every token that is not the assistant's; needs
            ``input_mode="history"``.
        history_key: where the conversation is; the models must read it there.
        tokenizer_kwargs: see :class:`fusedrl.RetrieveLogProb`.
        detach: compute without a gradient graph.
        device: where the models are put and compute.
        tokenizer: the tokenizer of the assistant mask; by default each model's own.
        padding_side: where the padding of ``[B, T]`` log-probs is.
        gen_log_probs_full_key: where the policy's log-probs go, a tuple that ends in ``"full"``.
        ref_log_probs_full_key: where the reference's go.
        kl_key: where the KL goes.
        add_to_reward: replace ``"reward"`` by ``reward - coeff * kl``.
        coeff: weight of the KL, a float or a 0-dim tensor.
        use_ray_service: torchrl's old spelling of ``service_backend="ray"``, which builds a
            :class:`fusedrl.RayRetrieveKL`; ``actor_name`` names its actor, if there is one.

    Raises:
        TypeError: an unknown argument; the message names the one that was meant.
        ValueError: a model that is missing, given twice, generates or gives no log-probs; two
            models that pad differently or share their ``log_probs_key``.

    Example:
        >>> from fusedrl import RetrieveKL
        >>> def penalise(env, ref_model):
        ...     return env.append_transform(RetrieveKL("from_collector", ref_model, coeff=0.05))
    """

    _RayServiceClass = RayService(RayRetrieveKL)

    def __init__(
        self,
        gen_model: LLMWrapperBase | Literal["from_collector"] | None = "from_collector",
        ref_model: LLMWrapperBase | None = None,
        *,
        gen_model_factory: Callable[[], LLMWrapperBase] | None = None,
        ref_model_factory: Callable[[], LLMWrapperBase] | None = None,
        assistant_only: bool = True,
        history_key: str = "history",
        tokenizer_kwargs: dict[str, Any] | None = None,
        detach: bool = True,
        device: torch.device | None = None,
        tokenizer: Any = None,
        padding_side: str = "left",
        gen_log_probs_full_key: NestedKey = ("log_probs", "full"),
        ref_log_probs_full_key: NestedKey = ("ref_log_probs", "full"),
        kl_key: NestedKey = "kl_penalty",
        add_to_reward: bool = True,
        coeff: float | Tensor = 1.0,
        use_ray_service: bool = False,
        **unknown: Any,
    ) -> None:
        unknown.pop("actor_name", None)  # without Ray there is none to name
        refuse(unknown)
        if gen_model == "from_collector" and gen_model_factory is not None:
            gen_model = None
        policy = _one_of("gen_model", gen_model, gen_model_factory)
        reference = _one_of("ref_model", ref_model, ref_model_factory)
        scoring = {
            "assistant_only": assistant_only,
            "tokenizer_kwargs": tokenizer_kwargs,
            "detach": detach,
            "device": device,
            "tokenizer": tokenizer,
            "padding_side": padding_side,
        }
        _check_history_key(reference, history_key)
        following = [
            RetrieveLogProb(reference, log_probs_full_key=ref_log_probs_full_key, **scoring),
            KLComputation(
                gen_log_probs_full_key,
                ref_log_probs_full_key,
                kl_key=kl_key,
                add_to_reward=add_to_reward,
                coeff=coeff,
            ),
        ]
        # torchrl's own deferral resolves the collector while specs are read, before there is one.
        self._initialized = True
        self._pending: dict[str, Any] | None = None
        if policy == "from_collector":
            _check_full("gen_log_probs_full_key", gen_log_probs_full_key)
            _check_full("ref_log_probs_full_key", ref_log_probs_full_key)
            self._pending = scoring | {"log_probs_full_key": gen_log_probs_full_key}
        else:
            _check_history_key(policy, history_key)
            _check_pair(policy, reference)
            following.insert(
                0, RetrieveLogProb(policy, log_probs_full_key=gen_log_probs_full_key, **scoring)
            )
        Compose.__init__(self, *following)

    def _init_deferred(self) -> None:
        """Build the policy's scorer; it shares the weights of the collector's policy."""
        pending = self._pending
        assert pending is not None
        container = self.container
        if container is None:
            raise ValueError(
                "gen_model: 'from_collector' expected this transform in an environment, got none; "
                "append it to the environment of a collector, or pass gen_model"
            )
        collector = container.collector
        if collector is None:
            raise ValueError(
                "gen_model: 'from_collector' expected an environment run by a collector, got one "
                "without; build the collector before stepping, or pass gen_model"
            )
        ref_model: Any = self.transforms[0].model
        # Fresh settings: get_new_version would edit the dict that the policy tokenizes with, and a
        # policy that samples several answers would have each conversation scored as often.
        options = {"tokenizer_kwargs": {}, "generate_kwargs": {}, "num_samples": None}
        key = pending["log_probs_full_key"]
        model = collector.policy.get_new_version(
            generate=False,
            return_log_probs=True,
            log_probs_key=key[0] if len(key) == 2 else key[:-1],
            input_mode=ref_model.input_mode,
            input_key=ref_model.input_key,
            pad_output=ref_model.pad_output,
            **options,
        )
        scorer = RetrieveLogProb(model, **pending)
        self.transforms.insert(0, scorer)
        scorer.set_container(self)
        self._pending = None

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        if self._pending is not None:
            self._init_deferred()
        return super()._step(tensordict, next_tensordict)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self._pending is not None:
            self._init_deferred()
        return super().forward(tensordict)

    def clone(self) -> RetrieveKL:
        """A copy that shares the models and is in no environment yet.

        An environment clones its transforms where it is wrapped; torchrl's class becomes a plain
        ``Compose`` there, which has forgotten that it waits for a collector.
        """
        copied = Transform.clone(self)
        transforms = [transform.clone() for transform in self]
        copied.transforms = torch.nn.ModuleList(transforms)
        for transform in transforms:
            transform.set_container(copied)
        return copied

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        output_spec = super().transform_output_spec(output_spec)
        self._declare_pending(output_spec["full_observation_spec"])
        return output_spec

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        return self._declare_pending(super().transform_observation_spec(observation_spec))

    def _declare_pending(self, observation_spec: Composite) -> Composite:
        if self._pending is not None:
            columns.declare_tokens(observation_spec, self._pending["log_probs_full_key"])
        return observation_spec


def _one_of(name: str, model: Any, factory: Callable[[], Any] | None) -> Any:
    if model is not None and factory is not None:
        raise ValueError(f"{name}: expected a model or {name}_factory, got both; drop one")
    if factory is not None:
        model = factory()
    if model is None:
        raise ValueError(f"{name}: expected a log-prob wrapper or {name}_factory, got neither")
    return model


def _check_full(name: str, key: NestedKey) -> None:
    if not isinstance(key, tuple) or key[-1] != "full":
        raise ValueError(f"{name}: expected a tuple that ends in 'full', got {key!r}")


def _check_history_key(model: Any, history_key: str) -> None:
    read = getattr(model, "input_key", None)
    if history_key != "history" and read != (history_key, "full"):
        raise ValueError(
            f"history_key: expected the key that the models read, {read!r}, got {history_key!r}; "
            f"build the wrappers with input_key={(history_key, 'full')!r}"
        )


def _check_pair(gen_model: Any, ref_model: Any) -> None:
    if gen_model.pad_output != ref_model.pad_output:
        raise ValueError(
            f"gen_model: expected pad_output={ref_model.pad_output} as in ref_model, "
            f"got {gen_model.pad_output}; both must pad alike"
        )
    if gen_model.log_probs_key == ref_model.log_probs_key:
        raise ValueError(
            f"gen_model: expected another log_probs_key than ref_model's, got "
            f"{gen_model.log_probs_key!r} in both; give one of the wrappers its own"
        )
