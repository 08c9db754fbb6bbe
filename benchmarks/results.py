"""The file of results: what was measured, on what, and which rows may be believed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .harness import Row

_COLUMNS = {column.name for column in fields(Row)}


@dataclass
class Results:
    """What ``bench.json`` holds, and which of its rows may be believed."""

    facts: dict[str, Any]
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    interrupted: str | None = None  # the case that a signal left unmeasured
    rows: list[Row] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """As JSON, every row with all its columns; the file is whole at every moment."""
        rows = [asdict(row) for row in self.rows]
        notes = {name: getattr(self, name) for name in ("skipped", "failed", "interrupted")}
        unfinished = path.with_name(f"{path.name}.unfinished")
        text = json.dumps(self.facts | notes | {"rows": rows}, indent=1) + "\n"
        try:
            unfinished.write_text(text)
            unfinished.replace(path)
        except OSError:
            with suppress(OSError):
                unfinished.unlink()  # it takes room on what may be a full disk
            raise

    @property
    def trusted(self) -> list[Row]:
        """The rows of the settings in which no answer of ours is wrong."""
        wrong = {(row.op, row.setting) for row in self.rows if not row.correct}
        return [row for row in self.rows if (row.op, row.setting) not in wrong]


def read(path: Path) -> Results:
    """What :meth:`Results.write` wrote.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no file of results.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        rows = [Row(**{name: row[name] for name in _COLUMNS & row.keys()}) for row in data["rows"]]
        _machine(data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path}: expected a bench.json of `fusedrl bench`, got {type(error).__name__}: {error}"
        ) from error
    return Results(data, rows=rows)


def caption(results: Iterable[Results]) -> str:
    """The machines and versions that plots are of, each named once."""
    return "; ".join(dict.fromkeys(_machine(one.facts) for one in results))


def _machine(facts: dict[str, Any]) -> str:
    versions = facts["machine"]["versions"]
    packages = ", ".join(f"{name} {versions[name]}" for name in ("torch", "torchrl"))
    if facts.get("device", "cpu") != "cpu":
        return f"{facts['device']}, {packages}"
    machine, threads = facts["machine"]["machine"], facts["threads"]
    cpu = f"{machine['cpu']} with {machine['cpu capability (torch)']}"
    return f"{cpu}, {threads} thread{'s' if threads > 1 else ''}, {packages}"
