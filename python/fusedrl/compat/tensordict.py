"""What is needed of tensordict beyond its public interface.

The public interface takes microseconds for each entry of each sample, so samples are read and
pickled by their attributes: in ``csrc/host/tensordicts.cpp`` and ``transport``.
``tests/compat/test_tensordict.py`` says which attributes there are.
"""

from __future__ import annotations

from typing import Any

from tensordict import LazyStackedTensorDict, TensorDict, is_non_tensor

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


def get_entry(tensordict: Any, key: str) -> Any:
    """One entry, ``None`` if there is none; ``get`` first looks whether the key is a path."""
    return tensordict._get_str(key, None)
