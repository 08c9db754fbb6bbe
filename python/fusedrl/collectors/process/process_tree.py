"""Finds the descendants of a process in /proc, and sends them signals."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def _parent(pid: int) -> int | None:
    try:
        # The program's name comes before, in parentheses, and may contain parentheses itself.
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[1])


def descendants(pid: int) -> list[int]:
    """The children of a process, their children, and so on."""
    children: dict[int, list[int]] = {}
    for one in [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]:
        if (parent := _parent(one)) is not None:
            children.setdefault(parent, []).append(one)
    tree = [pid]
    for one in tree:  # the list grows in the loop
        tree += children.get(one, [])
    return tree[1:]


def send(number: int, pids: list[int]) -> None:
    """Send a signal to processes, except those that have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
