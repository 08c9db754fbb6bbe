"""Messages between a trainer and its worker."""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import threading
from multiprocessing.connection import wait
from typing import Any

SIZE = struct.Struct("!Q")  # of the pickle that follows
CHUNK = 1 << 20
POLL_S = 0.5  # how often a process is looked at whose sentinel another one may hold


class Wire:
    """One end of a pair of sockets: several threads may send, one receives.

    An exception in the middle of a message spoils all later ones. In the trainer, which Ctrl-C
    interrupts, threads of their own therefore send and receive; as neither waits for the other,
    both sides may send messages of any size at the same time.

    Args:
        end: of the pair; it is closed with this.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()
        self._arrived = bytearray()

    def send(self, message: Any) -> None:
        """Send a message.

        Raises:
            OSError: nobody can receive it.
        """
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._sending:
            self._socket.sendall(SIZE.pack(len(data)) + data)

    def receive(self, process: Any = None) -> Any | None:
        """The next message; ``None`` once there will be none.

        Args:
            process: has the other end. Where it has started processes itself, these may hold its
                end open after it has ended.
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
        """Wait for further bytes; whether there are any."""
        while process is not None:
            ready = wait([self._socket, process.sentinel], POLL_S)
            if self._socket in ready:
                break
            if ready or not process.is_alive():
                if wait([self._socket], 0):  # said just before it ended
                    break
                return False
        try:
            data = self._socket.recv(CHUNK)
        except OSError:
            return False
        self._arrived += data
        return bool(data)

    def hang_up(self) -> None:
        """End what any thread of either process does here; what has arrived can still be read."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()
