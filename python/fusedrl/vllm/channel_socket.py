"""A Unix socket that passes a channel to processes of another pid namespace."""

from __future__ import annotations

import contextlib
import os
import socket as sockets
import threading
from pathlib import Path

from fusedrl.channel import WeightChannel


class ChannelSocket:
    """Passes a channel to each process that connects, until it is closed.

    Args:
        channel: the channel to pass.
        path: path of the socket, which is created here, for the user of this process alone.

    Raises:
        ValueError: the path exists, or the socket cannot be made there.
    """

    def __init__(self, channel: WeightChannel, path: str) -> None:
        self.path = path
        self._channel = channel
        self._socket = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
        try:
            self._socket.bind(path)
            Path(path).chmod(0o600)
            self._socket.listen()
        except OSError as error:
            self._socket.close()
            raise ValueError(
                f"socket: expected a path for a new Unix socket, got {path}: "
                f"{error.strerror or error}; remove what is there, or choose a shorter "
                "path in a folder of your own"
            ) from error
        self._owner = os.getpid()
        threading.Thread(target=self._serve, name="fusedrl-socket", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            # The other end reports it if it has gone away again, or if the channel is closed.
            with connection, contextlib.suppress(OSError, RuntimeError):
                self._channel.send_to(connection)

    def close(self) -> None:
        """Stop passing the channel; may be called again."""
        # This wakes a thread that waits in accept(), and close() does not.
        with contextlib.suppress(OSError):
            self._socket.shutdown(sockets.SHUT_RDWR)
        self._socket.close()
        if os.getpid() == self._owner:
            Path(self.path).unlink(missing_ok=True)
