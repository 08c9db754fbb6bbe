"""Break kernels at random places, and count which of them the checks let pass.

``python -m ptx.mutate HOST PTX COUNT [SEED]`` reads what ``ptx.run`` prints, and prints a line of JSON for each: what was changed, and whether a
check failed. The checks that launch a kernel are tried one after the other, the quickest first.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr

import torch
from ptx.launches import Interpreter
from ptx.program import Instruction
from ptx.run import checks_of, load

_SIZE = re.compile(r"\.(?:v(\d)\.)?[busf](\d+)$")
_REVERSED = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}
_OFF_BY_ONE = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt"}
_OTHER = {"add": "sub", "sub": "add", "min": "max", "max": "min", "and": "or", "or": "and"}


def _shifted(instruction: Instruction) -> Instruction | None:
    """An access one element further."""
    name, space, *_ = instruction.opcode.split(".")
    if name not in ("ld", "st") or space not in ("global", "shared"):
        return None
    count, bits = _SIZE.search(instruction.opcode).groups()
    size = int(bits) // 8 * int(count or 1)
    at = 1 if name == "ld" else 0
    operands = list(instruction.operands)
    base, _, offset = operands[at].strip("[]").partition("+")
    operands[at] = f"[{base}+{int(offset or 0) + size}]"
    return instruction._replace(operands=tuple(operands))


def _compared(names: dict[str, str]) -> Callable[[Instruction], Instruction | None]:
    def change(instruction: Instruction) -> Instruction | None:
        name, compare, *rest = instruction.opcode.split(".")
        if name != "setp" or compare not in names:
            return None
        return instruction._replace(opcode=".".join([name, names[compare], *rest]))

    return change


def _computed(instruction: Instruction) -> Instruction | None:
    name, *rest = instruction.opcode.split(".")
    if name not in _OTHER:
        return None
    return instruction._replace(opcode=".".join([_OTHER[name], *rest]))


def _shuffled(instruction: Instruction) -> Instruction | None:
    if not instruction.opcode.startswith("shfl"):
        return None
    to, source, distance, *rest = instruction.operands
    other = "1" if distance == "2" else "2"
    return instruction._replace(operands=(to, source, other, *rest))


def _unguarded(instruction: Instruction) -> Instruction | None:
    return instruction._replace(guard="") if instruction.guard else None


NOTHING = Instruction("mov.pred", ("%nothing", "0"))


def _dropped(*names: str) -> Callable[[Instruction], Instruction | None]:
    return lambda x: NOTHING if x.opcode.split(".")[0] in names else None


CHANGES: dict[str, Callable[[Instruction], Instruction | None]] = {
    "a barrier removed": _dropped("bar"),
    "an access one element further": _shifted,
    "a branch always taken": _unguarded,
    "a branch never taken": lambda x: _dropped("bra")(x) if x.guard else None,
    "a shuffle of another lane": _shuffled,
    "a comparison reversed": _compared(_REVERSED),
    "a comparison off by one": _compared(_OFF_BY_ONE),
    "another operation": _computed,
    "a store removed": _dropped("st"),
}


def _checks(interpreter: Interpreter, names: list[tuple[str, str]]) -> None:
    found = {(op, name): check for op in {op for op, _ in names} for name, check in checks_of(op)}
    for name in names:
        torch.manual_seed(0)
        found[name]()


def survives(interpreter: Interpreter, kernel: str, at: int, new: Instruction, names) -> bool:
    """Whether all checks pass, in a process of its own."""

    def tried() -> None:
        changed = interpreter.kernels[kernel]
        changed.code[at] = new
        changed.registers["%nothing"] = "pred"
        with open(os.devnull, "w") as nothing, redirect_stderr(nothing):  # noqa: PTH123
            _checks(interpreter, names)

    process = multiprocessing.get_context("fork").Process(target=tried)
    process.start()
    process.join()
    return process.exitcode == 0


def mutants(interpreter: Interpreter, seed: int) -> Iterator[tuple[str, str, int, Instruction]]:
    """Each kind of change as often as the others; the kernel, the place, the new instruction."""
    draw = random.Random(seed)
    while True:
        for what, change in CHANGES.items():
            while True:
                kernel = draw.choice(list(interpreter.kernels.values()))
                at = draw.randrange(len(kernel.code))
                new = (
                    None
                    if kernel.code[at].opcode.startswith("st.param")
                    else change(kernel.code[at])
                )
                if new is not None:
                    yield what, kernel.name, at, new
                    break


def main(host: str, ptx: str, count: str, seed: str = "0") -> None:
    interpreter = load(host, ptx)
    known = [json.loads(line) for line in sys.stdin if line.startswith("{")]
    known.sort(key=lambda one: one["seconds"])
    for _, (what, kernel, at, new) in zip(
        range(int(count)), mutants(interpreter, int(seed)), strict=False
    ):
        names = [(one["op"], one["check"]) for one in known if kernel in one["kernels"]]
        survived = survives(interpreter, kernel, at, new, names)
        place = f"{at}: {interpreter.kernels[kernel].code[at]}"
        line = {"what": what, "survived": survived, "kernel": kernel, "at": place, "now": str(new)}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
