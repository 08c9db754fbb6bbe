"""Run the compiled CUDA kernels of all ops, interpreted, against the float64 reference.

``python -m ptx.run HOST PTX`` loads the ops' host code in the place of ``_C``, so that the public
functions launch kernels on CPU tensors. Each ``check_OP.py`` runs in a process of its own, and
prints a line of JSON for every check that passes, up to the first that fails: with the basic blocks
of each kernel that it has executed.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from ptx.launches import Interpreter, kernels_of

from fusedrl import native

OPS = sorted(path.stem.removeprefix("check_") for path in Path(__file__).parent.glob("check_*.py"))


def load(host: str, ptx: str) -> Interpreter:
    torch.set_num_threads(1)
    interpreter = Interpreter(Path(host), kernels_of(Path(ptx).read_text()))
    native.find = lambda name: Path(host)
    native.require("_C")
    from fusedrl.ops.token_kl import columns  # whose import loads the library

    columns._kernels = lambda: None  # tensors' memory is for the CPU's own kernels
    torch.testing.assert_close(torch.zeros(1), torch.zeros(1))  # imports for seconds, here for all
    return interpreter


def checks_of(op: str) -> dict[str, Callable[[], None]]:
    written = vars(importlib.import_module(f"ptx.check_{op}"))
    return {name: check for name, check in written.items() if name.startswith("check_")}


def run(op: str, interpreter: Interpreter) -> None:
    for name, check in checks_of(op).items():
        for program in interpreter.programs.values():
            program.visited.clear()
        started = time.process_time()
        torch.manual_seed(0)
        check()
        seconds = round(time.process_time() - started, 2)
        kernels = {name: sorted(p.visited) for name, p in interpreter.programs.items() if p.visited}
        print(json.dumps({"op": op, "check": name, "seconds": seconds, "kernels": kernels}))


def main(host: str, ptx: str) -> None:
    interpreter = load(host, ptx)
    forking = multiprocessing.get_context("fork")
    for op in OPS:
        process = forking.Process(target=run, args=(op, interpreter))
        process.start()
        process.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
