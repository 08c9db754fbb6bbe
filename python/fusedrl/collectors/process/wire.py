"""Sends pickled messages between a trainer and its worker, over a pair of sockets."""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import threading
from multiprocessing.connection import wait
from typing import Any

SIZE = struct.Struct("!Q")  # the size of the pickle that follows
CHUNK = 1 << 20
POLL_S = 0.5  # how often to check a process whose sentinel another process may keep open


class Wire:
    """One end of a pair of sockets, on which several threads may send and one receives.

    An exception in the middle of a message would spoil all later ones. In the trainer, which Ctrl-C
    may interrupt, separate threads therefore send and receive. Neither waits for the other, so that
    both sides may send messages of any size at the same time.

    Args:
        end: one socket of the pair, which is closed with this object.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()
        self._arrived = bytearray()

    def send(self, message: Any) -> None:
        """Send a message.

        Raises:
            OSError: the other end is closed.
        """
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._sending:
            self._socket.sendall(SIZE.pack(len(data)) + data)

    def receive(self, process: Any = None) -> Any | None:
        """The next message; ``None`` once there will be none.

        Args:
            process: the process with the other end. Processes that it has started may keep the end
                open after it has ended.
        """
        while True:
            end = SIZE.size + self._announced()
            if SIZE.size < end <= len(self._arrived):
                data = bytes(memoryview(self._arrived)[SIZE.size : end])
                del self._arrived[:end]
                return pickle.loads(data)
            if not self._more(process):
                return None

    def _announced(self) -> int:
        return SIZE.unpack_from(self._arrived)[0] if len(self._arrived) >= SIZE.size else 0

    def _more(self, process: Any) -> bool:
        """Wait for more bytes, and return whether there are any."""
        while process is not None:
            ready = wait([self._socket, process.sentinel], POLL_S)
            if self._socket in ready:
                break
            if ready or not process.is_alive():
                if wait([self._socket], 0):  # it was sent just before the process ended
                    break
                return False
        try:
            data = self._socket.recv(CHUNK)
        except OSError:
            return False
        self._arrived += data
        return bool(data)

    def hang_up(self) -> None:
        """End all sending and waiting at both ends; what has arrived can still be read."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()
