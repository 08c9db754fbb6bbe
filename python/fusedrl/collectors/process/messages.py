"""Messages between a trainer and its worker, and pickled exceptions.

A message is the name of a method of the receiver and its arguments. It is one packet, which arrives
whole or not at all even if a process is killed or interrupted.
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

PACKET = 1 << 15  # bytes; a socket buffers some hundred of these
IN_A_FILE = b"in a file"


class WorkerTraceback(Exception):
    """The traceback in the worker, as the cause of its exception."""


def pickled(error: BaseException) -> bytes:
    """Pickle an exception and its traceback; an unpicklable one becomes a ``RuntimeError``."""
    text = "".join(traceback.format_exception(error))
    with contextlib.suppress(Exception):  # its __init__ or __reduce__ may fail
        data = cloudpickle.dumps((error, text))  # its class may be local
        if isinstance(unpickled(data), Exception):
            return data
    last = text.rstrip().rsplit("\n", 1)[-1]
    message = f"worker: expected it to collect, got {last}; its traceback is above"
    return pickle.dumps((RuntimeError(message), text))


def unpickled(data: bytes) -> Exception:
    """Unpickle an exception, with the worker's traceback as its cause."""
    error, text = pickle.loads(data)
    error.__cause__ = WorkerTraceback(f'\n"""\n{text}"""')
    return error


def post(end: socket.socket, *message: Any, flags: int = 0, descriptor: int | None = None) -> None:
    """Send a message, optionally with a file descriptor; thread-safe.

    If the receiver is gone the message is lost; waiting callers get its failure.
    """
    data, descriptors = pickle.dumps(message), [] if descriptor is None else [descriptor]
    with contextlib.suppress(ConnectionError), contextlib.ExitStack() as stack:
        if len(data) > PACKET:
            # map(): Ctrl-C cannot come between memfd_create and the file object that closes it.
            (file,) = map(open, map(os.memfd_create, ["fusedrl-message"]), ["w+b"])
            stack.enter_context(file)
            file.write(data)
            file.flush()
            data, descriptors = IN_A_FILE, [file.fileno(), *descriptors]
        rights = socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors)
        end.sendmsg([data], [rights], flags)


def receive(end: socket.socket) -> tuple[Any, int | None]:
    """The next message and its file descriptor, if any; ``EOFError`` if the sender has ended."""
    # Not socket.recv_fds(), which ignores its flags.
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
