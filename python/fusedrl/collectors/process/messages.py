"""The messages between a trainer and its worker, and what is said in them of an exception.

A message is a packet, which arrives whole or not at all, whoever is killed or interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import socket
import traceback
from array import array
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

PACKET = 1 << 15  # bytes, of which some hundred packets fit into a socket
IN_A_FILE = b"in a file"


@dataclass(frozen=True)
class More:
    """Make the batches up to number ``last``; the segments ``released`` are free."""

    last: int
    released: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Call:
    """Call a pickled function with the collector and pickled arguments, between two batches."""

    number: int
    pickled: bytes


@dataclass(frozen=True)
class Batch:
    """A batch, counted from 1, and its frames; none if the worker's collector has ended.

    It is where it lies, and itself or the error of unpacking it once the trainer has received it.
    """

    number: int
    batch: Any = None
    frames: int = 0


@dataclass(frozen=True)
class Answer:
    """The pickled result of the call of this number, or what it raised; the worker goes on.

    All batches that were made before the call have been sent before its answer.
    """

    number: int
    result: bytes | Failure


class WorkerTraceback(Exception):
    """The cause of an exception that a worker raised: the worker's traceback, between quotes."""


@dataclass(frozen=True)
class Failure:
    """An exception as a pickle; by itself, it is what ended the worker."""

    pickled: bytes

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Make any exception portable: one that is not becomes a ``RuntimeError``."""
        text = "".join(traceback.format_exception(error))
        failure = cls(b"")
        with contextlib.suppress(Exception):  # its __init__ or __reduce__ may prevent that
            failure = cls(cloudpickle.dumps((error, text)))  # its class may be a local one
            if isinstance(failure.exception(), Exception):
                return failure
        last = text.rstrip().rsplit("\n", 1)[-1]
        message = f"worker: expected it to collect, got {last}; its traceback is above"
        return cls(pickle.dumps((RuntimeError(message), text)))

    def exception(self) -> Exception:
        """The exception, with the worker's traceback as its cause."""
        error, text = pickle.loads(self.pickled)
        error.__cause__ = WorkerTraceback(f'\n"""\n{text}"""')
        return error


def post(end: socket.socket, message: Any, flags: int = 0, descriptor: int | None = None) -> None:
    """Send a message, with the descriptor of a file if one is given, from any thread.

    It is lost if the other process is gone, of which those who wait are told.
    """
    data, descriptors = pickle.dumps(message), [] if descriptor is None else [descriptor]
    with contextlib.suppress(ConnectionError), contextlib.ExitStack() as stack:
        if len(data) > PACKET:
            # map() leaves Ctrl-C no place between a descriptor and the file that will close it.
            (file,) = map(open, map(os.memfd_create, ["fusedrl-message"]), ["w+b"])
            stack.enter_context(file)
            file.write(data)
            file.flush()
            data, descriptors = IN_A_FILE, [file.fileno(), *descriptors]
        rights = socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors)
        end.sendmsg([data], [rights], flags)


def receive(end: socket.socket) -> tuple[Any, int | None]:
    """The next message, and the descriptor that came with it; ``EOFError`` if none will come."""
    data, descriptors, flags, _ = socket.recv_fds(end, PACKET, 2)
    if not data:
        raise EOFError
    if flags & socket.MSG_CTRUNC:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    if data == IN_A_FILE:
        with os.fdopen(descriptors.pop(0), "rb") as file:
            file.seek(0)
            data = file.read()
    return pickle.loads(data), descriptors[0] if descriptors else None
