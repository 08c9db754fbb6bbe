"""Executes a kernel: all threads of all blocks at once, each a lane of numpy's arrays.

Lanes that have come to different places take turns, those that are behind first. A lane waits at a
barrier until all threads of its block are there, and at a shuffle for those of its warp; where some
never come, that is a fault.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
from ptx.instructions import BITS, TYPES, Array, constant, operation
from ptx.memory import Access, Fault, Memory
from ptx.program import Instruction, Kernel

WARP = 32
_MOST_STEPS = 50_000  # basic blocks
Step = Callable[["Lanes"], None]
Operand = Callable[["Lanes"], Array]


class Stopped(Exception):
    """A kernel's own check has failed; its message."""


class Block(list[tuple[Instruction, Step]]):
    """Instructions that run one after the other, and where they lead."""

    waits_for: int | None = None  # 0 for the whole block, WARP for a warp
    then: int = 0


class Lanes:
    """Where each thread is, and its registers: an array of one element where all have the same."""

    def __init__(self, program: Program, blocks: int, threads: int, memory: Memory) -> None:
        if threads % WARP:
            raise Fault(f"{threads} threads to a block: no whole warps")
        self.count, self.threads = blocks * threads, threads
        self.program, self.memory = program, memory
        self.registers = list(program.zeros)
        self.arguments: dict[str, Array] = {}  # of the function that is called next
        self.at = np.zeros(self.count, np.int32)
        self.barriers = np.zeros(self.count, np.int32)
        self.lanes = np.arange(self.count, dtype=np.int32)
        self.living = self.count
        self.activate(np.full(self.count, True))
        self.special = {
            "%tid.x": (self.lanes % threads).astype(np.uint32),
            "%ctaid.x": (self.lanes // threads).astype(np.uint32),
            "%ntid.x": np.array([threads], np.uint32),
            "%nctaid.x": np.array([blocks], np.uint32),
        }

    def activate(self, active: Array) -> None:
        self.active = active
        self.indices = np.flatnonzero(active)
        self.everyone = len(self.indices) == self.living

    def put(self, register: int, bits: Array) -> None:
        """Writes a register of the active lanes."""
        old = self.registers[register]
        bits = bits if bits.dtype == old.dtype else bits.astype(old.dtype)
        self.registers[register] = bits if self.everyone else np.where(self.active, bits, old)

    def of_active(self, bits: Array) -> Array:
        return np.broadcast_to(bits, self.count)[self.indices]

    def spread(self, values: Array) -> Array:
        """The reverse of ``of_active``."""
        result = np.zeros((self.count, *values.shape[1:]), values.dtype)
        result[self.indices] = values
        return result

    def access(self) -> Access:
        block = self.indices // self.threads
        return Access(self.indices + block, block, self.barriers[self.indices], self.threads + 1)

    def run(self) -> None:
        blocks = self.program.blocks
        with np.errstate(all="ignore"):
            for _ in range(_MOST_STEPS):
                if (place := self.next_place()) is None:
                    return
                block = blocks[place]
                self.program.visited.add(place)
                self.at[self.indices] = block.then
                for instruction, step in block:
                    try:
                        step(self)
                    except Fault as fault:
                        name = self.program.kernel.name
                        raise Fault(f"{name}: {instruction}: {fault}") from None
        raise Fault(f"{self.program.kernel.name}: no end")

    def next_place(self) -> int | None:
        """Chooses the lanes that are behind all others, but for those that wait."""
        if self.everyone and self.living == self.count:
            place = int(self.at[0])
            if place >= 0 and (self.at == place).all():
                return place
        place = -1
        while True:
            later = self.at[self.at > place]
            if not len(later):
                break
            place = int(later.min())
            here = self.at == place
            group = self.program.blocks[place].waits_for
            if group is not None:
                groups = here.reshape(-1, group or self.threads)
                here = np.repeat(groups.all(1), groups.shape[1])
                if not here.any():
                    continue
            self.living = np.count_nonzero(self.at >= 0)
            self.activate(here)
            return place
        if place >= 0:
            raise Fault("a barrier that not all threads meet")
        return None


def _listed(text: str) -> list[str]:
    """What stands in braces, or on both sides of a bar, or one operand."""
    return re.findall(r"[^{}|,\s]+", text)


class Program:
    """A kernel with each instruction bound to what executes it."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.index = {name: i for i, name in enumerate(kernel.registers)}
        self.kinds = [TYPES[re.sub("^[suf]", "b", kind)] for kind in kernel.registers.values()]
        self.zeros = [np.zeros(1, kind) for kind in self.kinds]
        self.visited: set[int] = set()
        self.blocks = self._blocks()

    def _blocks(self) -> list[Block]:
        blocks = []
        for i, places in enumerate(self.kernel.blocks):
            block = Block()
            block.then = i + 1 if places.stop < len(self.kernel.code) else -1
            code = self.kernel.code[places.start : places.stop]
            block.extend((instruction, self._step(instruction)) for instruction in code)
            block.waits_for = {"bar": 0, "shfl": WARP}.get(code[0].opcode.split(".")[0])
            blocks.append(block)
        return blocks

    def _step(self, instruction: Instruction) -> Step:
        name = instruction.opcode.split(".")[0]
        make = getattr(self, f"_{name}", self._value)
        step = make(instruction)
        if instruction.guard and name != "bra":
            if name in ("bar", "shfl"):
                raise NotImplementedError(f"{instruction}: only some threads of a warp")
            return self._guarded(step, self.guard(instruction.guard))
        return step

    # Operands.

    def guard(self, text: str) -> Operand:
        register = self.index[text.lstrip("!")]
        if text.startswith("!"):
            return lambda lanes: ~lanes.registers[register]
        return lambda lanes: lanes.registers[register]

    def operand(self, text: str, kind: str) -> Operand:
        """The values of a register, a constant or a variable's address, in a type."""
        dtype = TYPES[kind]
        if text in self.index:
            register, size = self.index[text], np.dtype(dtype).itemsize
            if np.dtype(self.kinds[register]).itemsize == size:
                return lambda lanes: lanes.registers[register].view(dtype)
            return lambda lanes: lanes.registers[register].astype(BITS[size]).view(dtype)
        if text.startswith("%"):
            return lambda lanes: lanes.special[text].astype(dtype)
        for variables in (self.kernel.params, self.kernel.shared, self.kernel.constants):
            if text in variables:
                return lambda lanes: np.array([variables[text].offset], dtype)
        value = constant(text, kind).view(dtype)
        return lambda lanes: value

    def address(self, text: str) -> Operand:
        base, _, offset = (part.strip() for part in text.strip("[]").partition("+"))
        distance = np.uint64(int(offset or "0") & (2**64 - 1))
        if base in self.index and self.kinds[self.index[base]] is np.uint32:
            narrow, part = self.operand(base, "u32"), distance.astype(np.uint32)
            return lambda lanes: (narrow(lanes) + part).astype(np.uint64)
        start = self.operand(base, "u64")
        return lambda lanes: start(lanes) + distance

    def destinations(self, text: str) -> list[int | None]:
        return [self.index.get(name) for name in _listed(text)]

    # Instructions.

    def _value(self, instruction: Instruction) -> Step:
        does = operation(instruction.opcode)
        to, *texts = instruction.operands
        sources = [self.operand(x, kind) for x, kind in zip(texts, does.sources, strict=True)]
        register, function = self.index[to], does.function
        bits = BITS[np.dtype(TYPES[does.result]).itemsize] if does.result != "pred" else np.bool_
        signed = does.result[0] == "s"

        def step(lanes: Lanes) -> None:
            result = function(*[source(lanes) for source in sources])
            lanes.put(register, result if signed else result.view(bits))

        return step

    def _mov(self, instruction: Instruction) -> Step:
        """Also of several registers into one, and the reverse."""
        to, source = instruction.operands
        if "{" not in to + source:
            return self._value(instruction)
        size = int(instruction.opcode.split(".")[1][1:]) // 8
        parts = self.destinations(to if "{" in to else source)
        each = size // len(parts)
        if "{" in source:
            register = self.index[to]
            values = [self.operand(x, f"b{8 * each}") for x in _listed(source)]

            def pack(lanes: Lanes) -> None:
                columns = np.broadcast_arrays(*[value(lanes) for value in values])
                lanes.put(register, np.stack(columns, -1).view(BITS[size])[:, 0])

            return pack
        whole = self.operand(source, f"b{8 * size}")

        def unpack(lanes: Lanes) -> None:
            pieces = np.ascontiguousarray(whole(lanes)).view(BITS[each]).reshape(-1, len(parts))
            for register, piece in zip(parts, pieces.T, strict=True):
                if register is not None:
                    lanes.put(register, piece)

        return unpack

    def _ld(self, instruction: Instruction) -> Step:
        _, space, *flags = instruction.opcode.split(".")
        to, place = instruction.operands
        kind, registers, address = flags[-1], self.destinations(to), self.address(place)
        size, cached = np.dtype(TYPES[kind]).itemsize, "nc" in flags

        def step(lanes: Lanes) -> None:
            at = address(lanes)
            same = space == "param" and len(at) == 1  # in every lane, as its value is
            what = (len(registers), size, lanes.access())
            if same:
                taken = lanes.memory.load(space, at, *what, cached=cached)
            else:
                taken = lanes.memory.load(space, lanes.of_active(at), *what, cached=cached)
                taken = lanes.spread(taken)
            for register, column in zip(registers, taken.T, strict=True):
                if register is not None:
                    lanes.put(register, column.view(TYPES[kind]) if kind[0] == "s" else column)

        return step

    def _st(self, instruction: Instruction) -> Step:
        _, space, *flags = instruction.opcode.split(".")
        place, source = instruction.operands
        kind = flags[-1]
        values = [self.operand(x, "b" + kind[1:]) for x in _listed(source)]
        if space == "param":  # of a call
            name = place.strip("[]").split("+")[0]
            return lambda lanes: lanes.arguments.update({name: lanes.of_active(values[0](lanes))})
        address = self.address(place)

        def step(lanes: Lanes) -> None:
            columns = [lanes.of_active(value(lanes)) for value in values]
            at = lanes.of_active(address(lanes))
            lanes.memory.store(space, at, np.stack(columns, -1), lanes.access())

        return step

    def _atom(self, instruction: Instruction) -> Step:
        """One lane after the other; a lane that accesses the same place otherwise is in a race."""
        _, space, what, kind = instruction.opcode.split(".")
        if (space, what) != ("shared", "or"):
            raise NotImplementedError(str(instruction))
        to, place, source = instruction.operands
        register, address = self.index[to], self.address(place)
        value = self.operand(source, kind)

        def step(lanes: Lanes) -> None:
            at, given = lanes.of_active(address(lanes)), lanes.of_active(value(lanes))
            found = lanes.memory.swap(space, at, given, np.bitwise_or, lanes.access())
            lanes.put(register, lanes.spread(found))

        return step

    def _bra(self, instruction: Instruction) -> Step:
        target = self.kernel.target(instruction)
        if not instruction.guard:

            def jump(lanes: Lanes) -> None:
                lanes.at[lanes.indices] = target

            return jump
        guard = self.guard(instruction.guard)

        def step(lanes: Lanes) -> None:
            lanes.at[lanes.active & guard(lanes)] = target

        return step

    def _ret(self, instruction: Instruction) -> Step:
        def step(lanes: Lanes) -> None:
            lanes.at[lanes.indices] = -1

        return step

    def _bar(self, instruction: Instruction) -> Step:
        if instruction.opcode != "bar.sync" or instruction.operands != ("0",):
            raise NotImplementedError(str(instruction))

        def step(lanes: Lanes) -> None:
            lanes.barriers[lanes.indices] += 1

        return step

    def _shfl(self, instruction: Instruction) -> Step:
        _, _, mode, kind = instruction.opcode.split(".")
        to, source, by, limits, members = instruction.operands
        taking_part = self.operand(members, "s32")
        (register, *in_range), value = self.destinations(to), self.operand(source, kind)
        distance, limit = self.operand(by, "s32"), self.operand(limits, "s32")

        def step(lanes: Lanes) -> None:
            if (lanes.of_active(taking_part(lanes)) != -1).any():
                raise NotImplementedError(f"{instruction}: some threads of a warp")
            lane, b, c = lanes.lanes % WARP, distance(lanes), limit(lanes)
            segment, clamp = c >> 8 & 31, c & 31
            last = (lane & segment) | (clamp & ~segment)
            other = {
                "down": lane + b,
                "up": lane - b,
                "bfly": lane ^ b,
                "idx": (lane & segment) | (b & ~segment),
            }[mode]
            there = other >= last if mode == "up" else other <= last
            values = np.broadcast_to(value(lanes), lanes.count)
            lanes.put(register, values[lanes.lanes - lane + np.where(there, other, lane)])
            for predicate in in_range:
                lanes.put(predicate, there)

        return step

    def _call(self, instruction: Instruction) -> Step:
        if instruction.operands[0] != "__assertfail":
            raise NotImplementedError(str(instruction))

        def step(lanes: Lanes) -> None:
            offset = int(lanes.arguments["param0"][0])
            (text,) = [v.value for v in self.kernel.constants.values() if v.offset == offset]
            raise Stopped(text.rstrip(b"\0").decode())

        return step

    def _guarded(self, step: Step, guard: Operand) -> Step:
        def guarded(lanes: Lanes) -> None:
            active, chosen = lanes.active, lanes.active & guard(lanes)
            if chosen.any():
                lanes.activate(chosen)
                step(lanes)
                lanes.activate(active)

        return guarded
