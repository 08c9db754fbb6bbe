"""The output directory: the files of a job appear there together, or not at all."""

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
    """A directory inside ``out`` for the files of one job, which move to ``out`` after the block.

    A block that raises moves none; the directory is removed in any case.

    Args:
        out: the output directory, made if absent; removed again if it stays empty.
        inputs: the files that the job reads, which its output must not replace.

    Raises:
        ScoreError: the directory cannot be made, or a file cannot or must not be replaced.
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
    """Turn an ``OSError`` in the block into a ``ScoreError`` that names the path and a remedy."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "free some space there" if full else "choose a directory that can be written"
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
                raise ScoreError(f"out: {target} would replace the input; choose another directory")
