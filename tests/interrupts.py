"""Ctrl-C at each instruction of a call, and in storms of signals."""

from __future__ import annotations

import ctypes
import random
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fusedrl

PACKAGE = str(Path(fusedrl.__file__).parent)

# A look-up of a key asks for an interrupt of this thread without an instruction in which Python
# would raise it here.
_arm = partial(
    ctypes.pythonapi.PyThreadState_SetAsyncExc,
    ctypes.c_ulong(threading.get_ident()),
    ctypes.py_object(KeyboardInterrupt),
)


class Point:
    """An instruction of the package, counted from the begin of a call, that is interrupted.

    Args:
        number: which instruction.
        strict: whether the exception is raised right there. Otherwise it is asked for there, and
            raised where Python raises what handlers of signals raise: at its next check.
    """

    def __init__(self, number: int, strict: bool) -> None:
        self.left, self.strict = number, strict
        self.error: KeyboardInterrupt | None = None  # with the frames that it went through

    def run(self, call: Callable[[], Any]) -> bool:
        """Whether ``call`` came to its end without the interrupt."""
        armed: defaultdict[int, Any] = defaultdict(_arm)
        before = sys.gettrace()

        def trace(frame: Any, event: str, _: Any) -> Any:
            if event == "call":
                if not frame.f_code.co_filename.startswith(PACKAGE):
                    return None
                frame.f_trace_opcodes, frame.f_trace_lines = True, False
                return trace
            if event == "opcode":
                self.left -= 1
                if self.left == 0:
                    if self.strict:
                        raise KeyboardInterrupt
                    sys.settrace(None)  # or Python would raise it in this function, too early
                    armed[0]
            return trace

        try:
            sys.settrace(trace)
            try:
                call()
            finally:
                sys.settrace(before)
            return True
        except KeyboardInterrupt as error:
            torch.set_grad_enabled(True)  # torch.no_grad() may have been interrupted in its exit
            self.error = error
            return False


def at_each_instruction(
    call: Callable[[], Any],
    check: Callable[[], Any],
    strict: bool,
    some: int | None = None,
    keeps: bool = False,
) -> int:
    """Interrupt ``call`` at each instruction of the package in turn, and ``check`` what is left.

    Args:
        call: what is interrupted; it begins anew each time.
        check: is called after each interrupt.
        strict: as for :class:`Point`.
        some: how many instructions, drawn by chance, instead of all.
        keeps: keep the exception during the check, as a debugger does.

    Returns:
        How many instructions were interrupted.
    """
    point = Point(10**9, strict)
    point.run(call)
    count = 10**9 - point.left
    numbers = range(1, count + 1)
    if some is not None and some < count:
        numbers = sorted(random.Random(count).sample(numbers, some))
    interrupted = 0
    for number in numbers:
        point = Point(number, strict)
        interrupted += not point.run(call)
        if not keeps:
            point.error = None
        check()
    return interrupted


def storm(
    call: Callable[[], Any],
    check: Callable[[], Any],
    interrupts: int,
    longest: float,
    keeps: bool = False,
) -> int:
    """Interrupt ``call`` by signals that come by chance, and ``check`` what is left.

    Args:
        call: what is interrupted; it begins anew each time.
        check: is called after each interrupt.
        interrupts: how often.
        longest: seconds after which a signal comes at the latest.
        keeps: as for :func:`at_each_instruction`.

    Returns:
        How many calls came to their end meanwhile.
    """
    chance, armed, done = random.Random(interrupts), [False], 0

    def interrupt(*_: Any) -> None:
        if armed[0]:
            armed[0] = False
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(interrupts):
            kept: KeyboardInterrupt | None = None
            try:
                armed[0] = True
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, longest))
                while armed[0]:
                    call()
                    done += 1
            except KeyboardInterrupt as error:
                torch.set_grad_enabled(True)  # as above
                kept = error if keeps else None
            check()
            del kept
    finally:
        armed[0] = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return done
