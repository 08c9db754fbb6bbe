"""What each PTX instruction computes: numpy functions of the values of its operands.

The source is NVIDIA's *Parallel Thread Execution ISA*. An instruction that is missing here is an
error where a kernel is loaded, never a guess.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Function = Callable[..., Array]

BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
TYPES: dict[str, type[np.generic]] = {
    **{f"{kind}{8 * size}": bits for size, bits in BITS.items() for kind in "bu"},
    **{"s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64},
    **{"f16": np.float16, "f32": np.float32, "f64": np.float64},
    # numpy has no bfloat16, and pairs stay as they lie in their register
    **{"bf16": np.uint16, "bf16x2": np.uint32, "f16x2": np.uint32, "pred": np.bool_},
}


class Operation(NamedTuple):
    """A function of operands of these types, whose result has a type too."""

    result: str
    sources: tuple[str, ...]
    function: Function


def operation(opcode: str) -> Operation:
    """What an instruction that touches no memory and no other thread does."""
    name, *flags = opcode.split(".")
    kind = flags[-1]
    if name == "cvt":
        return _conversion(flags)
    if name == "setp":
        return _comparison(flags)
    if name == "selp":
        return Operation(kind, (kind, kind, "pred"), lambda a, b, p: np.where(p, a, b))
    if name in ("mov", "cvta"):
        return Operation(kind, (kind,), lambda a: a)
    if kind in ("bf16", "bf16x2", "f16x2"):
        raise NotImplementedError(opcode)
    key = name if kind in TYPES and np.dtype(TYPES[kind]).kind in "uib" else f"{name}.f"
    if name in ("mul", "mad") and key == name:
        key, flags = f"{name}.{flags[0]}", flags[1:]
    sources, function = _FUNCTIONS[key]
    if opcode in _SPECIAL:
        return Operation(kind, (kind,) * sources, _SPECIAL[opcode])
    if name in ("shl", "shr"):
        return Operation(kind, (kind, "u32"), function)
    if name in ("bfe", "bfi"):
        return Operation(kind, (*(kind,) * (sources - 2), "u32", "u32"), function)
    if key.endswith("wide"):
        wide = kind[0] + str(2 * int(kind[1:]))
        takes = (kind, kind, wide)[:sources]
        return Operation(wide, takes, function)
    if key.endswith(".f"):
        function = _rounded(name, function, flags)
    return Operation(kind, (kind,) * sources, function)


# Whole numbers wrap around, as numpy's do; they divide towards zero.


def _divided(a: Array, b: Array) -> Array:
    b = np.where(b == 0, b.dtype.type(1), b)
    quotient = a // b
    return quotient + ((quotient < 0) & (quotient * b != a)) if a.dtype.kind == "i" else quotient


def _shift(by: Function, emptied: Callable[[Array], Array | int]) -> Function:
    """Shifts by more than the width leave nothing, or the sign."""

    def shifted(a: Array, n: Array) -> Array:
        width = 8 * a.dtype.itemsize
        return np.where(n < width, by(a, np.minimum(n, width - 1).astype(a.dtype)), emptied(a))

    return shifted


def _bits_of(start: Array, length: Array) -> tuple[Array, Array]:
    """Where a field of bits begins, and ones for its bits; both operands are bytes."""
    start, length = (x.astype(np.uint64) & np.uint64(0xFF) for x in (start, length))
    return start, (np.uint64(1) << np.minimum(length, 63)) - np.uint64(1)


def _extracted(a: Array, start: Array, length: Array) -> Array:
    """Of a signed number, the field's highest bit is its sign."""
    at, ones = _bits_of(start, length)
    wide = a.astype(f"{a.dtype.kind}8")
    field = (wide >> at.astype(wide.dtype)).view(np.uint64) & ones
    sign = (ones >> np.uint64(1)) + np.uint64(1)
    return ((field ^ sign) - sign if a.dtype.kind == "i" else field).astype(a.dtype)


def _inserted(a: Array, into: Array, start: Array, length: Array) -> Array:
    at, ones = _bits_of(start, length)
    return (into & ~(ones << at) | (a & ones) << at).astype(a.dtype)


