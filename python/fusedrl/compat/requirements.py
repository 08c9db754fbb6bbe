"""The versions of other libraries with which fusedrl is tested, from its metadata."""

from __future__ import annotations

from contextlib import suppress
from importlib import metadata

from packaging.requirements import Requirement


def requirement(package: str) -> str:
    """The requirement of a package for pip, with the tested versions."""
    lines = []
    with suppress(metadata.PackageNotFoundError):  # fusedrl runs from a directory on PYTHONPATH
        lines = metadata.requires("fusedrl") or []
    versions = next((r.specifier for r in map(Requirement, lines) if r.name == package), ())
    return package + ",".join(sorted(map(str, versions), reverse=True))  # lower bound first
