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

import fusedrl
from fusedrl import native
from fusedrl.cli.missing import missing

_PACKAGES = ("torchrl", "tensordict", "transformers", "triton", "numpy")
_PACKAGES += ("ray", "trl", "peft", "vllm")
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
            **{name: _version(name) for name in _PACKAGES},
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


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


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
        **_cpu_level(_host),
    }


def _cpu_level(host: Any) -> dict[str, str]:
    """The level of the CPU kernels, who chose it, and how it multiplies gradients in bfloat16."""
    best = host.cpu_levels()[-1]
    try:
        level = host.cpu_level()
    except RuntimeError as error:
        return {"cpu level": f"none: {error}"}
    if os.environ.get("FUSEDRL_CPU_LEVEL"):
        chosen = f"{level}, as FUSEDRL_CPU_LEVEL says; this CPU has up to {best}"
    else:
        chosen = f"{level}, the best of this CPU; FUSEDRL_CPU_LEVEL is not set"
    if level != "avx512_bf16":
        return {"cpu level": chosen}
    return {
        "cpu level": chosen,
        "gradients of bfloat16 heads": "with the errors of float32 products; after "
        'torch.set_float32_matmul_precision("medium") with those of plain torch, and faster',
    }


def _markdown(facts: dict[str, dict[str, Any]]) -> str:
    blocks = []
    for section, entries in facts.items():
        rows = "\n".join(f"| {name} | {_cell(value)} |" for name, value in entries.items())
        blocks.append(f"| {section} | |\n|---|---|\n{rows}")
    return "\n\n".join(blocks)


def _cell(value: Any) -> str:
    return " ".join(str(value).replace("|", "\\|").split())
