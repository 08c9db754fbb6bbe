"""What a transform is called on: data outside of an environment, such as a replay buffer's."""

from __future__ import annotations

from collections.abc import Callable

from tensordict import TensorDictBase
from torchrl.envs import Transform

Step = Callable[[TensorDictBase, TensorDictBase], TensorDictBase]


def writable(transform: Transform, tensordict: TensorDictBase) -> TensorDictBase:
    """What a call of ``transform`` may write to: the data, or a copy that shares its tensors.

    The data itself where the transform is called by its name. In a ``Compose`` it may be that of a
    replay buffer, whose storage of tensordicts hands out what it stores: a reward that is penalised
    there would be penalised once more whenever it is sampled.
    """
    if vars(transform)["_container"] is None:
        return tensordict
    return tensordict.clone(recurse=False)


def run(transform: Transform, step: Step, tensordict: TensorDictBase) -> TensorDictBase:
    """Let ``step`` write into ``"next"``, or into the root where there is none."""
    data = writable(transform, tensordict)
    following = data.get("next", None)
    return step(data, data) if following is None else data.set("next", step(data, following))
