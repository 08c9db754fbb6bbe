"""The KL transforms in a Ray actor, which several environments can share."""

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
    """The properties of a transform in an actor that the local side needs."""

    transform_class: str
    text: str
    in_keys: list[NestedKey]
    out_keys: list[NestedKey]
    read: list[NestedKey]
    read_next: list[NestedKey]


class TransformActor:
    """The actor: runs a transform on the columns that it receives."""

    def __init__(self, transform_class: Any, arguments: dict[str, Any]) -> None:
        self._class, self._arguments = transform_class, arguments

    @cached_property
    def _transform(self) -> Transform:
        # Not in __init__: an error there would kill the actor and lose its type.
        return self._class(**self._arguments, service_backend="direct")

    @property
    def _parts(self) -> list[Any]:
        transform: Any = self._transform
        return list(transform) if isinstance(transform, Compose) else [transform]

    def describe(self) -> Description:
        """Construct the transform if necessary, and describe it."""
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
        """The transformed spec."""
        return getattr(self._transform, method)(spec)

    def run(self, method: str, serialized: Serialized) -> Serialized:
        """Run ``_step`` or ``_reset``, and serialize the entries that it wrote."""
        result: TensorDictBase = getattr(self._transform, method)(*deserialize(serialized))
        # Whole LogProbs entries: the class has further fields.
        written = [key for part in self._parts for key in part.out_keys]
        entries = {key if isinstance(key, str) else key[0] for key in written}
        return serialize(result.select(*entries, strict=False))


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


class _ActorTransform(Transform):
    """The local side of a transform in a Ray actor.

    Steps, resets, calls and specs are forwarded to the actor, which receives only the columns that
    it reads and returns only those that it wrote.
    """

    _service_cls: ClassVar[
        type[Transform]
    ]  # torchrl's name; makes isinstance(self, _service_cls) true
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
                "detach: expected True, got False; gradients cannot cross processes; leave it out"
            )
        given = {"num_cpus": 1 if num_cpus is None else num_cpus, "num_gpus": num_gpus}
        options = given | (arguments.pop("ray_actor_options", None) or {})
        if actor_name is not None:
            # Detached: other transforms may use the actor after this one is gone.
            options = {"lifetime": "detached", "get_if_exists": True} | options
            options["name"] = actor_name
        if device is not None:
            arguments["device"] = device
        Transform.__init__(self)
        self._actor = (
            None if actor_name is None else _find_actor(actor_name, options.get("namespace"))
        )
        if self._actor is None:
            self._actor = _start_actor(self._service_cls, arguments, options)
        self._description, name = _get(self._actor.describe.remote()), _full_name(self._service_cls)
        if self._description.transform_class != name:
            raise ValueError(
                f"actor_name: expected {actor_name!r} to be an actor of {name}, got "
                f"{self._description.transform_class}; use another name"
            )
        self.in_keys, self.out_keys = self._description.in_keys, self._description.out_keys

    def close(self) -> None:
        """Release the actor; an unnamed one ends with its last transform."""
        self._actor = None

    def __repr__(self) -> str:
        """The representation of the transform in the actor."""
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
        """Run a method in the actor, and store the columns that it wrote in ``target``."""
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
    """The ray module, an optional dependency."""
    return importlib.import_module("ray")


def _get(reference: Any) -> Any:
    """The result of an actor call; raises the exception of the actor itself."""
    try:
        return _ray().get(reference)
    except _ray().exceptions.RayTaskError as error:
        if isinstance(error.cause, Exception):
            raise error.cause from error
        raise


def _find_actor(actor_name: str, namespace: str | None) -> Any:
    try:
        return _ray().get_actor(actor_name, namespace)
    except ValueError:
        return None


def _start_actor(transform_class: type, arguments: dict[str, Any], options: dict[str, Any]) -> Any:
    if arguments.get("gen_model") == "from_collector" and arguments["gen_model_factory"] is None:
        raise ValueError(
            "gen_model: expected a wrapper or gen_model_factory, got 'from_collector', which an "
            "actor cannot access; pass a model, or use RetrieveKL without Ray"
        )
    actor = _ray().remote(TransformActor).options(**options).remote(transform_class, arguments)
    try:
        _wait_until_scheduled(actor, options)
        _get(actor.describe.remote())
    except BaseException:
        _ray().kill(actor)  # its transform could not be constructed
        raise
    return actor


