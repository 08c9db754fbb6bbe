"""Dependencies between the packages point one way, and no file imports one that imports it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1] / "python" / "fusedrl"  # a wheel has the benchmarks too

# What each package may import, also inside of functions: these, and what these may.
BELOW: dict[str, tuple[str, ...]] = {
    "compat": (),
    "patching": (),
    "assistant_tokens": (),
    "logs": (),
    "native": ("compat",),
    "ragged": ("compat",),
    "ops": ("native", "ragged", "logs"),
    "channel": ("compat",),
    "models": ("ops", "channel"),
    "transport": ("compat",),
    "transforms": ("models", "transport", "assistant_tokens"),
    "objectives": ("transforms",),
    "vllm": ("channel", "logs"),
    "weights": ("vllm",),
    "collectors": ("weights", "transport"),
    "scoring": ("models", "assistant_tokens"),
    "demo": ("scoring",),
    "integrations": ("models", "patching"),
    "cli": ("demo",),
    "__main__": ("cli",),
}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in ("fusedrl", *parts) if part != "__init__")


MODULES = {module_of(path): path for path in ROOT.rglob("*.py")}


def imported(path: Path) -> Iterator[str]:
    """The modules of ours that a file imports, at once, later or for its types alone."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                part = f"{node.module}.{alias.name}"
                yield from (name for name in (part, node.module) if name in MODULES)


IMPORTS = {name: set(imported(path)) - {name} for name, path in MODULES.items()}


def allowed(package: str) -> set[str]:
    direct = BELOW[package]
    return {package}.union(*map(allowed, direct)) if direct else {package}


def reached(name: str) -> set[str]:
    """What is imported with a module, of the modules that are no packages."""
    seen: set[str] = set()
    pending = [name]
    while pending:
        new = {x for x in IMPORTS[pending.pop()] if MODULES[x].name != "__init__.py"} - seen
        seen |= new
        pending += new
    return seen


def test_packages_import_what_is_below_them():
    upward = [
        f"{name} imports {other}"
        for name, others in IMPORTS.items()
        for other in others - {"fusedrl"}
        if name != "fusedrl" and other.split(".")[1] not in allowed(name.split(".")[1])
    ]
    assert not upward


def test_what_is_listed_is_imported():
    used = {
        (name.split(".")[1], x.split(".")[1])
        for name in IMPORTS
        for x in IMPORTS[name]
        if "fusedrl" not in (name, x)
    }
    listed = {(package, below) for package, packages in BELOW.items() for below in packages}
    assert not listed - used


def test_no_file_imports_one_that_imports_it():
    files = [name for name, path in MODULES.items() if path.name != "__init__.py"]
    behind = {name: reached(name) for name in files}
    circles = {
        frozenset(other.rpartition(".")[2] for other in behind[name] if name in behind[other])
        for name in files
        if name in behind[name]
    }
    assert not circles
