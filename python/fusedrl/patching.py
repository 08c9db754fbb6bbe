"""Replaces objects in the modules of a package by ours, and puts them back.

An object is found by identity, under whatever name a loaded module of the package holds it. Only
the modules' own dicts are read and written: no attribute of a module is looked up, since that would
import what lazy modules stand for.
"""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    MutableMapping,
    Sequence,
)
from dataclasses import dataclass, field
from types import ModuleType, TracebackType
from typing import Any

logger = logging.getLogger("fusedrl")

_lock = threading.RLock()
_namespace: Callable[[ModuleType], dict[str, Any]] = vars(ModuleType)["__dict__"].__get__

# Module, name, and what holds it under that name.
_Place = tuple[str, str, MutableMapping[str, Any]]

# (module, name) -> the original there, while it is replaced.
_originals: dict[tuple[str, str], Any] = {}


@dataclass(frozen=True)
class Replacement:
    """Replaces ``module.name`` by ``new`` in the whole package.

    A name ``Class.method`` is replaced in that class alone, and in what inherits it from there.
    Where the module has no such name, ``new`` is added to the modules ``add_to``; with none of them
    that is an error.
    """

    module: str
    name: str
    new: Any
    add_to: Sequence[str] = ()


@dataclass(frozen=True)
class Change:
    """One global of one module in which ``new`` replaced ``old``, or was added."""

    module: str
    name: str
    old: Any
    new: Any
    added: bool = False

    def __str__(self) -> str:
        """One line, ``where -> what``."""
        verb = "added:" if self.added else "->"
        return f"{self.module}.{self.name} {verb} {self.new.__module__}.{self.new.__qualname__}"


class Report:
    """What a patch replaced: an iterable with one :class:`Change` for each global.

    As a context manager it reverts the patch at the end of the block.

    Attributes:
        package: the package whose modules were changed.
        changes: what was changed.
        already: names that an earlier patch replaced; reverting this patch leaves them.
        held: ``(module, name)`` of globals outside of the package that hold an original. They
            belong to the user and stay as they are.
        active: whether the patch is in place.
    """

    def __init__(
        self,
        patch: _Patch,
        changes: Iterable[Change],
        already: Iterable[str],
        held: Iterable[tuple[str, str]],
    ) -> None:
        self.package = patch.package
        self.changes = tuple(changes)
        self.already = tuple(already)
        self.held = tuple(held)
        self.active = True
        self._patch = patch

    def revert(self) -> None:
        """Put back everything that this patch replaced; a second call does nothing.

        Modules of the package that were imported under the patch get the originals too. A global
        that something else has changed since is left alone, and logged.
        """
        with _lock:
            if self.active:
                self._patch.undo()
                self.active = False

    def __enter__(self) -> Report:
        """The report itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Revert, whether or not the block raised."""
        self.revert()

    def __iter__(self) -> Iterator[Change]:
        """The changes, in the order they were made."""
        return iter(self.changes)

    def __len__(self) -> int:
        """How many globals were changed."""
        return len(self.changes)

    def __bool__(self) -> bool:
        """Always true: a patch that found nothing to change is still a patch."""
        return True

    def __str__(self) -> str:
        """A line a change, then what was left alone."""
        state = "" if self.active else ", reverted since"
        lines = [f"{self.package}: {len(self.changes)} globals changed{state}"]
        lines += [f"  {change}" for change in self.changes]
        if self.already:
            lines.append(f"ours before this patch: {', '.join(self.already)}")
        if self.held:
            lines.append("held elsewhere and left as they are:")
            lines += [f"  {module}.{name}" for module, name in self.held]
        return "\n".join(lines)


def chosen_of(names: Iterable[str] | None, known: Sequence[str]) -> list[str]:
    """The names to replace, each once: those asked for, or all that are known.

    Raises:
        TypeError: ``names`` is a single string.
        ValueError: a name is unknown.
    """
    if isinstance(names, str):
        raise TypeError(f"names: expected a list of names, got a string; pass [{names!r}]")
    chosen = list(dict.fromkeys(known if names is None else names))
    for name in chosen:
        if name not in known:
            raise ValueError(
                f"names: expected some of {', '.join(known)}, got {name!r}; "
                "leave names out to replace all of them"
            )
    return chosen