def _permuted(a: Array, b: Array, selector: Array) -> Array:
    """Each byte of the result is one of the eight of a (low) and b, or copies its sign."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.uint32(0)
    for k in range(4):
        choice = (selector >> np.uint32(4 * k)) & np.uint32(0xF)
        byte = (both >> ((choice & 7) * 8).astype(np.uint64)).astype(np.uint32) & np.uint32(0xFF)
        sign = np.where(byte & 0x80, np.uint32(0xFF), np.uint32(0))
        result = result | np.where(choice & 8, sign, byte) << np.uint32(8 * k)
    return result


def _table(a: Array, b: Array, c: Array, table: Array) -> Array:
    """The table has a bit for each of the eight triples of bits of a, b and c."""
    result = np.zeros_like(a)
    for i in range(8):
        term = (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        result = result | np.where(table >> np.uint32(i) & 1, term, 0).astype(a.dtype)
    return result


def _high(a: Array, b: Array) -> Array:
    if a.dtype.itemsize < 8:
        wide = np.int64 if a.dtype.kind == "i" else np.uint64
        return (a.astype(wide) * b.astype(wide) >> wide(8 * a.dtype.itemsize)).astype(a.dtype)
    products = [int(x) * int(y) >> 64 for x, y in np.broadcast(a, b)]
    return np.array(products, dtype=a.dtype)


def _wide(a: Array, b: Array, *c: Array) -> Array:
    product = a.astype(f"{a.dtype.kind}{2 * a.dtype.itemsize}") * b
    return product + c[0] if c else product


# Floating point. A product of float32 is exact in float64, where sums are rounded the first time.


def _to_float32(x: Array, error: Array) -> Array:
    """Rounds a float64 that has been rounded itself, by ``error``, as if it were the exact one."""
    half = (x.view(np.int64) & 0x1FFFFFFF) == 0x10000000  # between two float32
    if half.any():
        x = np.where(half & (error != 0), np.nextafter(x, np.copysign(np.inf, error)), x)
    return x.astype(np.float32)


def _fused(a: Array, b: Array, c: Array) -> Array:
    if a.dtype == np.float64:  # of 64 bits, so that one of 2,000 results is not the nearest
        return (a.astype(np.longdouble) * b + c).astype(np.float64)
    product, term = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + term
    back = total - product
    return _to_float32(total, (product - (total - back)) + (term - back))


_DIRECTED: dict[str, Callable[[Array, Array], Array]] = {
    "rm": lambda near, x: near > x,
    "rp": lambda near, x: near < x,
    "rz": lambda near, x: np.abs(near) > np.abs(x),
}
_TOWARDS = {"rm": -math.inf, "rp": math.inf, "rz": 0.0}


def _rounded(name: str, function: Function, flags: list[str]) -> Function:
    """With the rounding, flushing and saturation that the flags of an opcode ask for."""
    mode = next((flag for flag in flags if flag in _DIRECTED), None)
    if mode is not None and flags[-1] != "f32":
        raise NotImplementedError(f"{name} rounded by {mode} in {flags[-1]}")
    plain = function
    if mode is not None:

        def function(*operands: Array) -> Array:
            wide = [x.astype(np.float64) for x in operands]
            exact = wide[0] * wide[1] + wide[2] if name == "fma" else plain(*wide)
            near = exact.astype(np.float32)
            away = _DIRECTED[mode](near, exact)
            return np.where(away, np.nextafter(near, np.float32(_TOWARDS[mode])), near)

    if "sat" in flags:
        return lambda *operands: _saturated(function(*operands))
    if "ftz" in flags:
        return lambda *operands: _flushed(function(*map(_flushed, operands)))
    return function


def _saturated(x: Array) -> Array:
    return np.where(np.isnan(x), x.dtype.type(0), np.clip(x, 0, 1))


def _flushed(x: Array) -> Array:
    return np.where(np.abs(x) < np.finfo(x.dtype).tiny, np.copysign(x.dtype.type(0), x), x)


def _extreme(of: Function, of_equals: np.ufunc) -> Function:
    """-0 is less than 0."""

    def function(a: Array, b: Array) -> Array:
        bits = BITS[a.dtype.itemsize]
        return np.where(a == b, of_equals(a.view(bits), b.view(bits)).view(a.dtype), of(a, b))

    return function


def _error(x: Array) -> Array:
    """From -1 to 1, always the same for a number: no code may rely on a better approximation."""
    mixed = x.view(np.uint32) * np.uint32(2654435761)
    return (mixed ^ mixed >> np.uint32(15)) / 2.0**31 - 1


_BOUND = 2.0**-22  # of the errors that the ISA allows the approximations of float32


def _exp2(x: Array) -> Array:
    wide = np.exp2(x.astype(np.float64))
    return np.where(x == 0, 1, wide * (1 + _BOUND * _error(x))).astype(np.float32)


def _log2(x: Array) -> Array:
    """The error is relative, but absolute between 1/2 and 2."""
    wide = np.log2(x.astype(np.float64))
    scale = np.where((x > 0.5) & (x < 2), 1, wide)
    return np.where(np.isfinite(wide), wide + _BOUND * _error(x) * scale, wide).astype(np.float32)


def _approximate_reciprocal(x: Array) -> Array:
    return (1 / x.astype(np.float64) * (1 + _BOUND / 2 * _error(x))).astype(np.float32)


def _reciprocal(x: Array) -> Array:
    return x.dtype.type(1) / x


def _gross_reciprocal(x: Array) -> Array:
    """Of the upper half of a float64 alone, which is all that the result has."""
    high = np.uint64(0xFFFFFFFF00000000)
    upper = (x.view(np.uint64) & high).view(np.float64)
    return ((1 / upper).view(np.uint64) & high).view(np.float64)


_FUNCTIONS: dict[str, tuple[int, Function]] = {
    "add": (2, lambda a, b: a + b),
    "sub": (2, lambda a, b: a - b),
    "mul.lo": (2, lambda a, b: a * b),
    "mul.hi": (2, _high),
    "mul.wide": (2, _wide),
    "mad.lo": (3, lambda a, b, c: a * b + c),
    "mad.wide": (3, _wide),
    "div": (2, _divided),
    "rem": (2, lambda a, b: a - _divided(a, b) * b),
    "min": (2, np.minimum),
    "max": (2, np.maximum),
    "neg": (1, lambda a: -a),
    "abs": (1, np.abs),
    "not": (1, lambda a: ~a),
    "and": (2, lambda a, b: a & b),
    "or": (2, lambda a, b: a | b),
    "xor": (2, lambda a, b: a ^ b),
    "shl": (2, _shift(np.left_shift, lambda a: 0)),
    "shr": (
        2,
        _shift(
            np.right_shift, lambda a: a >> (8 * a.dtype.itemsize - 1) if a.dtype.kind == "i" else 0
        ),
    ),
    "bfe": (3, _extracted),
    "bfi": (4, _inserted),
    "prmt": (3, _permuted),
    "lop3": (4, _table),
    "add.f": (2, lambda a, b: a + b),
    "sub.f": (2, lambda a, b: a - b),
    "mul.f": (2, lambda a, b: a * b),
    "div.f": (2, lambda a, b: a / b),
    "fma.f": (3, _fused),
    "min.f": (2, _extreme(np.fmin, np.bitwise_or)),  # NaN only if both are
    "max.f": (2, _extreme(np.fmax, np.bitwise_and)),
    "neg.f": (1, lambda a: -a),
    "abs.f": (1, np.abs),
    "rcp.f": (1, _reciprocal),
    "sqrt.f": (1, np.sqrt),
    "ex2.f": (1, _exp2),
    "lg2.f": (1, _log2),
}
_SPECIAL: dict[str, Function] = {
    "rcp.approx.ftz.f32": _approximate_reciprocal,
    "rcp.approx.ftz.f64": _gross_reciprocal,
}

_ORDER: dict[str, Function] = {
    "eq": np.equal,
    "ne": lambda a, b: (a < b) | (a > b),
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}


_COMBINED = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _comparison(flags: list[str]) -> Operation:
    """Comparisons are false where one of the numbers is NaN, unless their name ends with u."""
    compare, kind = flags[0], flags[-1]
    ordered = _ORDER[compare if compare in _ORDER else compare.removesuffix("u")]

    def function(a: Array, b: Array, *other: Array) -> Array:
        result = ordered(a, b)
        if compare not in _ORDER:
            result = result | np.isnan(a) | np.isnan(b)
        return _COMBINED[flags[1]](result, *other) if other else result

    sources = (kind, kind) if len(flags) == 2 else (kind, kind, "pred")
    return Operation("pred", sources, function)


def from_bfloat16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bfloat16(x: Array) -> Array:
    """To the nearest, of two the even one; NaN becomes the one that has all bits but the sign's."""
    bits = x.view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), nearest.astype(np.uint16))


