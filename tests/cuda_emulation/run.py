"""Run the CUDA kernels of all ops, compiled for the host, against the float64 reference.

``run.py LIBRARY`` loads the emulated ops in the place of ``_C``, so that the public functions call
them on CPU tensors. Each ``check_OP.py`` runs in a process of its own, and prints a line for every
comparison that passes, up to the first that fails.
"""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from pathlib import Path

import torch

from fusedrl import native


def run(op: str) -> None:
    for name, check in vars(importlib.import_module(f"check_{op}")).items():
        if name.startswith("check_"):
            torch.manual_seed(0)
            check()
            print(f"{op}: {name} passed", flush=True)


def main(library: str) -> None:
    native.find = lambda name: Path(library)
    native.require("_C")
    from fusedrl.ops.token_kl import columns  # whose import loads the library

    columns._kernels = lambda: None  # tensors' memory is for the CPU's own kernels
    forking = multiprocessing.get_context("fork")  # imports under a sanitizer take seconds
    for path in sorted(Path(__file__).parent.glob("check_*.py")):
        process = forking.Process(target=run, args=(path.stem.removeprefix("check_"),))
        process.start()
        process.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
