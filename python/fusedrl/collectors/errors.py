"""Exceptions on their way out of a worker process."""

from __future__ import annotations

import contextlib
import pickle
import traceback
from typing import NamedTuple


class WorkerTraceback(Exception):
    """The cause of an exception that a worker raised: the worker's traceback, as text."""

    def __str__(self) -> str:
        """The text between quotes, so that it stands out."""
        return f'\n"""\n{self.args[0]}"""'


class Failure(NamedTuple):
    """An exception: its pickle, if it has one that can be read, and its traceback."""

    data: bytes | None
    text: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Make it portable, whatever it is."""
        text = "".join(traceback.format_exception(error))
        data = None
        if isinstance(error, Exception):
            with contextlib.suppress(Exception):
                data = pickle.dumps(error)
                pickle.loads(data)  # an __init__ of its own may not take what it is given back
                return cls(data, text)
        return cls(None, text)

    def exception(self) -> Exception:
        """The exception, with the worker's traceback as its cause."""
        last = self.text.rstrip().rsplit("\n", 1)[-1]
        error: Exception = RuntimeError(
            f"worker: expected it to collect, got {last}; its traceback is above"
        )
        if self.data is not None:
            with contextlib.suppress(Exception):
                error = pickle.loads(self.data)
        error.__cause__ = WorkerTraceback(self.text)
        return error
