"""What a publisher gives to other processes, for them to become readers."""

from __future__ import annotations

import os
import socket as sockets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fusedrl import _host

if TYPE_CHECKING:
    from fusedrl.channel.reader import WeightReader


@dataclass(frozen=True)
class WeightHandle:
    """The address of a channel: small, picklable, without tensors.

    Only processes of the publisher's user, on its machine, can open it, and only while the
    publisher lives. The session is a secret that no other channel has: a handle whose publisher is
    gone opens nothing, even if another process has its pid by then.
    """

    pid: int
    fd: int
    session: str = field(repr=False)

    def open(self, socket: sockets.socket | None = None) -> WeightReader:
        """Become a reader of the channel.

        Args:
            socket: receives the channel from :meth:`WeightChannel.send_to`, where this process sees
                other pids than the publisher (containers on one machine): a connected Unix socket.

        Raises:
            RuntimeError: the publisher is gone, or this process may not or cannot see it; the
                channel has ``max_readers`` already.
        """
        from fusedrl.channel.reader import WeightReader

        if socket is None:
            return WeightReader(self._end(self.pid, self.fd))
        _, descriptors, _, _ = sockets.recv_fds(socket, 1, 1)
        if not descriptors:
            raise RuntimeError(
                "socket: expected the channel's file from WeightChannel.send_to, got no file; call "
                "send_to on the other end"
            )
        received = descriptors[0]
        try:
            return WeightReader(self._end(os.getpid(), received))
        finally:
            os.close(received)

    def _end(self, pid: int, fd: int) -> _host.Reader:
        try:
            return _host.Reader(pid, fd, self.session)
        except OverflowError as error:
            raise RuntimeError(
                f"max_readers: expected fewer than {error} open readers, got all; close some, or "
                "create the channel with more"
            ) from None
        except (RuntimeError, ValueError) as error:
            raise RuntimeError(
                f"handle: expected a running publisher with pid {self.pid}, of this user and seen "
                f"by this process, got {error}; take a new handle from the publisher, or between "
                "containers WeightChannel.send_to and open(socket)"
            ) from error
