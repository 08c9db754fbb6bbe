"""The KL transforms in a Ray actor that several environments share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torchrl.envs.llm.transforms.kl import RayKLRewardTransform as _RayKLRewardTransform
from torchrl.envs.llm.transforms.kl import RayRetrieveKL as _RayRetrieveKL
from torchrl.modules.llm.policies import LLMWrapperBase

from fusedrl.transforms.ray_service import RayKL


class RayRetrieveKL(RayKL, _RayRetrieveKL):
    """:class:`fusedrl.RetrieveKL` in a Ray actor, whose models several environments share.

    A drop-in for :class:`torchrl.envs.llm.transforms.RayRetrieveKL`. A column crosses to the actor
    only if it is read there, and back only if it was written. An actor ends with the last transform
    that uses it; one with a name stays until ``ray.kill``, for others in the same Ray namespace,
    which then need no models.

    Args:
        gen_model: the policy as a log-prob wrapper; it is copied to the actor. Not
            ``"from_collector"``: a copy would keep the weights that the policy has now.
        ref_model: the reference as a log-prob wrapper, copied to the actor.
        gen_model_factory: makes ``gen_model`` in the actor, from where it must be importable.
        ref_model_factory: makes ``ref_model`` there.
        num_cpus: CPUs that Ray reserves for the actor, 1 by default.
        num_gpus: GPUs that Ray reserves for it.
        device: where the models are put and compute, in the actor. Results are where the data are.
        actor_name: use the actor of this name, or start it. One that runs keeps its own arguments:
            others are refused, and those that are left out are the actor's.
        **kwargs: arguments of :class:`fusedrl.RetrieveKL`; and ``ray_actor_options``, further
            options of a Ray actor, such as ``namespace``; ``transform_class``, a subclass to run in
            the actor, which may change ``_step``, ``_reset``, ``forward``, ``_call`` and the specs
            of outputs.

    Raises:
        ImportError: without Ray.
        ValueError: a model given twice or not at all, ``detach=False``, a name that is another
            actor's, arguments that are not those of the actor that has it; and what the transform
            in the actor raises.
        RuntimeError: the cluster has no place for the actor within five minutes.

    Example:
        >>> from fusedrl import RayRetrieveKL
        >>> def shared(make_policy, make_reference):
        ...     return RayRetrieveKL(
        ...         gen_model_factory=make_policy, ref_model_factory=make_reference, num_gpus=1
        ...     )
    """

    def __init__(
        self,
        gen_model: LLMWrapperBase | Literal["from_collector"] | None = "from_collector",
        ref_model: LLMWrapperBase | None = None,
        *,
        gen_model_factory: Callable[[], LLMWrapperBase] | None = None,
        ref_model_factory: Callable[[], LLMWrapperBase] | None = None,
        num_cpus: float | None = None,
        num_gpus: float = 0,
        device: torch.device | str | int | None = None,
        actor_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        if gen_model == "from_collector" and gen_model_factory is not None:
            gen_model = None
        self._start(
            {
                "gen_model": (gen_model, gen_model_factory),
                "ref_model": (ref_model, ref_model_factory),
            },
            kwargs,
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            device=device,
            actor_name=actor_name,
        )


class RayKLRewardTransform(RayKL, _RayKLRewardTransform):
    """:class:`fusedrl.KLRewardTransform` in a Ray actor, whose model several environments share.

    A drop-in for :class:`torchrl.envs.llm.transforms.RayKLRewardTransform`, which fails in an
    environment. See :class:`fusedrl.RayRetrieveKL` for what crosses and when the actor ends.

    Args:
        ref_model: the reference as a log-prob wrapper, copied to the actor.
        ref_model_factory: makes ``ref_model`` in the actor, from where it must be importable.
        num_cpus: CPUs that Ray reserves for the actor, 1 by default.
        num_gpus: GPUs that Ray reserves for it.
        device: where the model is put and computes, in the actor. Results are where the data are.
        actor_name: use the actor of this name, or start it. One that runs keeps its own arguments:
            others are refused, and those that are left out are the actor's.
        **kwargs: arguments of :class:`fusedrl.KLRewardTransform`; and ``ray_actor_options`` and
            ``transform_class`` as there.

    Raises:
        ImportError: without Ray.
        ValueError: a model given twice or not at all, ``detach=False``, a name that is another
            actor's, arguments that are not those of the actor that has it; and what the transform
            in the actor raises.
        RuntimeError: the cluster has no place for the actor within five minutes.

    Example:
        >>> from fusedrl import RayKLRewardTransform
        >>> def shared(make_reference):
        ...     return RayKLRewardTransform(
        ...         ref_model_factory=make_reference, actor_name="reference", num_gpus=1
        ...     )
    """

    def __init__(
        self,
        ref_model: LLMWrapperBase | None = None,
        *,
        ref_model_factory: Callable[[], LLMWrapperBase] | None = None,
        num_cpus: float | None = None,
        num_gpus: float = 0,
        device: torch.device | str | int | None = None,
        actor_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        self._start(
            {"ref_model": (ref_model, ref_model_factory)},
            kwargs,
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            device=device,
            actor_name=actor_name,
        )
