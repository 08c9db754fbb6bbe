"""The KL transforms in a Ray actor that several environments share."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.data import Composite
from torchrl.envs import Compose, Transform
from torchrl.modules.llm.policies import LLMWrapperBase

from fusedrl.compat.torchrl import serve_by_ray
from fusedrl.transforms import columns
from fusedrl.transforms.kl_reward import KLRewardTransform
from fusedrl.transforms.retrieve_kl import RetrieveKL
from fusedrl.transforms.retrieve_log_prob import RetrieveLogProb
from fusedrl.transport import Serialized, deserialize, serialize

SECONDS_TO_START = 300  # an autoscaler may have to add a machine first


class Description(NamedTuple):
    """What the local side has to know about the transform in an actor."""

    transform_class: str
    text: str
    in_keys: list[NestedKey]
    out_keys: list[NestedKey]
    read: list[NestedKey]
    read_next: list[NestedKey]


class TransformActor:
    """A transform that runs on the columns that are sent to it."""

    def __init__(self, transform_class: Any, arguments: dict[str, Any]) -> None:
        self._class, self._arguments = transform_class, arguments

    @cached_property
    def _transform(self) -> Transform:
        # Not in the constructor: an error there would kill the actor, and get another type.
        return self._class(**self._arguments, service_backend="direct")

    @property
    def _parts(self) -> list[Any]:
        transform: Any = self._transform
        return list(transform) if isinstance(transform, Compose) else [transform]

    def describe(self) -> Description:
        """The description of the transform; raises what the transform's constructor raises."""
        transform = self._transform
        read = [key for part in self._parts for key in getattr(part, "columns_read", [])]
        used = [
            key
            for part in self._parts
            for key in (
                *part.out_keys,
                *(() if isinstance(part, RetrieveLogProb) else part.in_keys),
            )
        ]
        keys = list(transform.in_keys), list(transform.out_keys)
        return Description(_full_name(self._class), repr(transform), *keys, read, used)

    def spec(self, method: str, spec: Composite) -> Composite:
        """The spec that the transform makes from another one."""
        return getattr(self._transform, method)(spec)

    def run(self, method: str, serialized: Serialized) -> Serialized:
        """Serialize what ``_step`` or ``_reset`` of the transform writes."""
        result: TensorDictBase = getattr(self._transform, method)(*deserialize(serialized))
        # Whole log-probs: their class has more than the key says.
        written = [key for part in self._parts for key in part.out_keys]
        entries = {key if isinstance(key, str) else key[0] for key in written}
        return serialize(result.select(*entries, strict=False))


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


class _InActor(Transform):
    """The local side of a transform in a Ray actor.

    Steps, resets, calls on data and specs go to the actor: it is sent the columns that it reads,
    and returns those that it wrote. All else is done here.
    """

    _service_cls: ClassVar[type[Transform]]  # torchrl's name: isinstance counts this as one of them
    _actor: Any
    _description: Description

    def _start(
        self,
        arguments: dict[str, Any],
        *,
        num_cpus: float | None,
        num_gpus: float,
        device: Any,
        actor_name: str | None,
    ) -> None:
        """Find the actor of this name, or start one."""
        if not arguments.get("detach", True):
            raise ValueError(
                "detach: expected True, got False; gradients do not cross to another process"
            )
        given = {"num_cpus": 1 if num_cpus is None else num_cpus, "num_gpus": num_gpus}
        options = given | (arguments.pop("ray_actor_options", None) or {})
        if actor_name is not None:
            # Detached: otherwise it would end with this transform although others use it.
            options = {"lifetime": "detached", "get_if_exists": True} | options
            options["name"] = actor_name
        if device is not None:
            arguments["device"] = device
        Transform.__init__(self)
        self._actor = None if actor_name is None else _find(actor_name, options.get("namespace"))
        if self._actor is None:
            self._actor = _started(self._service_cls, arguments, options)
        self._description, name = _get(self._actor.describe.remote()), _full_name(self._service_cls)
        if self._description.transform_class != name:
            raise ValueError(
                f"actor_name: expected {actor_name!r} to be an actor of {name}, got "
                f"{self._description.transform_class}; use another name"
            )
        self.in_keys, self.out_keys = self._description.in_keys, self._description.out_keys

    def close(self) -> None:
        """Give up the actor, which ends with its last transform, or stays if it has a name."""
        self._actor = None

    def __repr__(self) -> str:
        """The text of the transform in the actor, which was sent when it was found."""
        text = "actor=None" if self._actor is None else self._description.text
        return f"{type(self).__name__}({text})"

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return columns.run(self, self._step, tensordict)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Transform a whole transition, as a replay buffer asks for with ``invert=True``."""
        return self.forward(next_tensordict)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        return self._run("_step", tensordict, next_tensordict)

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        return self._run("_reset", tensordict, tensordict_reset)

    def _run(self, method: str, root: TensorDictBase, target: TensorDictBase) -> TensorDictBase:
        """Send the columns that the actor reads, and store in ``target`` those that it wrote."""
        read, read_next = self._description.read, self._description.read_next
        sent = root.select(*read, "_reset", strict=False)
        serialized = serialize((sent, target.select(*read_next, strict=False)))
        written = deserialize(self._call_actor("run", method, serialized))
        device = target.device or serialized.device
        return target.update(written if device is None else written.to(device))

    def _call_actor(self, method: str, *arguments: Any) -> Any:
        if self._actor is None:
            raise RuntimeError(
                f"{type(self).__name__}: expected a running actor, got a closed one; "
                "make another transform"
            )
        return _get(getattr(self._actor, method).remote(*arguments))

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        return self._spec("transform_output_spec", output_spec)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        return self._spec("transform_observation_spec", observation_spec)

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        return self._spec("transform_reward_spec", reward_spec)

    def _spec(self, method: str, spec: Composite) -> Composite:
        answer = self._call_actor("spec", method, spec.clone().cpu())
        return answer.clear_device_() if spec.device is None else answer.to(spec.device)


def _ray() -> Any:
    """The package, which is not installed with fusedrl."""
    return importlib.import_module("ray")


def _get(reference: Any) -> Any:
    """The actor's answer; an exception of the actor is raised here."""
    try:
        return _ray().get(reference)
    except _ray().exceptions.RayTaskError as error:
        if isinstance(error.cause, Exception):
            raise error.cause from error
        raise


