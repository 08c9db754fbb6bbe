"""What this machine lacks for each part of fusedrl, and the command that installs it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from fusedrl import native


@dataclass(frozen=True)
class Dependency:
    """A package, and which part of fusedrl takes it."""

    package: str
    purpose: str


DEPENDENCIES = (
    Dependency("torchrl", "the torchrl classes, losses and collectors"),
    Dependency("tensordict", "the torchrl classes, losses and collectors"),
    Dependency("transformers", "log-probs of models"),
    Dependency("pyarrow", "fusedrl score and fusedrl demo"),
    Dependency("rich", "fusedrl check, score, demo and bench"),
    Dependency("matplotlib", "the plots of fusedrl bench"),
    Dependency("peft", "adapters"),
    Dependency("trl", "patch_trl()"),
    Dependency("ray", "the classes for a Ray cluster"),
    Dependency("vllm", "weights of a vLLM engine"),
)


def missing() -> dict[str, str]:
    """What is missing -> what it is for, what there is instead, and the command that helps."""
    return _packages() | _cuda()


def _packages() -> dict[str, str]:
    found = {}
    for part in DEPENDENCIES:
        installed = _installed(part.package)
        versions = _versions(part.package)
        if installed is None:
            why = "not installed"
        elif not versions.contains(installed, prereleases=True):
            why = f"{installed} is installed, {_shown(versions)} is tested"
        else:
            continue
        wanted = requirement(part.package)
        found[part.package] = f'{why}; needed for {part.purpose}: `pip install "{wanted}"`'
    return found


def requirement(package: str) -> str:
    """What to tell pip to install of a package: versions that fusedrl works with."""
    return package + _shown(_versions(package))


def _cuda() -> dict[str, str]:
    """What the ops lack to run on a GPU, in the order in which to install it."""
    found = {}
    if torch.version.cuda is None:
        version = torch.__version__.partition("+")[0]
        found["CUDA build of torch"] = (
            f"torch {torch.__version__} is installed; a CUDA build is needed for GPUs: "
            f'`pip install --force-reinstall "torch=={version}"`, which on Linux is a build for '
            "CUDA where the package index is PyPI"
        )
    elif not torch.cuda.is_available():
        found["GPU"] = (
            "torch finds none; needed for the CUDA kernels: `nvidia-smi` says what the driver sees"
        )
    if native.find("_C_cuda") is None:
        found["CUDA kernels"] = (
            "fusedrl was compiled without them; needed for GPUs: in a checkout, "
            "`pip install --force-reinstall --no-deps -C cmake.define.FUSEDRL_CUDA=pypi .`, which "
            "brings nvcc"
        )
    elif torch.version.cuda is not None and (error := native.load_error("_C_cuda")) is not None:
        found["CUDA kernels"] = f"needed for GPUs: {error}"
    else:
        for index in range(torch.cuda.device_count()):
            if (error := native.device_error(index)) is not None:
                found[f"CUDA kernels for cuda:{index}"] = f"needed for this GPU: {error}"
    return found


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _versions(package: str) -> SpecifierSet:
    """The versions that fusedrl's own metadata allow."""
    try:
        lines = metadata.requires("fusedrl") or []
    except metadata.PackageNotFoundError:  # fusedrl runs from a folder on PYTHONPATH
        lines = []
    allowed = (r.specifier for r in map(Requirement, lines) if r.name == package)
    return next(allowed, SpecifierSet())


def _shown(versions: SpecifierSet) -> str:
    """The versions with the lower bound first."""
    return ",".join(sorted(map(str, versions), reverse=True))
