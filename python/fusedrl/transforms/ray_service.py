"""The local side of a transform in a Ray actor, and how torchrl finds it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tensordict import TensorDictBase
from torchrl.data import Composite
from torchrl.envs import Transform
from torchrl.envs.transforms.ray_service import RayTransform

from fusedrl.compat.torchrl import DONE_LOCALLY
from fusedrl.transforms import transitions
from fusedrl.transforms.transform_actor import CALLS, Description, TransformActor, full_name
from fusedrl.transport import deserialize, serialize

SECONDS_TO_START = 300  # an autoscaler may have to add a machine first


class RayService:
    """A class attribute with the Ray class of a transform, for ``service_backend="ray"``.

    A subclass of the transform inherits it, and then the subclass runs in the actor.
    """

    def __init__(self, ray_class: type[RayKL]) -> None:
        self._ray_class = ray_class

    def __set_name__(self, owner: type[Transform], name: str) -> None:
        """Remember the class that defines this attribute: the Ray class runs it."""
        self._owner = owner
        self._ray_class.serve(owner)

    def __get__(self, instance: Any, owner: type[Transform]) -> Callable[..., Transform]:
        """The Ray class, which runs ``owner``."""
        if owner is self._owner:
            return self._ray_class
        return partial(self._ray_class, transform_class=owner)


class RayKL(RayTransform):
    """The local side of a transform in a Ray actor.

    The environment, the keys and the missing tolerance stay here. Steps, resets, calls on data and
    specs go to the actor: it is sent the columns that it reads, and returns those that it wrote.
    """

    _service_cls: type[Transform]  # torchrl's name: isinstance counts this class as that one, too
    _description: Description

    # torchrl would send each of these to the actor, which has nothing to do for them.
    __setattr__ = Transform.__setattr__
    in_keys: Any = Transform.in_keys
    out_keys: Any = Transform.out_keys
    in_keys_inv: Any = Transform.in_keys_inv
    out_keys_inv: Any = Transform.out_keys_inv
    missing_tolerance: Any = Transform.missing_tolerance
    set_missing_tolerance = Transform.set_missing_tolerance
    set_container = Transform.set_container
    empty_cache = Transform.empty_cache
    clone = Transform.clone
    dump = Transform.dump
    init = Transform.init
    inv: Any = Transform.inv
    transform_env_batch_size = Transform.transform_env_batch_size
    transform_env_device = Transform.transform_env_device
    transform_input_spec: Any = Transform.transform_input_spec
    transform_action_spec: Any = Transform.transform_action_spec
    transform_state_spec: Any = Transform.transform_state_spec
    transform_done_spec: Any = Transform.transform_done_spec

    @classmethod
    def serve(cls, transform_class: type[Transform]) -> None:
        """Say which transform runs in the actor, unless a subclass of it is asked for."""
        cls._service_cls = transform_class

    def _start(
        self,
        models: dict[str, tuple[Any, Any]],
        arguments: dict[str, Any],
        *,
        num_cpus: float | None,
        num_gpus: float,
        device: Any,
        actor_name: str | None,
    ) -> None:
        """Find the actor of this name, or start one; ``models`` are pairs of model and factory."""
        ray_actor_options = arguments.pop("ray_actor_options", None)
        transform_class = arguments.pop("transform_class", None)
        for name, (model, factory) in models.items():
            if model is not None and factory is not None:
                raise ValueError(f"{name}: expected a model or {name}_factory, got both; drop one")
        if not arguments.get("detach", True):
            raise ValueError(
                "detach: expected True, got False; gradients do not cross to another process"
            )
        if device is not None:
            arguments["device"] = device
        Transform.__init__(self)
        if transform_class is not None:
            _check_runs_remotely(transform_class, self._service_cls)
            self._service_cls = transform_class
        self._num_cpus = 1 if num_cpus is None else num_cpus
        self._num_gpus = num_gpus
        self._actor_name = actor_name
        self._device = self._actor = None
        options = {"num_cpus": self._num_cpus, "num_gpus": num_gpus, **(ray_actor_options or {})}
        if actor_name is not None:
            # Detached: otherwise it would end with this transform although others use it.
            options = {"lifetime": "detached", "get_if_exists": True, **options, "name": actor_name}
            self._actor = self._find(actor_name, options.get("namespace"))
        if self._actor is None:
            arguments |= _arguments_of(models)
            self._actor = self._create_actor(options=options, arguments=arguments)
            try:
                self._wait_for_a_place()
                self._description = self._get(self._actor.describe.remote())
            except BaseException:
                self._ray.kill(self._actor)  # its transform could not be made
                raise
        else:
            self._description = self._get(self._actor.describe.remote())
        if self._description.transform_class != full_name(self._service_cls):
            raise ValueError(
                f"actor_name: expected {actor_name!r} to be an actor of "
                f"{full_name(self._service_cls)}, got {self._description.transform_class}; "
                "use another name"
            )
        self.in_keys, self.out_keys = self._description.in_keys, self._description.out_keys

    def _find(self, actor_name: str, namespace: str | None) -> Any:
        try:
            actor = self._ray.get_actor(actor_name, namespace)
        except ValueError:
            return None
        if not hasattr(actor, "describe"):
            raise ValueError(
                f"actor_name: expected an actor that fusedrl started, got another under "
                f"{actor_name!r}; use another name"
            )
        return actor

    def _create_actor(self, **kwargs: Any) -> Any:
        remote: Any = self._ray.remote(TransformActor)
        return remote.options(**kwargs["options"]).remote(self._service_cls, kwargs["arguments"])

    def _wait_for_a_place(self) -> None:
        """Refuse an actor for which Ray finds no room; its models may take any time to load."""
        started: Any = self._actor.__ray_ready__.remote()  # pyright: ignore[reportOptionalMemberAccess]
        if not self._ray.wait([started], timeout=SECONDS_TO_START)[0]:
            raise RuntimeError(
                f"num_cpus, num_gpus: expected {self._num_cpus:g} CPUs and {self._num_gpus:g} GPUs "
                f"for the actor within {SECONDS_TO_START} seconds, got none; of "
                f"{self._ray.cluster_resources()} free are {self._ray.available_resources()}: ask "
                "for less, free some, or add a machine"
            )

    def _get(self, reference: Any) -> Any:
        """The actor's answer; an exception of the actor is raised here."""
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:  # pyright: ignore[reportAttributeAccessIssue]
            if isinstance(error.cause, Exception):
                raise error.cause from error
            raise

    @property
    def _running(self) -> Any:
        if self._actor is None:
            raise RuntimeError(
                f"{type(self).__name__}: expected a running actor, got a closed one; "
                "make another transform"
            )
        return self._actor

    def close(self) -> None:
        """Give up the actor, which ends with its last transform, or stays if it has a name."""
        self._actor = None

    def __repr__(self) -> str:
        """The text of the transform in the actor, which was sent when it was found."""
        if self.__dict__.get("_actor") is None:
            return f"{type(self).__name__}(actor=None)"
        return f"{type(self).__name__}({self._description.text})"

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return transitions.run(self, partial(self._run, "forward"), tensordict)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Transform a whole transition, as a replay buffer asks for with ``invert=True``."""
        return transitions.run(self, partial(self._run, "_call"), next_tensordict)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        return self._run("_step", tensordict, next_tensordict)

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        return self._run("_reset", tensordict, tensordict_reset)

    def _run(self, method: str, root: TensorDictBase, target: TensorDictBase) -> TensorDictBase:
        """Send the columns that the actor reads, and store in ``target`` those that it wrote."""
        *_, read, read_next = self._description
        if target is root:
            sent = root.select(*read, *read_next, strict=False)
            following = sent
        else:
            sent = root.select(*read, "_reset", strict=False)
            # A reset reads what was reset. A step reads from "next" only what it penalises.
            own = [*read, *read_next] if method == "_reset" else read_next
            following = target.select(*own, strict=False)
        if method not in CALLS:
            sent = (sent, following)
        elif following is not sent:
            sent = (sent.set("next", following),)
        else:
            sent = (sent,)
        serialized = serialize(sent)
        answer = self._running.run.remote(method, serialized, self.missing_tolerance)
        written = deserialize(self._get(answer))
        device = target.device or serialized.device
        return target.update(written if device is None else written.to(device))

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        return self._spec("transform_output_spec", output_spec)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        return self._spec("transform_observation_spec", observation_spec)

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        return self._spec("transform_reward_spec", reward_spec)

    def _spec(self, method: str, spec: Composite) -> Composite:
        device = spec.device
        answer = self._get(self._running.spec.remote(method, spec.clone().cpu()))
        return answer.clear_device_() if device is None else answer.to(device)


for _name in DONE_LOCALLY:
    setattr(RayKL, _name, getattr(Transform, _name))


def _check_runs_remotely(transform_class: type[Transform], base: type[Transform]) -> None:
    """Refuse a subclass that overrides a method which runs on this side, not in the actor."""
    if not (isinstance(transform_class, type) and issubclass(transform_class, base)):
        raise ValueError(
            f"transform_class: expected a subclass of {full_name(base)}, got {transform_class!r}; "
            "leave it out for that class itself"
        )
    for name, method in vars(RayKL).items():
        here = method is getattr(Transform, name, None)
        if here and getattr(transform_class, name) is not getattr(base, name):
            raise ValueError(
                f"transform_class: expected one that changes steps, resets, calls and output specs "
                f"only, got {transform_class.__name__}.{name}; use it without Ray"
            )


def _arguments_of(models: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    """The arguments of the transform in the actor: for each model, the model or its factory."""
    for name, (model, factory) in models.items():
        if model is None and factory is None:
            raise ValueError(
                f"{name}: expected a log-prob wrapper or {name}_factory, got neither; pass one"
            )
        if isinstance(model, str):
            raise ValueError(
                f"{name}: expected a log-prob wrapper or {name}_factory, got {model!r}; an actor "
                "has no collector, and a copy of its policy would not follow the weights: pass a "
                "model, or use RetrieveKL without Ray"
            )
    given = {name: model for name, (model, _) in models.items()}
    return given | {f"{name}_factory": factory for name, (_, factory) in models.items()}
