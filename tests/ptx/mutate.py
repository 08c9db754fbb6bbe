"""Break kernels at random places, and count which of the changes the checks let pass.

``python -m ptx.mutate HOST PTX COUNT SEED`` reads what ``ptx.run`` prints, and prints a line of
JSON for each change: what it was, and whether all checks passed. Only what some check executes is
changed; of the checks, those that execute the instruction are tried, the quickest first.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from ptx.launches import Interpreter
from ptx.machine import Program
from ptx.program import Instruction, Kernel
from ptx.run import load, processes, run

Change = Callable[[Instruction], Instruction | None]  # None where it does not apply

NOTHING = Instruction("mov.pred", ("%nothing", "0"))


class Mutant(NamedTuple):
    what: str
    kernel: str
    at: int
    now: Instruction
    checks: list[tuple[str, str]]  # that execute the instruction, the quickest first


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


# What has an effect beside the register that it writes. Loads may be faults.
EFFECTS = ("ld", "st", "cp", "atom", "bra", "bar", "call", "ret")


def registers(*operands: str) -> set[str]:
    return set(re.findall(r"%\w+", " ".join(operands)))


def live(kernel: Kernel) -> set[int]:
    """The instructions on whose results an effect depends, and those that have one."""
    found, needed, before = set[int](), set[str](), -1
    while len(found) > before:
        before = len(found)
        for at in reversed(range(len(kernel.code))):
            opcode, operands, guard = kernel.code[at]
            if opcode.startswith(EFFECTS) or registers(operands[0]) & needed:
                found.add(at)
                needed |= registers(*operands, guard)
    return found


def is_only_quicker(kernel: Kernel, at: int, now: Instruction) -> bool:
    """Whether a branch leads to what its other side computes too, with more instructions.

    nvcc divides by 32 bits what is below 2^32, as everything is here. And ``merge`` in
    ``softmax.h`` adds 0 if it does not leave out the lower of two parts, which it has selected, of
    which all is -inf.
    """

    def origin(register: str) -> Instruction:
        return next((x for x in kernel.code[at::-1] if x.operands[:1] == (register,)), NOTHING)

    condition = origin(kernel.code[at].guard.lstrip("!"))
    if not re.fullmatch(r"setp\.(eq|ne)\.\w+ .*, 0([fd]0+)?", str(condition)):
        return False
    compared = origin(condition.operands[1])
    divides = compared.opcode == "and.b64" and compared.operands[-1] == str(-(2**32))
    return divides or (compared.opcode.startswith("selp.f") and now == NOTHING)


def mutants(interpreter: Interpreter, known: list[dict], seed: int) -> Iterator[Mutant]:
    """Each kind of change as often as the others, in every kernel before the first comes again."""
    draw = random.Random(seed)
    waiting = draw.sample(sorted(interpreter.kernels), len(interpreter.kernels))
    known = sorted(known, key=lambda one: one["seconds"])
    for what, change in itertools.cycle(CHANGES.items()):
        for name in waiting:
            if places := changes_of(interpreter.kernels[name], change, known):
                break
        else:
            raise ValueError(f"{what}: nowhere")
        waiting.remove(name)
        waiting.append(name)
        place, at, now = draw.choice(places)
        checks = [
            (one["op"], one["check"]) for one in known if place in one["kernels"].get(name, [])
        ]
        yield Mutant(what, name, at, now, checks)


def changes_of(
    kernel: Kernel, change: Change, known: list[dict]
) -> list[tuple[int, int, Instruction]]:
    """Where a kernel can be changed, by block and instruction, and to what."""
    depended_on = live(kernel)
    executed = {place for one in known for place in one["kernels"].get(kernel.name, [])}
    return [
        (place, at, now)
        for place in sorted(executed)
        for at in kernel.blocks[place]
        if at in depended_on and (now := change(kernel.code[at]))
        if not is_only_quicker(kernel, at, now)
    ]


def survives(host: str, ptx: str, mutant: Mutant) -> bool:
    """Whether all checks pass."""
    interpreter = load(host, ptx)
    kernel = interpreter.kernels[mutant.kernel]
    code = [mutant.now if at == mutant.at else x for at, x in enumerate(kernel.code)]
    broken = replace(kernel, code=code, registers={**kernel.registers, "%nothing": "pred"})
    interpreter.programs[kernel.name] = Program(broken)
    try:
        for op, check in mutant.checks:
            run(host, ptx, op, check)
    except Exception:
        return False
    finally:
        del interpreter.programs[kernel.name]
    return True


def main(host: str, ptx: str, count: str, seed: str) -> None:
    interpreter = load(host, ptx)
    known = [json.loads(line) for line in sys.stdin if line.startswith("{")]
    drawn = list(itertools.islice(mutants(interpreter, known, int(seed)), int(count)))
    with processes() as pool:
        for one, survived in zip(
            drawn, pool.map(functools.partial(survives, host, ptx), drawn), strict=True
        ):
            was = str(interpreter.kernels[one.kernel].code[one.at])
            line = {"what": one.what, "survived": survived, "kernel": one.kernel}
            line |= {"at": one.at, "was": was, "now": str(one.now)}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
