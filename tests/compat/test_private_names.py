"""Private names of libraries stand in ``fusedrl.compat`` alone, and ours that they call are known.

Ruff refuses what is read from another object. Here is what it does not see: names in strings, as
for ``getattr``, names that a class inherits, and methods that libraries call.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

from private_names import NEEDED as BY_LIBRARY

ROOT = Path(__file__).parents[2] / "python" / "fusedrl"  # a wheel has the benchmarks too
OF_TUPLES = {"_asdict", "_make", "_replace"}  # public, though they begin with an underscore
OF_PYTHON = {"_exit", "_getframe", "_run_exitfuncs"}
ENDINGS = {"_factory", "_log_probs_full_key"}  # of names of arguments
OF_TORCHRL = ("transforms", "objectives", "weights", "collectors")

NEEDED = {
    name for owners in BY_LIBRARY.values() for names in owners.values() for name in names.split()
}


def private(name: str) -> bool:
    return re.fullmatch(r"_[a-z]\w*", name) is not None


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        if path.parent.name != "compat":
            yield path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))


def defined(tree: ast.AST) -> Iterator[str]:
    """The names that a module defines, and the attributes that its classes set on themselves."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.alias):
            yield node.asname or ""


def of_itself(node: ast.Attribute) -> bool:
    """Whether an object uses what a library's base class gave it, and ``compat`` looks up."""
    inherits = isinstance(node.value, ast.Name) and node.value.id == "self"
    return inherits and node.attr in NEEDED


def used(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The private names in a module, also in strings, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names = [] if of_itself(node) else [node.attr]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]
        elif isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        else:
            continue
        yield from ((node.lineno, name) for name in names if private(name))


def test_no_private_name_of_a_library_is_used_elsewhere():
    trees = list(sources())
    known = {name for _, tree in trees for name in defined(tree)}
    known |= {part.stem for part in ROOT.rglob("*.py*")} | OF_TUPLES | OF_PYTHON | ENDINGS
    found = [
        f"{path}:{line}: {name}"
        for path, tree in trees
        for line, name in used(tree)
        if name not in known
    ]
    assert not found, "move these into fusedrl/compat: " + ", ".join(found)


def classes() -> Iterator[type]:
    """The classes of the packages that have subclasses of torchrl's."""
    for package in OF_TORCHRL:
        for part in pkgutil.walk_packages([str(ROOT / package)], f"fusedrl.{package}."):
            module = importlib.import_module(part.name)
            own = filter(inspect.isclass, vars(module).values())
            yield from (cls for cls in own if cls.__module__ == part.name)


def test_every_private_method_that_a_library_calls_is_looked_up():
    missing = []
    for cls in classes():
        theirs = [base for base in cls.__mro__ if base.__module__.partition(".")[0] in BY_LIBRARY]
        written = (name for name, value in vars(cls).items() if inspect.isfunction(value))
        for name in filter(private, written):
            overrides = any(name in vars(base) for base in theirs)
            if overrides and name not in NEEDED:
                missing.append(f"{cls.__module__}.{cls.__qualname__}.{name}")
    assert not missing, "add what these override to tests/private_names.py: " + ", ".join(missing)
