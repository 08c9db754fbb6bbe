"""PTX as text, taken apart: kernels, their parameters, shared variables and instructions."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}


class Instruction(NamedTuple):
    """``@%p1 ld.global.f32 %f1, [%rd1+4]``; a guard ``!%p1`` is where the predicate is false."""

    opcode: str
    operands: tuple[str, ...]
    guard: str = ""

    def __str__(self) -> str:
        guard = f"@{self.guard} " if self.guard else ""
        return f"{guard}{self.opcode} {', '.join(self.operands)}"


class Variable(NamedTuple):
    """Where a parameter or an array lies in its space, in bytes."""

    offset: int
    size: int
    value: bytes = b""


@dataclass
class Kernel:
    """One ``.entry``. Labels name the instruction that follows them."""

    name: str
    params: dict[str, Variable]
    shared: dict[str, Variable]
    constants: dict[str, Variable]
    registers: dict[str, str] = field(default_factory=dict)  # the type of each, such as b32
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    @cached_property
    def blocks(self) -> list[range]:
        """What runs one after the other, once the threads that the first one waits for are there.

        A barrier waits for those of a block, and a shuffle for those of a warp, which stay together
        up to the next branch.
        """
        starts, together = {0, *self.labels.values()}, False
        for i, instruction in enumerate(self.code):
            name = instruction.opcode.split(".")[0]
            together &= i not in starts
            if name == "bar" or (name == "shfl" and not together):
                starts.add(i)
                together = True
            elif name in ("bra", "ret"):
                starts.add(i + 1)
        ends = sorted({*starts, len(self.code)})
        return [range(*both) for both in itertools.pairwise(ends) if both[1] <= len(self.code)]

    def target(self, branch: Instruction) -> int:
        """The block that it leads to."""
        at = self.labels[branch.operands[0]]
        return next(i for i, block in enumerate(self.blocks) if block.start == at)


_VARIABLE = re.compile(
    r"\.(param|shared|global|const)\s+(?:\.attribute\(.*?\)\s+)?(?:\.align\s+(\d+)\s+)?"
    r"\.[a-z]+(\d+)\s+(?:\.ptr\s+(?:\.(?!align)\w+\s+)*(?:\.align\s+\d+\s+)?)?"
    r"([\w$]+)(?:\[(\d*)\])?(?:\s*=\s*\{([^}]*)\})?"
)
_GUARD = re.compile(r"@(!?%\w+)\s+")
_GAP = 64  # between shared variables, so that an access beyond one is none of the next


def variables(text: str, space: str, gap: int = 0, start: int = 0) -> dict[str, Variable]:
    """The variables of a space that a piece of text declares, laid out one behind the other."""
    found, end = {}, start
    for kind, align, bits, name, count, value in _VARIABLE.findall(text):
        if kind != space:
            continue
        size = SIZES[bits] * int(count or 1)
        align = max(int(align or 1), SIZES[bits])
        offset = math.ceil(end / align) * align
        found[name] = Variable(offset, size, bytes(int(x) for x in value.split(",") if x.strip()))
        end = offset + size + gap
    return found


def kernels(text: str) -> Iterator[Kernel]:
    """Those of one module."""
    text = re.sub(r"//.*|^\s*\.loc\b.*", "", text, flags=re.MULTILINE)
    entries = list(re.finditer(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)", text))
    outside, bodies, end = [], [], 0
    for entry in entries:
        start = text.index("{", entry.end())
        outside.append(text[end : entry.start()])
        end = _closing(text, start)
        bodies.append(text[start + 1 : end - 1])
    around = "".join([*outside, text[end:]])
    shared, constants = variables(around, "shared", _GAP), variables(around, "global")
    last = max((v.offset + v.size for v in shared.values()), default=0) + _GAP
    for entry, body in zip(entries, bodies, strict=True):
        own = variables(body, "shared", _GAP, math.ceil(last / 16) * 16)
        kernel = Kernel(entry[1], variables(entry[2], "param"), {**shared, **own}, constants)
        for statement in _statements(body):
            _add(kernel, statement)
        yield kernel


def _closing(text: str, start: int) -> int:
    depth = 0
    for brace in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.end()
    raise ValueError("a body without an end")


def _statements(body: str) -> Iterator[str]:
    """Labels with their colon, and what ends with a semicolon, without the braces of scopes."""
    pattern = re.compile(r"\s*(?:[{}]|([\w$]+:)|([^;]*);)", re.DOTALL)
    for match in pattern.finditer(body.rstrip()):
        if match[1] or match[2]:
            yield " ".join((match[1] or match[2]).split())


def _add(kernel: Kernel, statement: str) -> None:
    if statement.endswith(":"):
        kernel.labels[statement[:-1]] = len(kernel.code)
    elif statement.startswith(".reg"):
        kind, names = re.fullmatch(r"\.reg \.(\w+) (.*)", statement).groups()
        for name in names.split(","):
            prefix, count = re.fullmatch(r"\s*([%\w]+)(?:<(\d+)>)?\s*", name).groups()
            each = [prefix] if count is None else [f"{prefix}{i}" for i in range(int(count))]
            kernel.registers.update(dict.fromkeys(each, kind))
    elif not statement.startswith("."):
        guard = _GUARD.match(statement)
        opcode, _, operands = statement[guard.end() if guard else 0 :].partition(" ")
        parts = re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|\([^)]*\)|[^,\s])+", operands)
        kernel.code.append(Instruction(opcode, tuple(parts), guard[1] if guard else ""))
