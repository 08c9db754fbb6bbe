"""Transforms that are called on data outside of an environment, such as a replay buffer's."""

from __future__ import annotations

from collections.abc import Callable

from tensordict import TensorDictBase
from torchrl.envs import Transform

from fusedrl.transforms.columns import check_all_or_none, entries_of

Step = Callable[[TensorDictBase, TensorDictBase], TensorDictBase]


def writable(transform: Transform, tensordict: TensorDictBase) -> TensorDictBase:
    """The tensordict that ``transform`` may write to: the data, or a copy that shares its tensors.

    A transform that is called by itself writes into the data. One in a ``Compose`` may be that of a
    replay buffer, and a storage of tensordicts hands out what it stores: a reward that is penalised
    in place would be penalised again each time it is sampled. So it gets a copy.
    """
    if vars(transform)["_container"] is None:
        return tensordict
    return tensordict.clone(recurse=False)


def following(tensordict: TensorDictBase) -> TensorDictBase | None:
    """The ``"next"`` entry, or ``None`` if no sample has it; an error if some have it."""
    found = tensordict.get("next", None)
    if found is None:
        check_all_or_none("next", list(entries_of(tensordict, "next")), TensorDictBase)
    return found


def run(transform: Transform, step: Step, tensordict: TensorDictBase) -> TensorDictBase:
    """Let ``step`` write into ``"next"``, or into the root if there is no ``"next"``."""
    data = writable(transform, tensordict)
    target = following(data)
    return step(data, data) if target is None else data.set("next", step(data, target))
