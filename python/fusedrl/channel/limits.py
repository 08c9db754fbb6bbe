"""How much memory this process may still take, and which limit says so.

Where shared memory that was promised runs out, the kernel kills a process, and not necessarily this
one. So the size of a channel is compared with what is left before memory is reserved.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Where /proc and /sys are.
ROOT = Path("/")
# Page cache and similar memory, which the kernel gives up before a process runs out of memory.
_RECLAIMABLE = {
    "memory.max": ("inactive_file", "active_file", "slab_reclaimable"),
    "memory.limit_in_bytes": ("total_inactive_file", "total_active_file"),
}


class Room(NamedTuple):
    """The bytes that one limit leaves."""

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
    """What every limit that this process can read leaves; swap does not count, as it is slow."""
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
    """The path of a group below a mount of the group ``top``: containers see part of the tree."""
    relative = Path(path)
    # A path outside of what is mounted cannot be followed; the mount is then the container's group.
    inside = relative.is_relative_to(top) and ".." not in relative.parts
    return relative.relative_to(top) if inside else Path()


def _limits_above(mount: Path, group: Path, unified: bool) -> Iterator[Room]:
    for folder in (group, *group.parents):
        where = mount / folder
        if not unified and _text(where / "memory.use_hierarchy").strip() == "0" and folder != group:
            continue  # in version 1, groups above may count their own processes alone
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
    except (OSError, UnicodeDecodeError):  # missing or not readable, so it gives no limit
        return ""


def _numbers(path: Path) -> dict[str, int]:
    """The numbers in a file that has a name and a number on each line."""
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def _told(nbytes: int) -> str:
    return f"{nbytes} bytes ({nbytes / 2**30:.2f} GiB)"
