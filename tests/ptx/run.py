"""Run the compiled CUDA kernels of all ops, interpreted, against the float64 reference.

``run.py HOST PTX [OP...]`` loads the ops' host code in the place of ``_C``, so that the public
functions launch kernels on CPU tensors. Each ``check_OP.py`` runs in a process of its own, and
prints a line for every comparison that passes, up to the first that fails, and then how much of
each kernel was executed.
"""

from __future__ import annotations

import importlib
import multiprocessing
import sys
import time
from pathlib import Path

import torch
from launches import Interpreter, kernels_of

from fusedrl import native


def load(host: str, ptx: str) -> Interpreter:
    interpreter = Interpreter(Path(host), kernels_of(Path(ptx).read_text()))
    native.find = lambda name: Path(host)
    native.require("_C")
    from fusedrl.ops.token_kl import columns  # whose import loads the library

    columns._kernels = lambda: None  # tensors' memory is for the CPU's own kernels
    return interpreter


def run(op: str, interpreter: Interpreter) -> None:
    for name, check in vars(importlib.import_module(f"check_{op}")).items():
        if name.startswith("check_"):
            started = time.perf_counter()
            torch.manual_seed(0)
            check()
            print(f"{op}: {name} passed {time.perf_counter() - started:.1f} s", flush=True)
    for name, program in interpreter.programs.items():
        print(f"executed {name} {len(program.visited)} of {len(program.blocks)}", flush=True)


def main(host: str, ptx: str, *ops: str) -> None:
    interpreter = load(host, ptx)
    forking = multiprocessing.get_context("fork")
    for path in sorted(Path(__file__).parent.glob("check_*.py")):
        if ops and path.stem.removeprefix("check_") not in ops:
            continue
        process = forking.Process(target=run, args=(path.stem.removeprefix("check_"), interpreter))
        process.start()
        process.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