_INTEGRAL = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _conversion(flags: list[str]) -> Operation:
    *options, to, source = flags
    if to.endswith("x2"):  # of two float32, the first of which goes into the upper half
        narrow = to_bfloat16 if to == "bf16x2" else lambda x: x.astype(np.float16).view(np.uint16)
        return Operation(to, (source, source), lambda high, low: (
            narrow(high).astype(np.uint32) << np.uint32(16) | narrow(low)))  # fmt: skip
    steps: list[Function] = []
    if source == "bf16":
        steps.append(from_bfloat16)
    steps += [_INTEGRAL[option] for option in options if option in _INTEGRAL]
    whole = np.dtype(TYPES[to]).kind in "ui" and to != "bf16"
    if whole and source[0] == "f":
        steps.append(lambda x: _whole(x, TYPES[to]))
    elif to == "bf16":
        steps.append(to_bfloat16)
    else:
        steps.append(lambda x: x.astype(TYPES[to]))
    if "sat" in options and not whole:
        steps.append(_saturated)

    def function(x: Array) -> Array:
        for step in steps:
            x = step(x)
        return x

    return Operation(to, (source,), function)


def _whole(x: Array, to: type[np.generic]) -> Array:
    """The nearest that the type has; NaN becomes 0."""
    limits = np.iinfo(to)
    inside = np.clip(np.nan_to_num(x.astype(np.longdouble)), int(limits.min), int(limits.max))
    return inside.astype(to)


def constant(text: str, kind: str) -> Array:
    """An immediate operand, as bits of its type's size."""
    size = np.dtype(TYPES[kind]).itemsize
    if kind == "pred":
        return np.array([int(text) != 0])
    if match := re.fullmatch(r"0[fFdD]([0-9a-fA-F]+)", text):
        bits = (np.uint32 if text[1] in "fF" else np.uint64)(int(match[1], 16))
        number = bits.view(f"f{bits.itemsize}") if kind[0] == "f" else bits
        return np.array([number]).astype(TYPES[kind]).view(BITS[size])
    value = int(text.rstrip("U"), 0)
    return np.array([value & (2 ** (8 * size) - 1)], dtype=BITS[size])
