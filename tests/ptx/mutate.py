"""Break kernels at random places, and count which of the changes the checks let pass.

``python -m ptx.mutate HOST PTX COUNT SEED`` reads what ``ptx.run`` prints, and prints a line of
JSON for each change: what it was, and whether all checks passed. Only what some check executes is
changed; of the checks, those that execute the instruction are tried, the quickest first.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import random
import re
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from ptx.launches import Interpreter
from ptx.program import Instruction, Kernel
from ptx.run import checks_of, load

Change = Callable[[Instruction], Instruction | None]  # None where it does not apply

NOTHING = Instruction("mov.pred", ("%nothing", "0"))


class Mutant(NamedTuple):
    what: str
    kernel: Kernel
    at: int
    new: Instruction
    checks: list[dict]  # that execute the instruction


def dropped(*opcodes: str) -> Change:
    return lambda x: NOTHING if x.opcode.startswith(opcodes) else None


def renamed(pattern: str, names: dict[str, str]) -> Change:
    """Another word in the opcode: the one that the pattern finds."""

    def change(instruction: Instruction) -> Instruction | None:
        found = re.match(pattern, instruction.opcode)
        if found is None or found[1] not in names:
            return None
        start, end = found.span(1)
        opcode = instruction.opcode
        return instruction._replace(opcode=opcode[:start] + names[found[1]] + opcode[end:])

    return change


def shifted(instruction: Instruction) -> Instruction | None:
    access = re.match(r"(ld|st)\.(global|shared)\.(?:.*v(\d))?.*?(\d+)$", instruction.opcode)
    if access is None:
        return None
    size = int(access[4]) // 8 * int(access[3] or 1)
    operands = list(instruction.operands)
    at = 1 if access[1] == "ld" else 0
    base, _, offset = operands[at].strip("[]").partition("+")
    operands[at] = f"[{base}+{int(offset or 0) + size}]"
    return instruction._replace(operands=tuple(operands))


REVERSED = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}
CHANGES: dict[str, Change] = {
    "a barrier removed": dropped("bar"),
    "an access one element further": shifted,
    "a store removed": dropped("st.global", "st.shared"),
    "a branch always taken": lambda x: x._replace(guard="") if x.guard else None,
    "a branch never taken": lambda x: dropped("bra")(x) if x.guard else None,
    "a shuffle of another lane": renamed(r"shfl\.sync\.(\w+)", {"down": "up"}),
    "a comparison reversed": renamed(r"setp\.(\w+)", REVERSED),
    # Of whole numbers: which of two equal floats is the larger one makes no difference.
    "an order with or without its equal": renamed(
        r"setp\.(\w+)\.[su]", {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt"}
    ),
    "another operation": renamed(
        r"(\w+)", {"add": "sub", "sub": "add", "min": "max", "max": "min", "and": "or", "or": "and"}
    ),
}


def makes_a_difference(kernel: Kernel, at: int, new: Instruction, executed: set[int]) -> bool:
    """Whether a change can: not of a branch of which one side is never executed.

    Nor if a branch that leaves out what would add 0, as where parts of a softmax are merged, is
    never taken, nor of a shuffle by 16 lanes: at most 16 warps are merged after each has merged
    its lanes, and the value that comes from further away is neutral.
    """
    old = kernel.code[at]
    if old.opcode.startswith("shfl"):
        distance = old.operands[2]
        written = (x.operands[1] for x in kernel.code[at::-1] if x.operands[:1] == (distance,))
        return next(written, distance) != "16"
    if old.opcode != "bra":
        return True
    place = next(i for i, block in enumerate(kernel.blocks) if at in block)
    condition = next((x for x in kernel.code[at::-1] if x.operands[:1] == (old.guard,)), old)
    adds_nothing = re.fullmatch(r"setp\.eq\.f.. .*, 0[fd]0+", str(condition))
    return {kernel.target(old), place + 1} <= executed and not (new is NOTHING and adds_nothing)


def mutants(interpreter: Interpreter, known: list[dict], seed: int) -> Iterator[Mutant]:
    """Each kind of change as often as the others, in every kernel before the first comes again."""
    draw = random.Random(seed)
    waiting = draw.sample(sorted(interpreter.kernels), len(interpreter.kernels))
    known = sorted(known, key=lambda one: one["seconds"])
    for what, change in itertools.cycle(CHANGES.items()):
        for name in waiting:
            kernel = interpreter.kernels[name]
            executed = {place for one in known for place in one["kernels"].get(name, [])}
            places = [
                (place, at)
                for place in sorted(executed)
                for at in kernel.blocks[place]
                if (new := change(kernel.code[at]))
                and makes_a_difference(kernel, at, new, executed)
            ]
            if places:
                break
        else:
            raise ValueError(f"{what}: nowhere")
        waiting.remove(name)
        waiting.append(name)
        place, at = draw.choice(places)
        checks = [one for one in known if place in one["kernels"].get(name, [])]
        yield Mutant(what, kernel, at, change(kernel.code[at]), checks)


def survives(mutant: Mutant) -> bool:
    """Whether all checks pass, in a process of its own."""

    def tried() -> None:
        mutant.kernel.code[mutant.at] = mutant.new
        del mutant.kernel.blocks  # a barrier that is none ends no block
        mutant.kernel.registers["%nothing"] = "pred"
        try:
            for one in mutant.checks:
                torch.manual_seed(0)
                checks_of(one["op"])[one["check"]]()
        except Exception:
            sys.exit(1)

    process = multiprocessing.get_context("fork").Process(target=tried)
    process.start()
    process.join()
    return process.exitcode == 0


def main(host: str, ptx: str, count: str, seed: str) -> None:
    interpreter = load(host, ptx)
    known = [json.loads(line) for line in sys.stdin if line.startswith("{")]
    for one in itertools.islice(mutants(interpreter, known, int(seed)), int(count)):
        line = {"what": one.what, "survived": survives(one), "kernel": one.kernel.name}
        line |= {"at": one.at, "was": str(one.kernel.code[one.at]), "now": str(one.new)}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
