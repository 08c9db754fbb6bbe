"""Puts weights into Ray's object store with one copy, and reads them there without a copy."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor


class StoredWeights:
    """A tensordict as ``ray.put`` takes it: what is copied is the tensors' own memory.

    Whoever gets it from the store has a tensordict of views of the store, which all processes of a
    node share; Ray keeps that memory for as long as a view lives. Nobody may write it. It takes
    torch and tensordict to unpickle it, and no more.

    Args:
        weights: tensors on any device, which arrive on the host. Tied ones stay tied.
    """

    def __init__(self, weights: TensorDictBase) -> None:
        self.weights = weights

    def __reduce__(self) -> Any:
        """Pickle tensors as out-of-band buffers, from which a tensordict is made."""
        known: dict[Any, _Stored] = {}

        def stored(tensor: Tensor) -> _Stored:
            memory = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
            return known.setdefault(memory, _Stored(tensor))

        def nested(weights: TensorDictBase) -> dict[str, Any]:
            return {
                key: nested(value) if isinstance(value, TensorDictBase) else stored(value)
                for key, value in weights.items()
            }

        return TensorDict, (nested(self.weights),)


class _Stored:
    """Stands for a tensor; a second pickling of the same one is a reference to the first."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> Any:
        # Tensors pickle themselves with torch.save, which makes more copies here and one a reader.
        tensor = self.tensor.detach().cpu().contiguous()
        if tensor.numel() == 0:
            return partial(torch.empty, dtype=tensor.dtype), (tensor.shape,)
        return torch.reshape, (_Flat(tensor.view(-1)), tensor.shape)


class _Flat(_Stored):
    def __reduce__(self) -> Any:
        buffer: Any = self.tensor.view(torch.uint8).numpy()
        return partial(torch.frombuffer, dtype=self.tensor.dtype), (pickle.PickleBuffer(buffer),)
