"""What we need of one library, and the error where a version of it lacks that."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from types import CodeType, FunctionType
from typing import Any, TypeVar

_Word = TypeVar("_Word", bound=Callable[..., Any])


class Library:
    """The private names of one library that we need, and what for.

    Args:
        name: the library's name, for pip and for import.
        tried: the version that all tests have passed with.

    Attributes:
        needed: the reason for each name that is needed, by ``"module:name"``.
    """

    def __init__(self, name: str, tried: str) -> None:
        self.name = name
        self.tried = tried
        self.needed: dict[str, str] = {}

    def needs(self, *places: str) -> Callable[[_Word], _Word]:
        """Says which names a function needs; its docstring begins with what for.

        A name is looked for at once where its module is loaded, else before the first call behind
        the import of its library, since before it there is nothing of it that could be asked.

        Args:
            places: each ``"module:name"``, or ``"module:Class.name"`` for what a class or its
                instances have.
        """

        def decorate(function: _Word) -> _Word:
            reason = inspect.cleandoc(function.__doc__ or "").partition("\n\n")[0]
            self._add(places, " ".join(reason.split()))
            if all(_loaded(place) and not _lacks(place) for place in places):
                return function
            pending = list(places)

            @wraps(function)
            def checked(*args: Any, **kwargs: Any) -> Any:
                if pending and self.name in sys.modules:
                    for place in places:
                        self.require(place)
                    pending.clear()
                return function(*args, **kwargs)

            return checked  # pyright: ignore[reportReturnType]

        return decorate

    def take(self, place: str, why: str) -> Any:
        """An object of the library as it is, whose module is imported now."""
        self._add((place,), why)
        self.require(place)
        return _find(place)

    def names(self, owner: str, names: Sequence[str], why: str) -> tuple[str, ...]:
        """Names that a class or a module has, ``"module:Class"``, for what works by name."""
        self._add([_join(owner, name) for name in names], why)
        return tuple(names)

    def require(self, place: str) -> None:
        """Raise an ImportError with the reason if the installed library lacks a name."""
        library = importlib.import_module(self.name)
        if _lacks(place):
            raise ImportError(
                f"{self.name} {library.__version__}: expected {place.replace(':', '.')}, "
                f"got none, and fusedrl needs it ({self.needed[place]}); "
                f"install {self.name} {self.tried}, with which it has been tried"
            )

    def _add(self, places: Sequence[str], why: str) -> None:
        for place in places:
            self.needed[place] = why.rstrip(".")


def _join(owner: str, name: str) -> str:
    return f"{owner}.{name}" if ":" in owner else f"{owner}:{name}"


def _loaded(place: str) -> bool:
    return place.partition(":")[0] in sys.modules


def _find(place: str) -> Any:
    module, _, name = place.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _lacks(place: str) -> bool:
    """Whether neither the library's objects nor the code of a class know a name."""
    try:
        _find(place)
    except ModuleNotFoundError:
        return True
    except AttributeError:
        holder, _, name = place.rpartition(".")
        if ":" not in holder:
            return True
        try:
            owner = _find(holder)
        except AttributeError:
            return True
        bases = owner.__mro__ if isinstance(owner, type) else (owner,)
        return not any(_speaks_of(base, name) for base in bases)
    return False


def _speaks_of(owner: Any, name: str) -> bool:
    """Whether a class says that its instances have an attribute, or its code uses it."""
    if isinstance(owner, type) and name in vars(owner).get("__annotations__", ()):
        return True
    return any(name in (*code.co_names, *code.co_consts) for code in _codes(owner))


def _codes(owner: Any) -> Iterator[CodeType]:
    """The code of a function or of a class's methods and properties, and what is in it."""
    for value in vars(owner).values() if isinstance(owner, type) else (owner,):
        parts = (value.fget, value.fset) if isinstance(value, property) else (value,)
        for part in parts:
            function = getattr(part, "__func__", part)
            function = inspect.unwrap(function) if callable(function) else None
            if isinstance(function, FunctionType):
                yield from _with_inner(function.__code__)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)
