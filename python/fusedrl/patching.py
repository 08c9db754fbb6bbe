"""Replace objects in the modules of a package, and restore them.

An object is found by identity, under any name in any loaded module of the package. Only the
``__dict__`` of a module is read and written: an attribute look-up would trigger lazy imports.
"""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

logger = logging.getLogger("fusedrl")


_lock = threading.RLock()
_namespace: Callable[[ModuleType], dict[str, Any]] = vars(ModuleType)["__dict__"].__get__
_MISSING = object()
_Owner = ModuleType | type  # a class has the methods that are replaced
_Global = tuple[str, str, ModuleType]  # the name of a module, a name in it, and the module

# (module, name) -> the original there, while it is replaced.
_originals: dict[tuple[str, str], Any] = {}


@dataclass(frozen=True)
class Replacement:
    """Replaces ``module.name`` by ``new`` in the whole package.

    A name ``Class.method`` is replaced in that class only, and so in its subclasses; with
    ``alone``, a global is replaced in that module only. If the module has no such name, ``new`` is
    added to the modules ``add_to``; without these that is an error.
    """

    module: str
    name: str
    new: Any
    add_to: Sequence[str] = ()
    alone: bool = False


@dataclass(frozen=True)
class Change:
    """One global of a module, or method of a class, where ``new`` replaced ``old`` or was added."""

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
        already: names that an earlier patch replaced; reverting this patch does not restore them.
        held: ``(module, name)`` of globals outside the package that refer to an original. They
            are the user's and are not changed.
        active: whether the patch is in place.
    """

    def __init__(
        self,
        package: str,
        written: Sequence[tuple[Change, _Owner]],
        ours: Iterable[_Global],
        already: Iterable[str],
        held: Iterable[_Global],
    ) -> None:
        self.package = package
        self.changes = tuple(change for change, _ in written)
        self.already = tuple(already)
        self.held = tuple((module, name) for module, name, _ in held)
        self.active = True
        self._written = written
        self._before = {(module, name) for module, name, _ in ours}  # of an earlier patch

    def revert(self) -> None:
        """Restore everything that this patch replaced; a second call does nothing.

        Modules of the package that were imported under the patch get the originals too. A global
        that was changed again since the patch is kept, with a warning.
        """
        with _lock:
            if not self.active:
                return
            self.active = False
            for change, owner in self._written:
                _revert(change, owner)
                _originals.pop((change.module, change.name), None)
            replaced = [change for change in self.changes if not change.added]
            for change in {id(change.new): change for change in replaced}.values():
                for module, name, owner in _holders([change.new], self.package):
                    if (module, name) not in self._before:
                        setattr(owner, name, change.old)

    def __enter__(self) -> Report:
        """The report itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Revert the patch, also after an exception."""
        self.revert()

    def __iter__(self) -> Iterator[Change]:
        """The changes, in the order they were made."""
        return iter(self.changes)

    def __str__(self) -> str:
        """One line per change, then the names that were not changed."""
        state = "" if self.active else ", reverted since"
        lines = [f"{self.package}: {len(self.changes)} globals changed{state}"]
        lines += [f"  {change}" for change in self.changes]
        if self.already:
            lines.append(f"replaced by an earlier patch: {', '.join(self.already)}")
        if self.held:
            lines.append("outside the package, not changed:")
            lines += [f"  {module}.{name}" for module, name in self.held]
        return "\n".join(lines)


def chosen_of(names: Iterable[str] | None, known: Sequence[str]) -> list[str]:
    """The names to replace, without duplicates; all ``known`` ones if ``names`` is ``None``.

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
    """Replace objects in the globals of all loaded modules of ``package``.

    Modules that are imported later get the new object from the patched ones. References other than
    globals (base classes, default arguments, class attributes, closures) are not replaced, nor are
    modules outside the package, which the report lists. Existing instances of a replaced class
    cannot be pickled under the patch, as their class is not found by its name.

    Args:
        package: name of the package, such as ``"torchrl"``.
        replacements: what to replace. A ``new`` that calls the original must have a reference to it
            before this call.

    Returns:
        The report of what was replaced; :meth:`Report.revert` restores it.

    Raises:
        ValueError: a module does not have the name, and ``add_to`` is empty. Nothing is changed.
    """
    wanted = list(replacements)
    for r in wanted:
        for module in (r.module, *r.add_to):
            importlib.import_module(module)
    with _lock:
        found = [(r, _current(*_owner(r.module, r.name))) for r in wanted]
        for r, current in found:
            if current is _MISSING and not r.add_to:
                raise ValueError(
                    f"{r.module}: expected it to have {r.name}, got none; "
                    f"leave it out, as this version of {package} cannot be patched with it"
                )
        ours = _holders([r.new for r in wanted], package)
        written: list[tuple[Change, _Owner]] = []
        for r, current in found:
            if current is r.new:
                continue
            if current is not _MISSING:
                _originals[r.module, r.name] = current
            for change, owner in _changes(r, current, package):
                setattr(owner, _last(change.name), change.new)
                written.append((change, owner))
        already = [r.name for r, current in found if current is r.new]
        originals = [
            _originals[r.module, r.name] for r in wanted if (r.module, r.name) in _originals
        ]
        # The modules of the package no longer refer to an original.
        held = _holders(originals, None, but=(package, "fusedrl"))
        return Report(package, written, ours, already, held)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _owner(module: str, name: str) -> tuple[_Owner, str]:
    """The module or class whose attribute ``name`` is, and the last part of the name."""
    loaded = sys.modules[module]
    cls = _namespace(loaded).get(name.partition(".")[0])
    return (cls, _last(name)) if "." in name and isinstance(cls, type) else (loaded, name)


def _current(owner: _Owner, name: str) -> Any:
    """The value of a name in the owner itself, without inherited ones."""
    names = vars(owner) if isinstance(owner, type) else _namespace(owner)
    return names.get(name, _MISSING)


def _changes(r: Replacement, current: Any, package: str) -> list[tuple[Change, _Owner]]:
    """The changes that a replacement makes, and the owner of each."""
    if current is _MISSING:
        homes = [(module, sys.modules[module]) for module in r.add_to]
        return [
            (Change(module, r.name, None, r.new, added=True), home)
            for module, home in homes
            if _current(home, r.name) is _MISSING
        ]
    if r.alone or "." in r.name:
        return [(Change(r.module, r.name, current, r.new), _owner(r.module, r.name)[0])]
    return [
        (Change(module, name, current, r.new), home)
        for module, name, home in _holders([current], package)
    ]


def _revert(change: Change, owner: _Owner) -> None:
    name = _last(change.name)
    if _current(owner, name) is not change.new:
        logger.warning(
            "%s.%s was changed under the patch and stays as it is", change.module, change.name
        )
    elif change.added:
        delattr(owner, name)
    else:
        setattr(owner, name, change.old)


def _holders(
    objects: Collection[Any], package: str | None, but: Sequence[str] = ()
) -> list[_Global]:
    """Globals that are one of the objects, in a package, or in all modules except packages ``but``.

    A module with two names counts once, under the first: a script is ``__main__``, and also
    ``__mp_main__``. Objects in ``sys.modules`` that are no modules are skipped.
    """
    ids = set(map(id, objects))
    modules = {
        id(module): (name, module)
        for name, module in reversed(list(sys.modules.items()))
        if (package is None or _within(name, package))
        and not any(_within(name, other) for other in but)
        and issubclass(type(module), ModuleType)
    }
    return [
        (module, name, loaded)
        for module, loaded in reversed(modules.values())
        for name, value in list(_namespace(loaded).items())
        if id(value) in ids
    ]


def _within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")
