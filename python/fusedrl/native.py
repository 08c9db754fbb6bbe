"""Find, load and explain the compiled libraries.

``_C`` holds the CPU ops, ``_C_cuda`` the CUDA ops, which are loaded only under a CUDA build of
torch, and ``_host`` the Python bindings that do not need torch. A library that does not load never
fails silently: the reason is kept, logged, and raised by the first call that needs it.
"""

from __future__ import annotations

import importlib.util
import platform
from pathlib import Path

import torch

REMEDY = "reinstall it, `pip install --force-reinstall --no-deps` with its wheel or checkout"


class NativeLibraryError(ImportError):
    """A compiled library is missing or does not load; the message says why, and what to do."""


def find(name: str) -> Path | None:
    """Path of the compiled library ``fusedrl.<name>``, in a wheel or an editable install."""
    spec = importlib.util.find_spec(f"fusedrl.{name}")
    return Path(spec.origin) if spec is not None and spec.origin else None


def built_for() -> str:
    """What the installed binaries were compiled for, as one phrase."""
    try:
        from fusedrl import _host
    except ImportError:
        return "unknown (the _host library does not load either)"
    facts = _host.build_info()
    return f"torch >= {facts['torch_target']} on {facts['system']} {facts['machine']}"


def _cpu_level_error() -> str | None:
    """Why ``_C`` would refuse FUSEDRL_CPU_LEVEL, which it can only do by aborting the process."""
    try:
        from fusedrl import _host

        _host.cpu_level()
    except ImportError:
        return None
    except RuntimeError as error:
        return str(error)
    return None


def _present() -> str:
    return f"torch {torch.__version__} on {platform.system()} {platform.machine()}"


# Outcomes by library; a plain dict, which torch.compile traces through where it stops at a cache.
_outcomes: dict[str, str | None] = {}


def load_error(name: str) -> str | None:
    """Load the op library ``name`` once; ``None`` on success, else the explanation."""
    if name not in _outcomes:
        _outcomes[name] = _load(name)
    return _outcomes[name]


def _load(name: str) -> str | None:
    if name == "_C_cuda" and torch.version.cuda is None:
        return (
            f"fusedrl.{name}: expected a CUDA build of torch, got torch {torch.__version__}; "
            "install a CUDA build of torch to run on the GPU"
        )
    if name == "_C" and (level_error := _cpu_level_error()) is not None:
        return f"fusedrl.{name}: {level_error}"
    path = find(name)
    if path is None:
        return (
            f"fusedrl.{name}: expected a compiled library beside {__file__}, found none "
            f"(built for: {built_for()}; there is: {_present()}); {REMEDY}"
            + (", with nvcc on PATH" if name == "_C_cuda" else "")
        )
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return (
            f"fusedrl.{name}: {path} does not load: {error}. Built for: {built_for()}. "
            f"There is: {_present()}; {REMEDY}"
        )
    return None


def require(name: str) -> None:
    """Raise :class:`NativeLibraryError` unless the op library ``name`` is loaded."""
    error = load_error(name)
    if error is not None:
        raise NativeLibraryError(error)
