"""Puts weights into Ray's object store with one copy, and reads them there without a copy."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from fusedrl.channel.ranks import ranks_of
from fusedrl.channel.tensors import Weight, weights_of


def stored(weights: Any) -> Any:
    """A reference to weights in Ray's store, for all processes of a node to read."""
    import ray

    found = weights_of(weights)
    if ranks := ranks_of(found.values()):
        raise ValueError(
            f"policy_or_weights: expected whole tensors, got shards on ranks {ranks}; publish the "
            "model on every rank through a WeightChannel, and pass a lease's weights"
        )
    named: Any = TensorDict({name: weight.tensor for name, weight in found.items()})
    return ray.put(StoredWeights(named.unflatten_keys(".")))


class StoredWeights:
    """A tensordict that ``ray.put`` copies once, directly from the tensors' memory.

    The receiver gets a tensordict of views of the store, which must not be written. Tensors arrive
    on the host, and tied ones stay tied. Unpickling needs torch and tensordict alone.
    """

    def __init__(self, weights: TensorDictBase) -> None:
        self.weights = weights

    def __reduce__(self) -> Any:
        """Pickle the tensors as out-of-band buffers, and a tensordict over them."""
        leaves = dict(self.weights.items(include_nested=True, leaves_only=True))
        memory = {name: Weight("", tensor).identity() for name, tensor in leaves.items()}
        distinct = {memory[name]: tensor for name, tensor in leaves.items()}
        calls = {key: _rebuilt(tensor) for key, tensor in distinct.items()}  # pickle keeps ties
        return TensorDict, ({name: calls[memory[name]] for name in leaves},)


class _Call:
    """Unpickles as the result of a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def _rebuilt(tensor: Tensor) -> _Call:
    # Tensors pickle through torch.save, with more copies here and one in each reader.
    tensor = tensor.detach().cpu().contiguous()
    if tensor.numel() == 0:
        return _Call(partial(torch.empty, dtype=tensor.dtype), tensor.shape)
    buffer: Any = tensor.view(-1).view(torch.uint8).numpy()
    flat = _Call(partial(torch.frombuffer, dtype=tensor.dtype), pickle.PickleBuffer(buffer))
    return _Call(torch.reshape, flat, tensor.shape)
