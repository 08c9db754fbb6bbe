"""What a trainer and its worker say to each other, and what is said of an exception.

A message is the name of a method at the other end, and its arguments. It is a packet, which arrives
whole or not at all, whoever is killed or interrupted.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import traceback
from array import array
from typing import Any

import cloudpickle

PACKET = 1 << 15  # bytes, of which some hundred packets fit into a socket
IN_A_FILE = b"in a file"


class WorkerTraceback(Exception):
    """The cause of an exception that a worker raised: the worker's traceback, between quotes."""


def pickled(error: BaseException) -> bytes:
    """An exception and its traceback; one that cannot be pickled becomes a ``RuntimeError``."""
    text = "".join(traceback.format_exception(error))
    with contextlib.suppress(Exception):  # its __init__ or __reduce__ may prevent that
        data = cloudpickle.dumps((error, text))  # its class may be a local one
        if isinstance(unpickled(data), Exception):
            return data
    last = text.rstrip().rsplit("\n", 1)[-1]
    message = f"worker: expected it to collect, got {last}; its traceback is above"
    return pickle.dumps((RuntimeError(message), text))


def unpickled(data: bytes) -> Exception:
    """The exception, with the worker's traceback as its cause."""
    error, text = pickle.loads(data)
    error.__cause__ = WorkerTraceback(f'\n"""\n{text}"""')
    return error


def post(end: socket.socket, *message: Any, flags: int = 0, descriptor: int | None = None) -> None:
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
    # Not by socket.recv_fds(), which takes flags and does not pass them on.
    data, rights, flags, _ = end.recvmsg(PACKET, socket.CMSG_LEN(8), socket.MSG_CMSG_CLOEXEC)
    descriptors = array("i", b"".join(content for _, _, content in rights))
    if not data:
        raise EOFError
    if flags & socket.MSG_CTRUNC:
        raise OSError("too many open files; raise their limit (ulimit -n), or open fewer")
    if data == IN_A_FILE:
        with os.fdopen(descriptors.pop(0), "rb") as file:
            file.seek(0)
            data = file.read()
    return pickle.loads(data), descriptors[0] if descriptors else None
