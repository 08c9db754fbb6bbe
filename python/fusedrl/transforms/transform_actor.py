"""The Ray actor of a transform, which says which columns it reads and writes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

from tensordict import NestedKey, TensorDictBase
from torchrl.data import Composite
from torchrl.envs import Compose, Transform

from fusedrl.transforms.kl_computation import KLComputation
from fusedrl.transforms.retrieve_log_prob import RetrieveLogProb
from fusedrl.transforms.rollout_columns import ATTENTION
from fusedrl.transport import Serialized, deserialize, serialize

CALLS = ("forward", "_call")  # methods that are given one tensordict, with its ``"next"`` in it


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

    def describe(self) -> Description:
        """The description of the transform; raises what the transform's constructor raises."""
        transform = self._transform
        name, text = full_name(type(transform)), repr(transform)
        keys = list(transform.in_keys), list(transform.out_keys)
        return Description(name, text, *keys, *_columns_read(transform))

    def spec(self, method: str, spec: Composite) -> Composite:
        """The spec that the transform makes from another one."""
        return getattr(self._transform, method)(spec)

    def run(self, method: str, serialized: Serialized, missing_tolerance: bool) -> Serialized:
        """Call a method with packed tensordicts, and serialize what it wrote."""
        self._transform.set_missing_tolerance(missing_tolerance)
        result: TensorDictBase = getattr(self._transform, method)(*deserialize(serialized))
        if method in CALLS:
            result = result.get("next", result)
        return serialize(result.exclude(*self._unchanged()))

    def _unchanged(self) -> set[NestedKey]:
        """The columns that are read and not written; a whole parent if nothing in it is written."""
        written = {key for leaf in _leaves(self._transform) for key in _columns_written(leaf)}
        parents = {key[0] for key in written if isinstance(key, tuple)}
        read = {key for columns in _columns_read(self._transform) for key in columns} - written
        return {key if isinstance(key, str) or key[0] in parents else key[0] for key in read}


def full_name(cls: type) -> str:
    """The full name of a class, which means the same in every process."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _leaves(transform: Transform) -> Iterator[Transform]:
    if isinstance(transform, Compose):
        for part in transform:
            yield from _leaves(part)
    else:
        yield transform


def _columns_written(leaf: Transform) -> list[NestedKey]:
    return list(getattr(leaf, "columns_written", leaf.out_keys))


def _columns_read(transform: Transform) -> tuple[list[NestedKey], list[NestedKey]]:
    """The keys that a transform reads from the root, and those that it reads from ``"next"``."""
    root: list[NestedKey] = []
    following: list[NestedKey] = []
    written: set[NestedKey] = set()
    for leaf in _leaves(transform):
        own: Any = getattr(leaf, "columns_read", None)
        if own is not None:
            root += own[0]
            following += own[1]
        elif isinstance(leaf, RetrieveLogProb):
            root += leaf.in_keys
            if leaf.model.input_mode == "tokens":  # read too, though no wrapper lists it
                root += [ATTENTION, leaf.model.attention_mask_key]
        else:
            # A penalty reads from "next" what was written there. Any other transform may read both.
            following += [key for key in leaf.in_keys if key not in written]
            root += [] if isinstance(leaf, KLComputation) else leaf.in_keys
        written.update(_columns_written(leaf))
    return root, following
