"""Constructors of losses that take what we add to torchrl's arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from fusedrl.transforms.renamed_arguments import refuse

Loss = TypeVar("Loss", bound=type)


def takes(*names: str) -> Callable[[Loss], Loss]:
    """Let the constructor of a loss take attributes of its class as keyword arguments.

    An attribute that is not given is that of the class. torchrl's constructors ignore arguments
    that they do not know; these are a ``TypeError`` here.
    """

    def decorate(loss: Loss) -> Loss:
        init: Any = loss.__init__
        signature = inspect.signature(init)
        theirs = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        types, named = inspect.get_annotations(loss), inspect.Parameter.KEYWORD_ONLY
        ours = [
            inspect.Parameter(name, named, default=getattr(loss, name), annotation=types[name])
            for name in names
        ]
        known = {parameter.name for parameter in (*theirs, *ours)}

        @functools.wraps(init)
        def construct(self: Any, *args: Any, **given: Any) -> None:
            refuse({name: value for name, value in given.items() if name not in known})
            own = {name: given.pop(name) for name in names if name in given}
            init(self, *args, **given)
            for name, value in own.items():
                setattr(self, name, value)

        vars(construct)["__signature__"] = signature.replace(parameters=[*theirs, *ours])
        loss.__init__ = construct
        return loss

    return decorate
