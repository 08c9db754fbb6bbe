"""What is needed of tensordict beyond its public interface.

The public interface takes microseconds for each entry of each sample, so samples are read and
pickled by their attributes: in ``csrc/host/tensordicts.cpp`` and ``transport/pickling.py``. What
does so asks :func:`is_as_known` first, and takes the public interface if this release of
tensordict looks different.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    TensorDict,
    is_non_tensor,
    lazy_stack,
)

logger = logging.getLogger("fusedrl")

# Attributes of tensordicts and tensorclasses.
ENTRIES = "_tensordict"  # of a TensorDict its dictionary, of a tensorclass its tensordict
FIELDS = "_non_tensordict"  # what a tensorclass has that is no tensor
LOCKED = "_is_locked"
ROWS = "tensordicts"  # the elements of a stack
# Attributes that are caches, or that say where the values lay.
CACHES = frozenset(
    {"_cache", "_last_op", "__lock_parents_weakrefs", "_locked_schema"}
    | {"_is_shared", "_is_memmap", "_memmap_prefix"}
)

# The attributes of a new object of each class, which copies are given without its constructor.
_OF_PLAIN = {ENTRIES, "_batch_size", "_device", "_td_dim_names"}
_OF_STACK = {LOCKED, ROWS, "stack_dim", "_batch_size", "hook_in", "hook_out"}
_OF_TENSORCLASS = {ENTRIES, FIELDS}


def tensordict_of(tensorclass: Any) -> Any:
    """The tensordict that holds the fields of a tensorclass."""
    return tensorclass._tensordict


def copy_of(value: Any) -> Any:
    """A copy with tensors of its own, as ``clone`` makes it, which takes ten times as long.

    Nearly all of that is for texts, of which ``clone`` copies the wrappers alone.
    """
    if type(value) is LazyStackedTensorDict and not any(value.names):
        return LazyStackedTensorDict(*map(copy_of, value.tensordicts), stack_dim=value.stack_dim)
    if type(value) is TensorDict and not any(value.names):
        entries = {key: copy_of(entry) for key, entry in value.items()}
        return TensorDict._new_unsafe(entries, batch_size=value.batch_size, device=value.device)
    return value if is_non_tensor(value) else value.clone()


@cache
def is_as_known() -> bool:
    """Whether objects of this release of tensordict have the attributes that they are read by."""
    found = list(differences())
    for difference in found:
        logger.warning(
            "%s; reading tensordicts by their public interface, which is slower", difference
        )
    return not found


def differences() -> Iterator[str]:
    """A sentence for each way in which this release differs from what is known."""
    try:
        yield from _attributes_that_differ()
        yield from _behaviour_that_differs()
    except Exception as error:
        yield f"tensordict: expected objects that can be read by their attributes, got {error!r}"


def _attributes_that_differ() -> Iterator[str]:
    plain = TensorDict({"x": torch.zeros(2)}, batch_size=[2])
    stack = lazy_stack([plain, plain.clone()])
    wrapper = NonTensorData("x")
    for found, expected in ((plain, _OF_PLAIN), (stack, _OF_STACK), (wrapper, _OF_TENSORCLASS)):
        names = vars(found).keys() - CACHES - {"_is_initialized", "_td_dim_name"}
        if names != expected:
            yield (
                f"{type(found).__name__}: expected the attributes {sorted(expected)}, got "
                f"{sorted(names)}"
            )
    types = (
        (plain, ENTRIES, dict),
        (stack, ROWS, list),
        (wrapper, ENTRIES, TensorDict),
        (wrapper, FIELDS, dict),
    )
    for found, name, kind in types:
        if type(getattr(found, name)) is not kind:
            yield f"{type(found).__name__}.{name}: expected a {kind.__name__}, got another type"


def _behaviour_that_differs() -> Iterator[str]:
    tensor = torch.zeros(2)
    plain = TensorDict({"x": tensor}, batch_size=[2])
    getattr(plain, ENTRIES)["y"] = tensor
    made = _made_like(plain)
    for found in (plain, made):
        if found.get("x") is not tensor or found.get("y") is not tensor or found.is_locked:
            yield "TensorDict: expected its entries to be those of its dictionary, got others"
    stack = lazy_stack([plain, made])
    copied = _made_like(stack)
    if copied.batch_size != (2, 2) or copied.is_locked or copied.get("x").shape != (2, 2):
        yield "LazyStackedTensorDict: expected a copy to consist of its attributes, got another"
    stack.lock_()
    if getattr(plain, LOCKED) is not True or not made.is_locked:
        yield f"TensorDict.{LOCKED}: expected it to say whether a tensordict is locked"


def _made_like(value: TensorDict | LazyStackedTensorDict) -> Any:
    made = type(value).__new__(type(value))
    for name, attribute in vars(value).items():
        object.__setattr__(made, name, attribute)
    return made


def get_entry(tensordict: Any, key: str) -> Any:
    """One entry, ``None`` if there is none; ``get`` first looks whether the key is a path."""
    return tensordict._get_str(key, None)
