"""The address of a channel, which a publisher sends to processes that are to read it."""

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
    publisher lives. It holds a secret that no other channel has: once the publisher is gone the
    handle opens nothing, even if another process has got the publisher's process id.
    """

    pid: int
    fd: int
    session: str = field(repr=False)

    def open(self, socket: sockets.socket | None = None) -> WeightReader:
        """Become a reader of the channel.

        Args:
            socket: a connected Unix socket, which receives the channel from
                :meth:`WeightChannel.send_to`. It is needed by processes that see other process ids
                than the publisher, such as containers on one machine.

        Raises:
            RuntimeError: the publisher is gone or has another version of this package, this process
                cannot see it or may not, the channel has ``max_readers`` readers, or this process
                has too many open files. The message has the kernel's reason.
        """
        if socket is None:
            return self._reader(self.pid, self.fd)
        data, descriptors, flags, _ = sockets.recv_fds(socket, 1, 1)
        if not descriptors:
            cut = flags & sockets.MSG_CTRUNC
            got = "too many open files" if cut else "no file" if data else "its end"
            raise RuntimeError(
                "socket: expected the channel's file from WeightChannel.send_to, got "
                f"{got}; call send_to on the other end"
            )
        received = descriptors[0]
        try:
            return self._reader(os.getpid(), received)
        finally:
            os.close(received)

    def _reader(self, pid: int, fd: int) -> WeightReader:
        from fusedrl.channel.reader import WeightReader

        try:
            end = _host.Reader(pid, fd, self.session)
        except OverflowError as error:
            raise RuntimeError(
                f"max_readers: expected fewer than {error} open readers, got all; close some, or "
                "create the channel with more"
            ) from None
        except OSError as error:
            raise RuntimeError(
                f"handle: expected a running publisher with pid {self.pid}, with its channel open, "
                f"of this user and seen by this process, got '{error.strerror}'; take a new handle "
                "from a publisher that runs, or, between containers, pass the channel with "
                "WeightChannel.send_to and open(socket)"
            ) from error
        except ValueError as error:
            raise RuntimeError(
                f"handle: expected a running publisher with pid {self.pid}, of this session, got "
                f"{error}; take a new handle from the publisher"
            ) from error
        try:
            return WeightReader(end, self.session)
        except BaseException:
            end.close()  # the traceback of the error would keep it open
            raise
