"""PEP 517 backend: scikit-build-core, against the torch that is already installed.

Build isolation hides site-packages, and a plain ``requires = ["torch"]`` would download a second
torch of several gigabytes to compile against. This backend looks for the installed one first, hands
its folder to CMake as ``FUSEDRL_TORCH_DIR``, and requires torch for the build only when there is
none. In the same way it brings PyPI's nvcc for ``FUSEDRL_CUDA=pypi``.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import io
import os
import re
import site
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scikit_build_core import build as _skbuild

MIN_TORCH = (2, 10)
TORCH_REQUIREMENT = "torch>=" + ".".join(map(str, MIN_TORCH))

# nvcc, and what it compiles and links with. Not newer: what CUDA 13.0 made runs under each driver
# that a torch for CUDA 13.0 takes.
NVCC_REQUIREMENT = "cuda-toolkit[cccl,nvcc]==13.0.*"
CUDA_SETTING = "cmake.define.FUSEDRL_CUDA"


def _of_target() -> Iterator[Path]:
    """Folders where the environment that fusedrl goes into keeps ``torch``, the surest first."""
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.submodule_search_locations:
        yield Path(spec.submodule_search_locations[0])
    # pip's isolated build hides site-packages but still runs the target environment's interpreter.
    for scheme in ("purelib", "platlib"):
        yield Path(sysconfig.get_path(scheme)) / "torch"
    yield Path(site.getusersitepackages()) / "torch"


def _nearby() -> Iterator[Path]:
    """Folders of other environments in use, for frontends that build in one of their own.

    uv builds with its own interpreter and its own ``VIRTUAL_ENV``: what is left of the target is
    its place on PATH, or the ``.venv`` of this folder, which uv takes unasked.
    """
    prefixes = [os.environ.get("VIRTUAL_ENV"), os.environ.get("CONDA_PREFIX")]
    prefixes += [str(Path(entry).parent) for entry in os.get_exec_path()]
    prefixes += [str(Path.cwd() / ".venv"), sys.base_prefix]
    tag = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for prefix in filter(None, prefixes):
        for packages in ("site-packages", "dist-packages"):
            yield Path(prefix) / "lib" / tag / packages / "torch"


def _is_torch(folder: Path) -> bool:
    return (folder / "include" / "torch").is_dir() and (folder / "version.py").is_file()


def _version(torch_dir: Path) -> tuple[int, ...]:
    text = (torch_dir / "version.py").read_text()
    match = re.search(r"__version__ = ['\"](\d+)\.(\d+)", text)
    return tuple(map(int, match.groups())) if match else (0, 0)


def find_torch() -> Path | None:
    """Folder of the installed torch, or ``None``; exits when the one to use is unfit."""
    named = os.environ.get("FUSEDRL_TORCH_DIR")
    if named and not _is_torch(Path(named)):
        sys.exit(
            f"fusedrl: FUSEDRL_TORCH_DIR: expected a torch package with include/ and version.py, "
            f"got {named}; unset it, or name the folder of `import torch; torch.__path__`"
        )
    for torch_dir in [Path(named)] if named else filter(_is_torch, _of_target()):
        if _version(torch_dir) < MIN_TORCH:
            found = ".".join(map(str, _version(torch_dir)))
            sys.exit(
                f"fusedrl: expected {TORCH_REQUIREMENT}, found torch {found} in {torch_dir}; "
                f"run `pip install '{TORCH_REQUIREMENT}'` first"
            )
        return torch_dir
    fit = (path for path in _nearby() if _is_torch(path) and _version(path) >= MIN_TORCH)
    return next(fit, None)


def _torch_requirement() -> list[str]:
    return [] if find_torch() is not None else [TORCH_REQUIREMENT]


def _point_cmake_at_torch() -> None:
    torch_dir = find_torch()
    if torch_dir is None:
        sys.exit(
            "fusedrl: expected an installed torch to compile against, found none; run "
            f"`pip install '{TORCH_REQUIREMENT}'` first, or set FUSEDRL_TORCH_DIR to its folder"
        )
    os.environ["FUSEDRL_TORCH_DIR"] = str(torch_dir)


def _wants_nvcc_of_pypi(config_settings: Any) -> bool:
    return (config_settings or {}).get(CUDA_SETTING) == "pypi"


def _nvcc_requirement(config_settings: Any) -> list[str]:
    return [NVCC_REQUIREMENT] if _wants_nvcc_of_pypi(config_settings) else []


def _point_cmake_at_nvcc(config_settings: Any) -> Any:
    """The settings for CMake, which knows no ``FUSEDRL_CUDA=pypi``."""
    if not _wants_nvcc_of_pypi(config_settings):
        return config_settings
    toolkits = (Path(entry) / "nvidia" / "cu13" for entry in sys.path)
    toolkit = next((path for path in toolkits if (path / "bin" / "nvcc").is_file()), None)
    if toolkit is None:
        sys.exit(
            "fusedrl: FUSEDRL_CUDA: expected the nvcc of PyPI's packages in the environment of the "
            "build, found none; build in isolation on Linux, or run "
            f"`pip install '{NVCC_REQUIREMENT}'` first"
        )
    # nvcc looks for its runtime in lib64, and the packages have it in lib.
    paths = [str(toolkit / "lib"), os.environ.get("LIBRARY_PATH")]
    os.environ["LIBRARY_PATH"] = os.pathsep.join(filter(None, paths))
    compiler = {"cmake.define.CMAKE_CUDA_COMPILER": str(toolkit / "bin" / "nvcc")}
    return {**config_settings, CUDA_SETTING: "on", **compiler}


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    requires = _skbuild.get_requires_for_build_wheel(config_settings)
    return requires + _torch_requirement() + _nvcc_requirement(config_settings)


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    requires = _skbuild.get_requires_for_build_editable(config_settings)
    return requires + _torch_requirement() + _nvcc_requirement(config_settings)


def build_wheel(
    wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    _point_cmake_at_torch()
    settings = _point_cmake_at_nvcc(config_settings)
    return _skbuild.build_wheel(wheel_directory, settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    _point_cmake_at_torch()
    settings = _point_cmake_at_nvcc(config_settings)
    name = _skbuild.build_editable(wheel_directory, settings, metadata_directory)
    _keep_paths_within(Path.cwd(), Path(wheel_directory, name))
    return name


def _keep_paths_within(checkout: Path, wheel: Path) -> None:
    """Put no folder beside the checkout on sys.path.

    For ``"fusedrl/benchmarks" = "benchmarks"`` in pyproject.toml, scikit-build-core names the
    folder two levels above: any neighbour of the checkout would be a package.
    """
    with zipfile.ZipFile(wheel) as old:
        files = {entry: old.read(entry) for entry in old.infolist()}
    record = next(entry for entry in files if entry.filename.endswith(".dist-info/RECORD"))
    rows = list(csv.reader(io.StringIO(files[record].decode())))
    for entry in [entry for entry in files if entry.filename.endswith(".pth")]:
        lines = files[entry].decode().splitlines(keepends=True)
        kept = [
            line
            for line in dict.fromkeys(lines)
            if line.startswith("import ") or Path(line.strip()).is_relative_to(checkout)
        ]
        files[entry] = "".join(kept).encode()
        digest = base64.urlsafe_b64encode(hashlib.sha256(files[entry]).digest()).rstrip(b"=")
        row = [entry.filename, f"sha256={digest.decode()}", str(len(files[entry]))]
        rows = [row if known[0] == entry.filename else known for known in rows]
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerows(rows)
    files[record] = written.getvalue().encode()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as new:
        for entry, data in files.items():
            new.writestr(entry, data)


get_requires_for_build_sdist = _skbuild.get_requires_for_build_sdist
build_sdist = _skbuild.build_sdist
prepare_metadata_for_build_wheel = _skbuild.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = _skbuild.prepare_metadata_for_build_editable
