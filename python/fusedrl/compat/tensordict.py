"""The private names of tensordict that fusedrl uses.

The public interface takes microseconds for each entry of each sample, so samples are read and
pickled by their attributes: in ``csrc/host/tensordicts.cpp`` and ``transport``.
``tests/compat/test_tensordict.py`` checks which attributes there are.
"""

from __future__ import annotations

from typing import Any

from tensordict import LazyStackedTensorDict, TensorDict, is_non_tensor

# Attributes of tensordicts and tensorclasses.
ENTRIES = "_tensordict"  # a TensorDict's dictionary, a tensorclass's tensordict
FIELDS = "_non_tensordict"  # the non-tensor fields of a tensorclass
LOCKED = "_is_locked"
ROWS = "tensordicts"  # the elements of a stack
# Attributes that are caches, or that describe where the values were.
CACHES = frozenset(
    {"_cache", "_last_op", "__lock_parents_weakrefs", "_locked_schema"}
    | {"_is_shared", "_is_memmap", "_memmap_prefix"}
)


def tensordict_of(tensorclass: Any) -> Any:
    """The tensordict that holds the fields of a tensorclass."""
    return tensorclass._tensordict


def copy_of(value: Any) -> Any:
    """A copy with new tensors, like ``clone``, which takes ten times as long.

    ``clone`` spends nearly all of that on texts, of which it copies only the wrappers.
    """
    if type(value) is LazyStackedTensorDict and not any(value.names):
        return LazyStackedTensorDict(*map(copy_of, value.tensordicts), stack_dim=value.stack_dim)
    if type(value) is TensorDict and not any(value.names):
        entries = {key: copy_of(entry) for key, entry in value.items()}
        return TensorDict._new_unsafe(entries, batch_size=value.batch_size, device=value.device)
    return value if is_non_tensor(value) else value.clone()


def get_entry(tensordict: Any, key: str) -> Any:
    """One entry, or ``None``; unlike ``get``, it does not check whether the key is a path."""
    return tensordict._get_str(key, None)
