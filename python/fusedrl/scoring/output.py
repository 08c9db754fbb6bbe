"""The output directory: all files of a job appear in it, or none."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from fusedrl.scoring.errors import ScoreError

FILES = ("tokens.parquet", "chats.parquet", "report.html")


@contextmanager
def whole_files(out: Path, inputs: Sequence[Path]) -> Iterator[Path]:
    """A temporary directory in ``out``, whose files move to ``out`` at the end of the block.

    If the block raises, no file is moved. The directory is removed in any case.

    Args:
        out: the output directory, created if necessary, and then removed if it stays empty.
        inputs: the input files, which must not be overwritten.

    Raises:
        ScoreError: the directory or a file cannot be written.
    """
    with explain_write_errors(out):
        _check_replaceable(out, inputs)
        missing = [folder for folder in (out, *out.parents) if not folder.exists()]
        out.mkdir(parents=True, exist_ok=True)
        unfinished = tempfile.TemporaryDirectory(prefix=".unfinished-", dir=out)
    try:
        with unfinished as folder:
            yield Path(folder)
            with explain_write_errors(out):
                for name in FILES:
                    Path(folder, name).replace(out / name)
    finally:
        with suppress(OSError):
            for made in missing:
                made.rmdir()


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Convert an ``OSError`` in the block to a ``ScoreError`` with the path and a remedy."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "free some disk space" if full else "choose a writable directory"
        raise ScoreError(
            f"out: cannot write {path}: {error.strerror or error}; {remedy}"
        ) from error


def _check_replaceable(out: Path, inputs: Sequence[Path]) -> None:
    for target in (out / name for name in FILES):
        if target.is_dir():
            raise ScoreError(
                f"out: expected to write the file {target}, got a directory there; remove it, or "
                "choose another directory"
            )
        for path in inputs:
            if target.exists() and target.samefile(path):
                raise ScoreError(f"out: {target} would overwrite input; choose another directory")
