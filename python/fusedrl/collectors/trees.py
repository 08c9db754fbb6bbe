"""Takes tensordicts apart and copies them in C++, where Python would be slow for many entries."""

from __future__ import annotations

import copy
from typing import Any

from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, is_tensorclass
from torch import Tensor

from fusedrl._host import TreeKind, Trees


def _kind_of(kind: type) -> TreeKind:
    if issubclass(kind, Tensor):
        return TreeKind.tensor_subclass
    if kind is TensorDict:
        return TreeKind.dict
    if kind is LazyStackedTensorDict or kind is NonTensorStack:
        return TreeKind.stack
    return TreeKind.tensorclass if is_tensorclass(kind) else TreeKind.other


def _clone(value: Any) -> Any:
    return value.clone()


TREES = Trees(Tensor, _kind_of, _clone, copy.deepcopy)
