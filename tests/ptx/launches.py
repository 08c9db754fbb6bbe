"""The ops' host code as it is, on CPU tensors, whose launches run the PTX of the built library."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

from ptx.machine import Lanes, Program, Stopped
from ptx.memory import Memory
from ptx.program import Kernel, kernels


class _Argument(ctypes.Structure):
    _fields_ = (("value", ctypes.c_void_p), ("size", ctypes.c_size_t))


_LAUNCHER = ctypes.CFUNCTYPE(
    ctypes.c_void_p,
    *(ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint, ctypes.POINTER(_Argument), ctypes.c_size_t),
)


# What the compiler numbers within a module: strings, and the functions that labels are of.
_NUMBERED = re.compile(r"(?<=\$str\$)\d+|(?<=__unnamed_)\d+|(?<=\$L__BB)\d+")


def kernels_of(ptx: str) -> dict[str, Kernel]:
    """Those of all modules. What several modules have under one name is the same code."""
    found, codes = dict[str, Kernel](), dict[str, str]()
    for module in ptx.split("Fatbin ptx code:")[1:]:
        for kernel in kernels(module):
            code = _NUMBERED.sub("", "\n".join(map(str, kernel.code))).replace("$str$", "$str")
            assert codes.setdefault(kernel.name, code) == code, kernel.name
            found[kernel.name] = kernel
    return found


class Interpreter:
    """Runs every launch of a library of host code; ``programs`` has their kernels."""

    def __init__(self, host: Path, kernels: dict[str, Kernel]) -> None:
        self.kernels, self.programs = kernels, dict[str, Program]()
        self._host = ctypes.CDLL(str(host))
        self._find = self._host.find_allocation
        self._find.argtypes = ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)
        self._find.restype = ctypes.c_size_t
        listed = subprocess.run(["nm", host], check=True, capture_output=True, text=True).stdout
        names = {int(at, 16): name for at, _, name in re.findall(r"(\w+) (\w) (\w+)", listed)}
        (offset,) = [at for at, name in names.items() if name == "find_allocation"]
        start = (ctypes.cast(self._find, ctypes.c_void_p).value or 0) - offset
        # g++ marks static functions by an L, nvcc does not.
        self._names = {
            start + at: re.sub("^_ZN7fusedrlL", "_ZN7fusedrl", name) for at, name in names.items()
        }
        self._message = b""
        self._launcher = _LAUNCHER(self._launched)
        ctypes.c_void_p.in_dll(self._host, "launcher").value = ctypes.cast(
            self._launcher, ctypes.c_void_p
        ).value
        self._host.keep_account()

    def find(self, address: int) -> tuple[int, int]:
        begin = ctypes.c_size_t()
        size = self._find(address, ctypes.byref(begin))
        return begin.value, size

    def _launched(self, kernel, blocks, threads, arguments, count):
        values = [ctypes.string_at(arguments[i].value, arguments[i].size) for i in range(count)]
        try:
            self.run(self._names[kernel], blocks, threads, values)
        except Exception as error:  # which ctypes would drop
            kind = "" if isinstance(error, Stopped) else f"{type(error).__name__}: "
            self._message = f"{kind}{error}".encode()
            return ctypes.cast(ctypes.c_char_p(self._message), ctypes.c_void_p).value
        return None

    def run(self, name: str, blocks: int, threads: int, arguments: list[bytes]) -> None:
        program = self.programs.get(name) or self.programs.setdefault(
            name, Program(self.kernels[name])
        )
        layout = program.kernel.params.values()
        assert [v.size for v in layout] == [len(x) for x in arguments], name
        packed = bytearray(max(v.offset + v.size for v in layout))
        for place, value in zip(layout, arguments, strict=True):
            packed[place.offset : place.offset + place.size] = value
        memory = Memory(self.find, program.kernel.shared, blocks, bytes(packed))
        Lanes(program, blocks, threads, memory).run()
