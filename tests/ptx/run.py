"""Run the compiled CUDA kernels of all ops, interpreted, against the float64 reference.

``python -m ptx.run HOST PTX`` loads the ops' host code in the place of ``_C``, so that the public
functions launch kernels on CPU tensors. It calls the checks of every ``check_OP.py``, one on each
core, and prints a line of JSON for each that passes: with the basic blocks of each kernel that it
has executed. What becomes of the others is on stderr.
"""

from __future__ import annotations

import functools
import importlib
import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from ptx.launches import Interpreter, kernels_of

from fusedrl import native

OPS = sorted(path.stem.removeprefix("check_") for path in Path(__file__).parent.glob("check_*.py"))


@functools.cache  # so that processes that are forked have it
def load(host: str, ptx: str) -> Interpreter:
    torch.set_num_threads(1)
    interpreter = Interpreter(Path(host), kernels_of(Path(ptx).read_text()))
    native.find = lambda name: Path(host)
    native.require("_C")
    torch.testing.assert_close(torch.zeros(1), torch.zeros(1))  # imports for seconds, here for all
    return interpreter


def checks_of(op: str) -> dict[str, Callable[[], None]]:
    written = vars(importlib.import_module(f"ptx.check_{op}"))
    return {name: check for name, check in written.items() if name.startswith("check_")}


def run(host: str, ptx: str, op: str, check: str) -> str:
    programs = load(host, ptx).programs
    for program in programs.values():
        program.visited.clear()
    torch.manual_seed(0)
    checks_of(op)[check]()
    kernels = {name: sorted(p.visited) for name, p in programs.items() if p.visited}
    return json.dumps({"op": op, "check": check, "kernels": kernels})


def main(host: str, ptx: str) -> None:
    load(host, ptx)
    checks = [(op, check) for op in OPS for check in checks_of(op)]
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("fork")) as pool:
        for done in [pool.submit(run, host, ptx, *check) for check in checks]:
            if (error := done.exception()) is None:
                print(done.result(), flush=True)
            else:
                traceback.print_exception(error)


if __name__ == "__main__":
    main(*sys.argv[1:])
