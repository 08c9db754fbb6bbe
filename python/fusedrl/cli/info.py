"""``fusedrl info``: versions, devices, libraries and missing packages, for bug reports."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement

import fusedrl
from fusedrl import native
from fusedrl.cli import table
from fusedrl.compat.requirements import requirement

# Package -> the part of fusedrl that needs it.
PACKAGES = {
    "torchrl": "the torchrl classes, losses and collectors",
    "tensordict": "the torchrl classes, losses and collectors",
    "transformers": "log-probs of models",
    "tokenizers": "fusedrl demo",
    "jinja2": "chat templates",
    "pyarrow": "fusedrl score and demo",
    "rich": "fusedrl score and demo",
    "tqdm": "fusedrl score and demo",
    "matplotlib": "the plots of fusedrl bench",
    "peft": "adapters",
    "trl": "patch_trl()",
    "ray": "the classes for a Ray cluster",
    "vllm": "weights of a vLLM engine",
}

EXAMPLES = """\
examples:
  fusedrl info > info.md    # Markdown tables, for a bug report
  fusedrl info --json       # the same for a program

exit codes:
  0    the facts are printed, also if packages are missing
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> int:
    """Print versions, machine, libraries and what is missing."""
    facts = collect() | {"missing": missing() or {"nothing": "all parts of fusedrl are available"}}
    tables = (table([section, ""], *entries.items()) for section, entries in facts.items())
    print(json.dumps(facts, indent=2) if args.json else "\n\n".join(tables))
    return 0


def collect() -> dict[str, dict[str, Any]]:
    """Facts by section. Imports torch, and reads only the versions of other packages."""
    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return {
        "versions": {
            "fusedrl": fusedrl.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,  # with the build tag
            **{name: _version(name) or "not installed" for name in ("triton", "numpy", *PACKAGES)},
        },
        "machine": {
            "platform": platform.platform(),
            "cpu": _cpu_model(),
            "cpu capability (torch)": torch.backends.cpu.get_cpu_capability(),
            "cpus": os.cpu_count(),
            "torch threads": torch.get_num_threads(),
            "cuda (torch)": torch.version.cuda or "none: a CPU build of torch",
            **{
                f"cuda:{index}": f"{gpu.name}, sm_{gpu.major}{gpu.minor}, "
                f"{gpu.total_memory / 2**30:.1f} GiB, {gpu.multi_processor_count} SMs"
                for index, gpu in enumerate(gpus)
            },
        },
        "libraries": {name: native.load_error(name) or "loaded" for name in ("_C", "_C_cuda")}
        | _host(),
    }


def missing() -> dict[str, str]:
    """Missing or untested package -> the reason, what needs it, and the command to install it."""
    found = {}
    for package, purpose in PACKAGES.items():
        installed, wanted = _version(package), requirement(package)
        if installed is None:
            why = "not installed"
        elif not Requirement(wanted).specifier.contains(installed, prereleases=True):
            why = f"{installed} is installed, tested with {wanted.removeprefix(package)}"
        else:
            continue
        found[package] = f'{why}; needed for {purpose}: `pip install "{wanted}"`'
    return found | _missing_for_gpus()


def _version(package: str) -> str | None:
    for name in (package, f"{package}-cpu"):  # such as vLLM's CPU build
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


def _missing_for_gpus() -> dict[str, str]:
    """What is missing to run the ops on a GPU, in the order to install."""
    if torch.version.cuda is None:
        build = f'pip install --force-reinstall "torch=={torch.__version__.partition("+")[0]}"'
        why = f"torch {torch.__version__} is installed; needed for GPUs: on Linux, from PyPI"
        return {"CUDA build of torch": f"{why}, `{build}`"}
    found = {}
    if not torch.cuda.is_available():
        found["GPU"] = "torch finds none: `nvidia-smi` lists the GPUs of the driver"
    if (error := native.load_error("_C_cuda")) is not None:
        return found | {"CUDA kernels": f"needed for GPUs: {error}"}
    errors = {index: native.device_error(index) for index in range(torch.cuda.device_count())}
    return found | {f"CUDA kernels for cuda:{index}": why for index, why in errors.items() if why}


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    named = re.search(r"^model name\s*:(.+)$", text, re.MULTILINE | re.IGNORECASE)
    return named[1].strip() if named else platform.processor() or platform.machine()


def _host() -> dict[str, str]:
    """The features of the CPU, and the level of its kernels."""
    try:
        from fusedrl import _host as host
    except ImportError as error:
        return {"_host": str(error)}
    try:
        level = host.cpu_level()
    except RuntimeError as error:
        level = f"none: {error}"
    features = [name for name, present in host.cpu_features().items() if present]
    return {
        "_host": "loaded",
        "built for": ", ".join(f"{key} {fact}" for key, fact in host.build_info().items() if fact),
        "cpu features": ", ".join(features) or "none beyond the baseline",
        "cpu levels": ", ".join(host.cpu_levels()),
        "cpu level": level,
        "FUSEDRL_CPU_LEVEL": os.environ.get("FUSEDRL_CPU_LEVEL") or "not set",
    }
