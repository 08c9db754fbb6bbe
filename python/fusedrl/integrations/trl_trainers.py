"""Find the trainers of the installed TRL that call a function, by reading TRL's sources."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# What a trainer may compute its own loss with; the reason names those that it uses.
_OF_ITS_OWN = ("ChunkedDivergenceFunction", "kl_div", "log_softmax", "logsumexp")
_LOSS = "compute_loss"


@dataclass
class _Definition:
    """A function or a class of a module, and every name that occurs in it."""

    name: str
    is_class: bool
    names: set[str]
    bases: set[str] = field(default_factory=set)
    methods: set[str] = field(default_factory=set)


@dataclass
class _Module:
    """The definitions and all names of a module; ``renamed`` has its imports with ``as``."""

    name: str
    definitions: list[_Definition]
    names: set[str]
    renamed: list[tuple[str, str]]


def without(functions: Iterable[str]) -> dict[str, str]:
    """The trainers of the installed TRL that call none of ``functions``, each with the reason.

    A trainer calls one if its class names it, or names a function of TRL that calls it, if one is a
    method of the class, or if the trainer inherits its loss from a trainer that calls one. The
    result is empty if TRL has no sources.
    """
    trainers, served = _trainers(functions)
    return {
        name: _reason(module)
        for name, (module, _) in sorted(trainers.items())
        if name not in served
    }


def in_part(functions: Iterable[str], fused: Mapping[str, str]) -> dict[str, str]:
    """The trainers that call one of ``functions``, each with how its loss is computed.

    Args:
        functions: as in :func:`without`.
        fused: trainers whose ``_compute_loss`` is replaced, each with the conditions, which also
            hold for trainers that inherit the method.
    """
    trainers, served = _trainers(functions)
    losses = dict(fused)
    while heirs := {
        name: losses[base]
        for name, (_, trainer) in trainers.items()
        if name not in losses and not {_LOSS, f"_{_LOSS}"} & trainer.methods
        for base in trainer.bases & losses.keys()
    }:
        losses |= heirs
    return {name: losses.get(name, "log-probs; the loss is its own") for name in sorted(served)}


def _trainers(
    functions: Iterable[str],
) -> tuple[dict[str, tuple[_Module, _Definition]], set[str]]:
    """All trainers, and the names of those that call one of ``functions``."""
    modules = _modules()
    functions = set(functions)
    methods_of = {name.partition(".")[0] for name in functions if "." in name}
    calling = _functions_that_call(functions, modules)
    trainers = {
        definition.name: (module, definition)
        for module in modules
        for definition in module.definitions
        if definition.is_class and _is_trainer(definition.name)
    }
    served = {name for name, (_, trainer) in trainers.items() if trainer.names & calling}
    served |= trainers.keys() & methods_of
    while heirs := {
        name
        for name, (_, trainer) in trainers.items()
        if name not in served
        and _LOSS not in trainer.methods
        and {base.lstrip("_") for base in trainer.bases} & served
    }:
        served |= heirs
    return trainers, served


def _is_trainer(name: str) -> bool:
    return name.endswith("Trainer") and not name.startswith("_")


def _reason(module: _Module) -> str:
    own = [name for name in _OF_ITS_OWN if name in module.names]
    return f"its loss is of {', '.join(own)}" if own else "it takes no log-probs of tokens"


def _functions_that_call(functions: set[str], modules: Sequence[_Module]) -> set[str]:
    """The functions, their other names, and TRL's functions that call them, also indirectly."""
    calling = set(functions)
    while True:
        found = {other for module in modules for name, other in module.renamed if name in calling}
        for module in modules:
            for definition in module.definitions:
                if not definition.is_class and definition.names & calling:
                    found.add(definition.name)
        if found <= calling:
            return calling
        calling |= found


def _modules() -> tuple[_Module, ...]:
    spec = importlib.util.find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        return ()
    return _modules_under(Path(spec.submodule_search_locations[0]))


@functools.lru_cache(maxsize=1)
def _modules_under(root: Path) -> tuple[_Module, ...]:
    return tuple(_read(root))


def _read(root: Path) -> Iterator[_Module]:
    for path in sorted(root.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        yield _Module(
            name=".".join(path.relative_to(root).with_suffix("").parts),
            definitions=[
                _defined(node)
                for node in tree.body
                if isinstance(node, (ast.FunctionDef, ast.ClassDef))
            ],
            names=_names(tree),
            renamed=[
                (alias.name, alias.asname)
                for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom)
                for alias in node.names
                if alias.asname is not None
            ],
        )


def _defined(node: ast.FunctionDef | ast.ClassDef) -> _Definition:
    if isinstance(node, ast.FunctionDef):
        return _Definition(node.name, False, _names(node))
    bases = set().union(*map(_names, node.bases)) if node.bases else set()
    methods = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
    names = set().union(*map(_names, node.body))
    return _Definition(node.name, True, names, bases, methods)


def _names(tree: ast.AST) -> set[str]:
    """The names and attributes that occur in a piece of source."""
    return {
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(tree)
        if isinstance(node, (ast.Name, ast.Attribute))
    }
