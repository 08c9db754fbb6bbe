"""Finds a process's state and descendants in /proc, and sends them signals."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple


class _Status(NamedTuple):
    state: str  # a letter, as ps shows it
    parent: int


def _status(pid: int) -> _Status | None:
    try:
        # The program's name comes before, in parentheses, and may contain parentheses itself.
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    state, parent = text.rpartition(")")[2].split()[:2]
    return _Status(state, int(parent))


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped a process."""
    status = _status(pid)
    return status is not None and status.state in "Tt"


def descendants(pid: int) -> list[int]:
    """The children of a process, their children, and so on."""
    children: dict[int, list[int]] = {}
    for one in [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]:
        status = _status(one)
        if status is not None:
            children.setdefault(status.parent, []).append(one)
    tree = [pid]
    for one in tree:  # the list grows in the loop
        tree += children.get(one, [])
    return tree[1:]


def send(number: int, pids: list[int]) -> None:
    """Send a signal to processes, except those that have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
