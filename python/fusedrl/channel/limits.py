"""How much memory this process may still take, and who says so.

The kernel ends a process where shared memory that was promised cannot be had; which one it picks is
not ours to say. So what is asked for is compared with what is left before it is reserved.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Where /proc and /sys are.
ROOT = Path("/")
# Page cache and the like, which the kernel gives up before anybody runs out of memory.
_RECLAIMABLE = {
    "memory.max": ("inactive_file", "active_file", "slab_reclaimable"),
    "memory.limit_in_bytes": ("total_inactive_file", "total_active_file"),
}


class Room(NamedTuple):
    """Bytes that are left by one limit."""

    free: int
    limit: str


def refuse_beyond(nbytes: int, remedy: str) -> None:
    """Raise ``RuntimeError`` where any limit leaves less than ``nbytes`` of shared memory."""
    least = min(rooms(), default=None)
    if least is not None and least.free < nbytes:
        raise RuntimeError(
            f"weights: expected room for {_told(nbytes)} of shared memory, got {_told(least.free)} "
            f"free by {least.limit}; {remedy}"
        )


def rooms() -> Iterator[Room]:
    """Every limit that this process can read, without swap: readers would wait for a disk."""
    available = _numbers(ROOT / "proc/meminfo").get("MemAvailable:")
    if available is not None:
        yield Room(available * 1024, "this machine's memory (MemAvailable in /proc/meminfo)")
    yield from _cgroups()
    size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if size != resource.RLIM_INFINITY:
        yield Room(size, "this process's largest file (ulimit -f)")


def _cgroups() -> Iterator[Room]:
    """The limits of this process's control groups, of version 1 and 2, and of those above them."""
    paths = {}
    for line in _text(ROOT / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            paths[controllers == ""] = path
    for line in _text(ROOT / "proc/self/mountinfo").splitlines():
        mount, _, kind = line.partition(" - ")
        top, point = mount.split()[3:5]
        system, _, options = kind.split(maxsplit=2)
        unified = system == "cgroup2"
        if unified in paths and (
            unified or (system == "cgroup" and "memory" in options.split(","))
        ):
            yield from _limits_above(ROOT / point.lstrip("/"), _below(top, paths[unified]), unified)


def _below(top: str, path: str) -> Path:
    """``path`` of a group, as it lies below a mount of ``top``: containers see part of the tree."""
    relative = Path(path)
    # A path from outside of what is mounted says nothing here: the mount is the container's own.
    inside = relative.is_relative_to(top) and ".." not in relative.parts
    return relative.relative_to(top) if inside else Path()


def _limits_above(mount: Path, group: Path, unified: bool) -> Iterator[Room]:
    for folder in (group, *group.parents):
        where = mount / folder
        if not unified and _text(where / "memory.use_hierarchy").strip() == "0" and folder != group:
            continue  # an older version 1, where groups above count their own processes alone
        names, usage = (
            (("memory.max", "memory.high"), "memory.current")
            if unified
            else (("memory.limit_in_bytes",), "memory.usage_in_bytes")
        )
        used = _text(where / usage).strip()
        statistics = _numbers(where / "memory.stat")
        reclaimable = sum(statistics.get(name, 0) for name in _RECLAIMABLE[names[0]])
        for name in names:
            limit = _text(where / name).strip()
            if limit.isdecimal() and used.isdecimal():
                free = int(limit) - int(used) + min(reclaimable, int(used))
                yield Room(max(free, 0), f"the control group's {where / name}")


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):  # not there, or not for us: no limit that we know
        return ""


def _numbers(path: Path) -> dict[str, int]:
    """A file of names and numbers, a line each."""
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def _told(nbytes: int) -> str:
    return f"{nbytes} bytes ({nbytes / 2**30:.2f} GiB)"
