"""Find and load the compiled libraries, and report why one does not load.

``_C`` holds the CPU ops, ``_C_cuda`` the CUDA ops, which are loaded only under a CUDA build of
torch, and ``_host`` the Python bindings that do not need torch. A library that does not load, or
was not compiled for the driver or the GPU, never fails silently: the reason is stored, logged, and
raised by the first call that needs the library.
"""

from __future__ import annotations

import ctypes
import importlib.util
import platform
import re
from pathlib import Path
from typing import Any

import torch

from fusedrl.compat.torch import constant_in_traces

REMEDY = "reinstall it, `pip install --force-reinstall --no-deps` with its wheel or checkout"


class NativeLibraryError(ImportError):
    """A compiled library is missing or does not load; the message has the reason and the remedy."""


def find(name: str) -> Path | None:
    """Path of the compiled library ``fusedrl.<name>``, in a wheel or an editable install."""
    spec = importlib.util.find_spec(f"fusedrl.{name}")
    return Path(spec.origin) if spec is not None and spec.origin else None


def _host_library() -> Any:
    """``fusedrl._host``, or ``None`` if it does not load."""
    try:
        return importlib.import_module("fusedrl._host")
    except ImportError:
        return None


def built_for() -> str:
    """The platform that the installed binaries were compiled for, as one phrase."""
    if (host := _host_library()) is None:
        return "unknown (the _host library does not load either)"
    facts = host.build_info()
    return f"torch >= {facts['torch_target']} on {facts['system']} {facts['machine']}"


def _cpu_level_error() -> str | None:
    """Why FUSEDRL_CPU_LEVEL is invalid, checked here because ``_C`` would abort the process."""
    if (host := _host_library()) is None:
        return None
    try:
        host.cpu_level()
    except RuntimeError as error:
        return str(error)
    return None


def _running() -> str:
    return f"torch {torch.__version__} on {platform.system()} {platform.machine()}"


# Load errors by library; a plain dict, as torch.compile traces through it but not through a cache.
_outcomes: dict[str, str | None] = {}


def load_error(name: str) -> str | None:
    """Load the op library ``name`` once; return ``None`` or the error message. Never raises."""
    if name not in _outcomes:
        try:
            _outcomes[name] = _load(name)
        except Exception as error:  # for example from a _host that is older than this file
            _outcomes[name] = f"fusedrl.{name}: {type(error).__name__}: {error}; {REMEDY}"
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
            f"fusedrl.{name}: expected a compiled library next to {__file__}, found none "
            f"(built for: {built_for()}; running: {_running()}); {REMEDY}"
            + (", with `-C cmake.define.FUSEDRL_CUDA=pypi`" if name == "_C_cuda" else "")
        )
    if name == "_C_cuda" and (driver_error := _driver_error()) is not None:
        return f"fusedrl.{name}: {driver_error}"
    try:
        torch.ops.load_library(str(path))
    except (OSError, RuntimeError) as error:  # from the linker, or ops are already registered
        return (
            f"fusedrl.{name}: {path} does not load: {error}. Built for: {built_for()}. "
            f"Running: {_running()}; {REMEDY}"
        )
    return None


def _driver_version() -> int | None:
    """The CUDA version of the driver, as ``1000 * major + 10 * minor``; ``None`` without a driver.

    The query does not initialise CUDA, so that the process may still fork.
    """
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (AttributeError, OSError):  # an incomplete driver, or none
        return None
    return version.value or None


def _driver_error() -> str | None:
    """Why the driver cannot run ``_C_cuda``, which contains the CUDA runtime of its compiler.

    A driver for CUDA n.0 runs all of CUDA n. The runtime in torch may be an older one. An unknown
    version is no error: without a driver there is no GPU to run on.
    """
    if (host := _host_library()) is None or (version := _driver_version()) is None:
        return None
    compiler = host.build_info()["cuda_compiler"].partition(".")[0]
    major, minor = divmod(version, 1000)
    if major >= int(compiler or 0):
        return None
    torch_too = (
        ""
        if (torch.version.cuda or "").startswith(f"{major}.")
        else f" a torch for CUDA {major}, and"
    )
    return (
        f"expected a driver for CUDA {compiler}.0 or newer, got one for CUDA {major}."
        f"{minor // 10}; update NVIDIA's driver, or install{torch_too} a fusedrl compiled with "
        f"nvcc of CUDA {major}"
    )


# Errors by device index; a plain dict, as above.
_devices: dict[int, str | None] = {}


@constant_in_traces
def device_error(index: int) -> str | None:
    """``None`` if ``_C_cuda`` is loaded and has code for this GPU, else the error; cached."""
    if index not in _devices:
        _devices[index] = load_error("_C_cuda") or _architecture_error(index)
    return _devices[index]


def _architecture_error(index: int) -> str | None:
    """The error for a GPU with neither binary code of its generation nor PTX of an older one."""
    host = _host_library()
    # A traced graph may name a device of another machine.
    if host is None or index >= torch.cuda.device_count():
        return None
    major, minor = torch.cuda.get_device_capability(index)
    built = host.build_info()["cuda_architectures"]
    for arch, form in re.findall(r"(\d+)[a-z]?(-real|-virtual)?", built):
        generation, least = divmod(int(arch), 10)
        has_binary = form != "-virtual" and (generation == major and least <= minor)
        if has_binary or (form != "-real" and (generation, least) <= (major, minor)):
            return None
    remedy = f"compile fusedrl with -C cmake.define.FUSEDRL_CUDA_ARCHS={major}{minor}"
    return (
        f"fusedrl._C_cuda: expected a GPU of the architectures {built}, got sm_{major}{minor} on "
        f"cuda:{index}; {remedy if major >= 8 else 'use a GPU from sm_80 on'}"
    )


def require(name: str, device: int | None = None) -> None:
    """Raise :class:`NativeLibraryError` unless the op library is loaded and runs on the GPU."""
    error = load_error(name) if device is None else device_error(device)
    if error is not None:
        raise NativeLibraryError(error)
