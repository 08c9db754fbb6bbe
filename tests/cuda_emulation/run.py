"""Run the CUDA kernels of one op, compiled for the host, against the float64 reference.

``run.py LIBRARY OP`` loads the emulated ops in the place of ``_C``, so that the public functions
call them on CPU tensors, and exits with the first failing comparison of ``check_OP.py``.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch

from fusedrl import native


def main(library: str, op: str) -> None:
    native.find = lambda name: Path(library)
    checks = importlib.import_module(f"check_{op}")  # whose imports load the library
    for name, check in vars(checks).items():
        if not name.startswith("check_"):
            continue
        torch.manual_seed(0)
        check()
        print(f"{name}: passed", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
