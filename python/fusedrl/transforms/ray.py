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

    A drop-in for :class:`torchrl.envs.llm.transforms.RayRetrieveKL`. A column is sent to
    the actor only if it is read there, and comes back only if it was written. The actor ends with
    the last transform that uses it. An actor with a name stays until ``ray.kill``. Other transforms
    in the same Ray namespace can use it by that name, and need no models then.

    Args:
        gen_model: the policy as a log-prob wrapper, which is copied to the actor.
            ``"from_collector"`` is refused, because the copy would keep its present weights.
        ref_model: the reference as a log-prob wrapper, copied to the actor.
        gen_model_factory: a function that makes ``gen_model`` in the actor, which must be able to
            import it.
        ref_model_factory: the same for ``ref_model``.
        num_cpus: CPUs that Ray reserves for the actor, 1 by default.
        num_gpus: GPUs that Ray reserves for it.
        device: where the models compute in the actor. Results are on the device of the data.
        actor_name: use the actor of this name, or start it. An actor that runs keeps its
            arguments, and those that are given here are not looked at.
        **kwargs: arguments of :class:`fusedrl.RetrieveKL`, and two more. ``ray_actor_options`` has
            further options of a Ray actor, such as ``namespace``. ``transform_class`` is a subclass
            to run in the actor; it may change ``_step``, ``_reset``, ``forward``, ``_call`` and the
            specs of outputs.

    Raises:
        ImportError: Ray is not installed.
        ValueError: a model is given twice or not at all, ``detach`` is ``False``, or the actor of
            that name is of another kind; also what the transform in the actor raises.
        RuntimeError: the cluster has no room for the actor within five minutes.

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
    environment. See :class:`fusedrl.RayRetrieveKL` for what is sent and when the actor ends.

    Args:
        ref_model: the reference as a log-prob wrapper, copied to the actor.
        ref_model_factory: a function that makes ``ref_model`` in the actor, which must be able to
            import it.
        num_cpus: CPUs that Ray reserves for the actor, 1 by default.
        num_gpus: GPUs that Ray reserves for it.
        device: where the model computes in the actor. Results are on the device of the data.
        actor_name: use the actor of this name, or start it. An actor that runs keeps its
            arguments, and those that are given here are not looked at.
        **kwargs: arguments of :class:`fusedrl.KLRewardTransform`, and ``ray_actor_options`` and
            ``transform_class`` as for :class:`fusedrl.RayRetrieveKL`.

    Raises:
        ImportError: Ray is not installed.
        ValueError: a model is given twice or not at all, ``detach`` is ``False``, or the actor of
            that name is of another kind; also what the transform in the actor raises.
        RuntimeError: the cluster has no room for the actor within five minutes.

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