def _find(actor_name: str, namespace: str | None) -> Any:
    try:
        return _ray().get_actor(actor_name, namespace)
    except ValueError:
        return None


def _started(transform_class: type, arguments: dict[str, Any], options: dict[str, Any]) -> Any:
    if arguments.get("gen_model") == "from_collector" and arguments["gen_model_factory"] is None:
        raise ValueError(
            "gen_model: expected a wrapper or gen_model_factory, got 'from_collector', and an "
            "actor has none; pass a model, or use RetrieveKL without Ray"
        )
    actor = _ray().remote(TransformActor).options(**options).remote(transform_class, arguments)
    try:
        _wait_for_a_place(actor, options)
        _get(actor.describe.remote())
    except BaseException:
        _ray().kill(actor)  # its transform could not be made
        raise
    return actor


def _wait_for_a_place(actor: Any, options: dict[str, Any]) -> None:
    """Refuse an actor for which Ray finds no room; its models may take any time to load."""
    if not _ray().wait([actor.__ray_ready__.remote()], timeout=SECONDS_TO_START)[0]:
        raise RuntimeError(
            f"num_cpus, num_gpus: expected {options['num_cpus']:g} CPUs and "
            f"{options['num_gpus']:g} GPUs for the actor within {SECONDS_TO_START} seconds, got "
            f"none; of {_ray().cluster_resources()} free are {_ray().available_resources()}: ask "
            "for less, free some, or add a machine"
        )


class RayRetrieveKL(_InActor):
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
        **kwargs: arguments of :class:`fusedrl.RetrieveKL`, and ``ray_actor_options``: further
            options of a Ray actor, such as ``namespace``.

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

    _service_cls = RetrieveKL

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
        models = {"gen_model": gen_model, "ref_model": ref_model}
        factories = {"gen_model_factory": gen_model_factory, "ref_model_factory": ref_model_factory}
        self._start(
            models | factories | kwargs,
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            device=device,
            actor_name=actor_name,
        )


class RayKLRewardTransform(_InActor):
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
        **kwargs: arguments of :class:`fusedrl.KLRewardTransform`, and ``ray_actor_options`` as for
            :class:`fusedrl.RayRetrieveKL`.

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

    _service_cls = KLRewardTransform

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
            {"ref_model": ref_model, "ref_model_factory": ref_model_factory} | kwargs,
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            device=device,
            actor_name=actor_name,
        )


class _RayService:
    """What makes the transform of ``service_backend="ray"``, an attribute of its class.

    A subclass finds it too: what it overrides would not run in the actor.
    """

    def __init__(self, served: type[Transform], made: type[_InActor]) -> None:
        self._served, self._made = served, made

    def __get__(self, instance: Any, owner: type[Transform]) -> type[_InActor]:
        name = self._served.__name__
        if owner is not self._served:
            raise ValueError(
                f"service_backend: expected 'direct' for {owner.__name__}, a subclass of {name}, "
                f"got 'ray', whose actor runs {name} itself; leave it out"
            )
        return self._made


serve_by_ray(RetrieveKL, _RayService(RetrieveKL, RayRetrieveKL))
serve_by_ray(KLRewardTransform, _RayService(KLRewardTransform, RayKLRewardTransform))
