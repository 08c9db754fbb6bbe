"""A progress bar of a collector."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def check_progress(progress: bool) -> None:
    """Raise ``ImportError`` if a bar is asked for and rich is missing."""
    if progress:
        try:
            import rich.progress  # noqa: F401
        except ImportError as error:
            raise ImportError(
                "progress: expected rich to be installed; pip install rich, or leave progress out"
            ) from error


@contextmanager
def progress_bar(collector: Any) -> Iterator[Callable[[], None]]:
    """Show turns, their rate and the policy's version; yields what is to be called a batch."""
    if not collector.progress:
        yield lambda: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    endless = collector.total_frames == float("inf")
    columns = (
        TextColumn("turns"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[version]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns) as bar:
        task = bar.add_task("turns", total=None if endless else collector.total_frames, version="")

        def advance() -> None:
            version = collector.policy_version
            bar.update(
                task,
                completed=collector._frames,
                version="" if version is None else f"version {version}",
            )

        yield advance