def replace(package: str, replacements: Iterable[Replacement]) -> Report:
    """Replace objects wherever loaded modules of ``package`` hold them as globals.

    Modules that are imported later take the new object from the patched ones. The patch does not
    reach references other than globals (base classes, default arguments, attributes of classes,
    closures), nor modules outside of the package, which the report names. Instances that a replaced
    class has made before do not pickle under the patch, as their class is not found by its name.

    Args:
        package: name of the package, such as ``"torchrl"``.
        replacements: what to replace. A ``new`` that needs its original has to hold a reference to
            it before this call.

    Returns:
        The report of what was replaced, which puts it back with :meth:`Report.revert`.

    Raises:
        ValueError: a module does not have the name, and there is no ``add_to``. Nothing is changed.
    """
    wanted = list(replacements)
    for r in wanted:
        for module in (r.module, *r.add_to):
            importlib.import_module(module)
    with _lock:
        patch = _Patch(package)
        already: dict[tuple[str, str], Any] = {}
        for r in wanted:
            slot, current = (r.module, r.name), _home(r.module, r.name)
            if r.name not in current:
                if not r.add_to:
                    raise ValueError(
                        f"{r.module}: expected it to have {r.name}, got none; "
                        f"this version of {package} cannot be patched with it"
                    )
                patch.added.append(r)
            elif current[r.name] is r.new:
                already[slot] = _originals.get(slot)
            else:
                patch.replaced[slot] = (current[r.name], r.new)
        originals = [old for old, _ in patch.replaced.values()]
        originals += [old for old in already.values() if old is not None]
        held = _held_outside(package, originals)
        names = [name for _, name in already]
        return Report(patch, patch.apply(), names, held)


class _Methods(MutableMapping[str, Any]):
    """What a class defines itself, under names with the name of the class before them."""

    def __init__(self, cls: type) -> None:
        self._cls = cls

    def __getitem__(self, name: str) -> Any:
        return vars(self._cls)[name.rpartition(".")[2]]

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._cls, name.rpartition(".")[2], value)

    def __delitem__(self, name: str) -> None:
        delattr(self._cls, name.rpartition(".")[2])

    def __iter__(self) -> Iterator[str]:
        return (f"{self._cls.__name__}.{name}" for name in vars(self._cls))

    def __len__(self) -> int:
        return len(vars(self._cls))


def _home(module: str, name: str) -> MutableMapping[str, Any]:
    """What holds ``name``: the module's dict, or that of a class of it."""
    namespace = _namespace(sys.modules[module])
    owner, dot, _ = name.partition(".")
    if not dot:
        return namespace
    cls = namespace.get(owner)
    return _Methods(cls) if isinstance(cls, type) else {}


@dataclass
class _Patch:
    """The replacements of one call, and what is needed to undo them."""

    package: str
    replaced: dict[tuple[str, str], tuple[Any, Any]] = field(default_factory=dict)
    added: list[Replacement] = field(default_factory=list)
    written: list[tuple[Change, MutableMapping[str, Any]]] = field(default_factory=list)
    kept: set[tuple[str, str]] = field(default_factory=set)

    def apply(self) -> list[Change]:
        # What holds ours already was not our doing, and is not ours to revert.
        new = [new for _, new in self.replaced.values()]
        self.kept = {(module, name) for module, name, _ in _holders(self.package, new)}
        for slot, (old, new) in self.replaced.items():
            for module, name, namespace in self.places(slot, old):
                self.write(Change(module, name, old, new), namespace)
            _originals[slot] = old
        for r in self.added:
            for module in r.add_to:
                namespace = _namespace(sys.modules[module])
                if r.name not in namespace:
                    self.write(Change(module, r.name, None, r.new, added=True), namespace)
        return [change for change, _ in self.written]

    def places(self, slot: tuple[str, str], old: Any) -> list[_Place]:
        module, name = slot
        if "." in name:
            return [(module, name, _home(module, name))]
        return _holders(self.package, [old])

    def write(self, change: Change, namespace: MutableMapping[str, Any]) -> None:
        namespace[change.name] = change.new
        self.written.append((change, namespace))

    def undo(self) -> None:
        for change, namespace in self.written:
            if namespace.get(change.name) is not change.new:
                logger.warning(
                    "%s.%s was changed under the patch and stays as it is",
                    change.module,
                    change.name,
                )
            elif change.added:
                del namespace[change.name]
            else:
                namespace[change.name] = change.old
        for slot, (old, new) in self.replaced.items():
            for module, name, namespace in _holders(self.package, [new]):
                if (module, name) not in self.kept:
                    namespace[name] = old
            _originals.pop(slot, None)


def _namespaces(package: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Loaded modules and their dicts, each once; objects that only pose as modules are left out.

    A module of the package that has another name too goes by the package's.
    """
    seen: set[int] = set()
    for name, module in sorted(sys.modules.items(), key=lambda item: not _within(item[0], package)):
        if issubclass(type(module), ModuleType) and id(module) not in seen:
            seen.add(id(module))
            yield name, _namespace(module)


def _holders(package: str, objects: Collection[Any]) -> list[_Place]:
    """Globals of the package's modules that are one of the objects."""
    ids = set(map(id, objects))
    return [
        (module, name, namespace)
        for module, namespace in _namespaces(package)
        if _within(module, package)
        for name, value in list(namespace.items())
        if id(value) in ids
    ]


def _held_outside(package: str, objects: Collection[Any]) -> list[tuple[str, str]]:
    """Globals that are one of the objects, in modules that are neither the package's nor ours."""
    ids = set(map(id, objects))
    return [
        (module, name)
        for module, namespace in _namespaces(package)
        if not _within(module, package) and not _within(module, "fusedrl")
        for name, value in list(namespace.items())
        if id(value) in ids
    ]


def _within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")
