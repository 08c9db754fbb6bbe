"""The output directory: the files of a job appear there together, or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from fusedrl.scoring.errors import ScoreError
from fusedrl.scoring.signals import held

FILES = ("tokens.parquet", "chats.parquet", "report.html")
_PREFIX = ".unfinished-"


@contextmanager
def unfinished(out: Path, inputs: Sequence[Path]) -> Iterator[Path]:
    """A directory inside ``out`` for the files of one job, which is gone after the block.

    Its lock says that the job is alive. What jobs that were killed have left is removed first.

    Args:
        out: the output directory, made if absent; removed again if it stays empty.
        inputs: files that the job reads, which its own must not replace.

    Raises:
        ScoreError: a directory that cannot be made, a file that must not or cannot be replaced.
    """
    with explain_write_errors(out):
        _check_replaceable(out, inputs)
        missing = [folder for folder in (out, *out.parents) if not folder.exists()]
        out.mkdir(parents=True, exist_ok=True)
    folder = lock = None
    try:
        with explain_write_errors(out), _locked(out), held():
            _remove_abandoned(out)
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=out))
            with suppress(OSError):  # Without locks, nobody removes what is not theirs.
                lock = _lock(folder)
        yield folder
    finally:
        with held():
            if folder is not None:
                _remove(folder)
            if lock is not None:
                os.close(lock)
            with suppress(OSError):
                for made in missing:
                    made.rmdir()


def publish(folder: Path, out: Path) -> None:
    """Move the files of a job to their place; those of two jobs never mix.

    Raises:
        ScoreError: a file that cannot be moved.
    """
    with explain_write_errors(out), _locked(out), held():
        for name in FILES:
            (folder / name).replace(out / name)


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """An error of the operating system in the block is one of ``out``, with the remedy."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "free some space there" if full else "choose a directory that can be written"
        raise ScoreError(
            f"out: cannot write {path}: {error.strerror or error}; {remedy}"
        ) from error


def _check_replaceable(out: Path, inputs: Sequence[Path]) -> None:
    if out.exists() and not out.is_dir():
        raise ScoreError(
            f"out: expected a directory or a new name, got the file {out}; choose another name"
        )
    for target in (out / name for name in FILES):
        if target.is_dir():
            raise ScoreError(
                f"out: expected to write the file {target}, got a directory there; remove it, or "
                "choose another directory"
            )
        for path in inputs:
            if target.exists() and target.samefile(path):
                raise ScoreError(f"out: {target} would replace the input; choose another directory")


def _remove_abandoned(out: Path) -> None:
    for folder in out.glob(f"{_PREFIX}*"):
        if folder.is_symlink() or not folder.is_dir():
            continue
        with suppress(OSError):  # Locked by a live job, or on a file system without locks.
            lock = _lock(folder)
            try:
                _remove(folder)
            finally:
                os.close(lock)


def _remove(folder: Path) -> None:
    """Remove a job's directory, and nothing that a job does not write."""
    with suppress(OSError):
        for name in FILES:
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def _lock(folder: Path) -> int:
    """A descriptor that holds a directory's lock until it is closed; refused if another has it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """One job at a time makes its directory, removes others', or moves its files."""
    descriptor = os.open(out, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
