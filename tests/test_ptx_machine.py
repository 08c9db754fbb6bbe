"""The interpreter of PTX itself, on kernels of a few lines."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from ptx.instructions import TYPES, operation
from ptx.machine import Lanes, Program, Stopped
from ptx.memory import UNWRITTEN, Fault, Memory
from ptx.program import kernels

THREADS = 64
KERNEL = """
.global .align 1 .b8 why[4] = {119, 104, 121, 0};
.visible .entry k(.param .u64 .ptr .align 1 k_in, .param .u64 k_out)
{
    .reg .pred %p<4>;
    .reg .b16 %rs<4>;
    .reg .b32 %r<16>;
    .reg .b64 %rd<16>;
    .shared .align 4 .b8 words[256];
    ld.param.u64 %rd1, [k_in];
    ld.param.u64 %rd2, [k_out];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mad.lo.s32 %r4, %r2, %r3, %r1;
    mul.wide.u32 %rd3, %r4, 4;
    add.s64 %rd4, %rd1, %rd3;
    add.s64 %rd5, %rd2, %rd3;
    mov.u32 %r5, words;
    shl.b32 %r6, %r1, 2;
    add.s32 %r7, %r5, %r6;
    setp.lt.u32 %p1, %r1, 32;
    %BODY%
    ret;
}
"""


def run(body: str, blocks: int = 2, given: np.ndarray | None = None) -> np.ndarray:
    """Each thread has the addresses of its words: given %rd4, output %rd5, shared %r7."""
    (kernel,) = kernels(KERNEL.replace("%BODY%", body))
    size = blocks * THREADS
    source = np.arange(size, dtype=np.uint32) if given is None else given
    out = np.full(4 * size, UNWRITTEN, np.uint8).view(np.uint32)
    arrays = [(x.ctypes.data, x.nbytes) for x in (source, out)]

    def find(address: int) -> tuple[int, int]:
        inside = [(at, size) for at, size in arrays if at <= address < at + size]
        return inside[0] if inside else (0, 0)

    arguments = b"".join(bytes(ctypes.c_uint64(at)) for at, _ in arrays)
    memory = Memory(find, kernel.shared, blocks, arguments)
    Lanes(Program(kernel), blocks, THREADS, memory).run()
    return out


STORE = "st.shared.u32 [%r7], %r1;"
REVERSED = "sub.s32 %r8, 252, %r6; add.s32 %r8, %r5, %r8; ld.shared.u32 %r9, [%r8];"
OUT = "st.global.u32 [%rd5], %r9;"


def test_a_barrier_orders_the_shared_memory_of_a_block():
    out = run(f"{STORE} bar.sync 0; {REVERSED} {OUT}", blocks=2)
    assert out.tolist() == [*range(63, -1, -1)] * 2


def test_threads_that_part_meet_again():
    """One half goes round a loop as often as its number says, the other half leaves it out."""
    body = f"""
    mov.u32 %r9, 7;
    mov.u32 %r10, %r1;
    @!%p1 bra $L_end;
    $L_loop:
    add.s32 %r9, %r9, 2;
    add.s32 %r10, %r10, -1;
    setp.ge.s32 %p2, %r10, 0;
    @%p2 bra $L_loop;
    $L_end:
    shfl.sync.down.b32 %r11|%p3, %r9, 1, 31, -1;
    selp.b32 %r9, %r11, 0, %p3;
    {OUT}
    """
    expected = [*range(11, 73, 2), 0, *[7] * 31, 0]
    assert run(body, blocks=1).tolist() == expected


def test_atomic_operations_do_not_race_with_each_other():
    body = f"""
    setp.eq.u32 %p2, %r1, 0;
    mov.b32 %r8, 0;
    @%p2 st.shared.u32 [words], %r8;
    bar.sync 0;
    mov.b32 %r10, 1;
    and.b32 %r11, %r1, 31;
    shl.b32 %r10, %r10, %r11;
    atom.shared.or.b32 %r12, [words], %r10;
    bar.sync 0;
    ld.shared.u32 %r9, [words];
    {OUT}
    """
    assert set(run(body).tolist()) == {2**32 - 1}


FAULTS = {
    "race": f"{STORE} {REVERSED} {OUT}",
    "race, of thread": "st.shared.u32 [words], %r1;",  # all at one place
    "race, of thread .* and": "ld.global.u32 %r9, [%rd4]; st.global.u32 [%rd2], %r9;",
    "beyond a shared variable": "ld.shared.u32 %r9, [%r7+4];",
    "beyond the end of a tensor|what is no tensor": "ld.global.u32 %r9, [%rd4+4];",
    "what is no tensor": "mov.b64 %rd6, 0; ld.global.u32 %r9, [%rd6];",
    "at no multiple": "ld.global.u32 %r9, [%rd4+2];",
    "nobody has written": "ld.global.u32 %r9, [%rd5];",
    "what nobody": "ld.shared.u32 %r9, [%r7];",
    "not all threads meet": "@%p1 bra $L_over; bar.sync 0; $L_over:",
    "barrier that not all": "setp.lt.u32 %p2, %r1, 3; @%p2 bra $L_1; "
    "shfl.sync.down.b32 %r8, %r1, 1, 31, -1; $L_1:",
    "takes for constant": "ld.global.nc.u32 %r9, [%rd4]; st.global.u32 [%rd4], %r9;",
    "past what the kernel": f"ld.global.u32 %r9, [%rd4]; {OUT} ld.global.nc.u32 %r9, [%rd5];",
    "no end": "$L_again: bra $L_again;",
}


@pytest.mark.parametrize("message", FAULTS)
def test_faults(message):
    with pytest.raises(Fault, match=message):
        run(FAULTS[message])


def test_a_failed_assertion_stops_the_kernel():
    call = "st.param.b64 [param0], %rd7; call.uni __assertfail, (param0);"
    with pytest.raises(Stopped, match="why"):
        run(f"mov.u64 %rd6, why; cvta.global.u64 %rd7, %rd6; {call}")


def test_an_unknown_instruction_is_refused():
    with pytest.raises((KeyError, NotImplementedError)):
        run("brev.b32 %r8, %r1;")


NAN, INF = float("nan"), float("inf")
VALUES = [
    ("add.s32", (2**31 - 1, 1), -(2**31)),
    ("div.s64", (-7, 2), -3),
    ("rem.s64", (-7, 2), -1),
    ("mul.wide.u32", (2**32 - 1, 2**32 - 1), (2**32 - 1) ** 2),
    ("mul.hi.u64", (2**63, 6), 3),
    ("shl.b32", (1, 32), 0),
    ("shr.s32", (-8, 40), -1),
    ("bfe.u32", (0xABCD, 4, 8), 0xBC),
    ("bfe.s32", (0xABCD, 4, 8), 0xBC - 0x100),
    ("bfe.s32", (-(2**31), 28, 8), -8),
    ("max.f32", (-0.0, 0.0), 0.0),
    ("min.f32", (0.0, -0.0), -0.0),
    ("bfi.b32", (0xFF5A, 0x12345678, 8, 8), 0x12345A78),
    ("prmt.b32", (0x33221100, 0x776655F4, 0x0C74), 0x00FF77F4),
    ("lop3.b32", (0xF0, 0xCC, 0xAA, 0x96), 0xF0 ^ 0xCC ^ 0xAA),
    ("min.f32", (NAN, 2.0), 2.0),
    ("setp.ne.f32", (NAN, 1.0), False),
    ("setp.neu.f32", (NAN, 1.0), True),
    ("setp.nan.f32", (NAN, 1.0), True),
    ("fma.rn.f32", (1 + 2**-12, 1 + 2**-12, 2.0**-77), 1 + 2**-11 + 2**-23),
    ("fma.rn.f32", (1 + 2**-12, 1 + 2**-12, -(2.0**-77)), 1 + 2**-11),
    ("fma.rm.f32", (1.0, 2.0**-30, 1.0), 1.0),
    ("add.rz.f32", (-1.0, 2.0**-30), -1 + 2**-24),
    ("cvt.rn.bf16.f32", (1 + 2**-8,), 0x3F80),
    ("cvt.rn.bf16.f32", (1 + 3 * 2**-8,), 0x3F82),
    ("cvt.rn.bf16x2.f32", (-2.0, 1.0), 0xC0003F80),
    ("cvt.f32.bf16", (0xC000,), -2.0),
    ("cvt.rn.f16.f32", (65520.0,), INF),
    ("cvt.sat.f32.f32", (NAN,), 0.0),
    ("cvt.rzi.s32.f32", (-1e20,), -(2**31)),
    ("cvt.rni.f32.f32", (2.5,), 2.0),
    ("ex2.approx.ftz.f32", (-127.0,), 0.0),
    ("ex2.approx.f32", (0.0,), 1.0),
    ("lg2.approx.ftz.f32", (0.0,), -INF),
    ("rcp.approx.ftz.f32", (-INF,), -0.0),
]


@pytest.mark.parametrize(("opcode", "operands", "expected"), VALUES)
def test_values_of_instructions(opcode, operands, expected):
    does = operation(opcode)
    with np.errstate(all="ignore"):
        values = [
            np.array([x], TYPES[kind]) for x, kind in zip(operands, does.sources, strict=True)
        ]
        result = does.function(*values).view(TYPES[does.result])
    assert str(result.tolist()) == str([expected])  # -0 is not 0, NaN is NaN


def test_approximations_are_as_wrong_as_they_may_be_and_no_more():
    x = np.linspace(-3, 3, 9999, dtype=np.float32)
    error = operation("ex2.approx.ftz.f32").function(x) / np.exp2(x.astype(float)) - 1
    assert 1.9e-7 < np.abs(error).max() < 3.2e-7  # 2^-22, and half of the last place
    error = operation("lg2.approx.ftz.f32").function(np.exp2(x)) - np.log2(np.exp2(x).astype(float))
    assert 1.9e-7 < np.abs(error[np.abs(x) < 1]).max() < 3.2e-7
    error = operation("rcp.approx.ftz.f32").function(np.exp2(x)) * np.exp2(x).astype(float) - 1
    assert 1e-7 < np.abs(error).max() < 1.9e-7  # 2^-23, and half of the last place
