"""What an op says of a tensor that is ``None``: which one it needs."""

from __future__ import annotations

import inspect

import pytest
import torch

from fusedrl.ops import OPS

from .every_case import EVERY, FIRST


@pytest.mark.parametrize("op", OPS)
def test_a_tensor_that_is_none_is_told_what_to_pass(op):
    case = next(EVERY[name] for name in FIRST if name.split(",")[0] == op)
    arguments = case.inputs | case.others
    needed = [
        name
        for name, parameter in inspect.signature(case.op).parameters.items()
        if parameter.default is parameter.empty and isinstance(arguments.get(name), torch.Tensor)
    ]
    assert needed
    for name in needed:
        if name != "mask":
            with pytest.raises(
                TypeError, match=rf"^{name}: expected .*, got NoneType; pass a tensor of that kind$"
            ):
                case.op(**arguments | {name: None})
