"""Transforms between two turns, and on data outside of an environment, as a replay buffer's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.envs import Transform

from fusedrl.compat.torchrl import stands_alone
from fusedrl.transforms.columns import check_all_or_none, entries_of

Step = Callable[[TensorDictBase, TensorDictBase], TensorDictBase]


def writable(transform: Transform, tensordict: TensorDictBase) -> TensorDictBase:
    """The tensordict that ``transform`` may write to: the data, or a copy that shares its tensors.

    A transform that is called by itself writes into the data. One in a ``Compose`` may be that of a
    replay buffer, and a storage of tensordicts hands out what it stores: a reward that is penalised
    in place would be penalised again each time it is sampled. So it gets a copy.
    """
    if stands_alone(transform):
        return tensordict
    return tensordict.clone(recurse=False)


def following(tensordict: TensorDictBase) -> TensorDictBase | None:
    """The ``"next"`` entry, or ``None`` if no sample has it; an error if some have it."""
    check_all_or_none("next", list(entries_of(tensordict, "next")), TensorDictBase)
    return tensordict.get("next", None)


def begin(
    tensordict: TensorDictBase, reset: TensorDictBase, key: NestedKey, *trailing: int
) -> TensorDictBase:
    """Give each dialog that begins an empty row under ``key``, a declared observation of a turn.

    torchrl carries the observations of a turn to the root of the next one. If a reset had none,
    the first turns of a batch would lack a key that the others have, and turns could not be
    concatenated. A reset of some dialogs only leaves their rows to torchrl, which fills in zeros.

    Args:
        tensordict: the input of the reset, with a mask under ``"_reset"`` if some dialogs go on.
        reset: what the reset gives.
        key: the key of the observation.
        trailing: the sizes behind the tokens, as :func:`columns.declare_tokens` takes them.
    """
    mask = tensordict.get("_reset", None)
    if (mask is None or bool(mask.all())) and key not in reset.keys(True):
        reset.set(key, torch.zeros(*reset.batch_size, 0, *trailing, device=reset.device))
    return reset


def run(transform: Transform, step: Step, tensordict: TensorDictBase) -> TensorDictBase:
    """Let ``step`` write into ``"next"``, or into the root if there is no ``"next"``."""
    data = writable(transform, tensordict)
    target = following(data)
    return step(data, data) if target is None else data.set("next", step(data, target))