def _wait_until_scheduled(actor: Any, options: dict[str, Any]) -> None:
    """Raise if Ray cannot schedule the actor in time; loading models afterwards is not limited."""
    if not _ray().wait([actor.__ray_ready__.remote()], timeout=SECONDS_TO_START)[0]:
        raise RuntimeError(
            f"num_cpus, num_gpus: expected {options['num_cpus']:g} CPUs and "
            f"{options['num_gpus']:g} GPUs for the actor within {SECONDS_TO_START} seconds, got "
            f"none; the cluster has {_ray().cluster_resources()}, of which "
            f"{_ray().available_resources()} are free: request less, free some, or add a machine"
        )


class RayRetrieveKL(_ActorTransform):
    """:class:`fusedrl.RetrieveKL` in a Ray actor, whose models several environments share.

    A drop-in for :class:`torchrl.envs.llm.transforms.RayRetrieveKL`. The actor receives only the
    columns that it reads and returns only those that it wrote. An unnamed actor ends with its last
    transform; a named actor lives until ``ray.kill``, and transforms in the same Ray namespace can
    use it by name, without models.

    Args:
        gen_model: the policy as a log-prob wrapper, copied to the actor; ``"from_collector"`` is
            not supported, since the copy would not follow weight updates.
        ref_model: the reference as a log-prob wrapper, copied to the actor.
        gen_model_factory: a function that makes ``gen_model`` in the actor, importable there.
        ref_model_factory: the same for ``ref_model``.
        num_cpus: CPUs that Ray reserves for the actor, 1 by default.
        num_gpus: GPUs that Ray reserves for the actor.
        device: device of the models in the actor. Results are on the device of the data.
        actor_name: name of the actor, which is started unless it is running. The arguments of a
            running actor are kept, and the ones passed here are ignored.
        **kwargs: arguments of :class:`fusedrl.RetrieveKL`, and ``ray_actor_options``: further
            options of a Ray actor, such as ``namespace``.

    Raises:
        ImportError: Ray is not installed.
        ValueError: invalid arguments of the transform, or the named actor has another class.
        RuntimeError: Ray cannot schedule the actor within five minutes.

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


class RayKLRewardTransform(_ActorTransform):
    """:class:`fusedrl.KLRewardTransform` in a Ray actor, whose model several environments share.

    A drop-in for :class:`torchrl.envs.llm.transforms.RayKLRewardTransform`, which does not work in
    an environment. Arguments that are not listed are those of :class:`fusedrl.RayRetrieveKL`, which
    also describes what is sent and when the actor ends.

    Args:
        ref_model: the reference as a log-prob wrapper, copied to the actor.
        ref_model_factory: a function that makes ``ref_model`` in the actor, importable there.
        **kwargs: arguments of :class:`fusedrl.KLRewardTransform`, and ``ray_actor_options``.

    Raises:
        ImportError: Ray is not installed.
        ValueError: invalid arguments of the transform, or the named actor has another class.
        RuntimeError: Ray cannot schedule the actor within five minutes.

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
    """Class attribute that torchrl calls for ``service_backend="ray"``.

    It raises for subclasses, whose overrides would not run in the actor.
    """

    def __init__(self, served: type[Transform], made: type[_ActorTransform]) -> None:
        self._served, self._made = served, made

    def __get__(self, instance: Any, owner: type[Transform]) -> type[_ActorTransform]:
        name = self._served.__name__
        if owner is not self._served:
            raise ValueError(
                f"service_backend: expected 'direct' for {owner.__name__}, a subclass of {name}, "
                f"got 'ray', whose actor runs {name} itself; leave it out"
            )
        return self._made


serve_by_ray(RetrieveKL, _RayService(RetrieveKL, RayRetrieveKL))
serve_by_ray(KLRewardTransform, _RayService(KLRewardTransform, RayKLRewardTransform))
