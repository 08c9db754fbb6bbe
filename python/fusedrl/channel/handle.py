"""The address of a channel, which a publisher sends to processes that are to read it."""

from __future__ import annotations

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

    def open(self) -> WeightReader:
        """Become a reader of the channel.

        Raises:
            RuntimeError: the publisher is gone or has another version of this package, this process
                cannot see it or may not, the channel has ``max_readers`` readers, or this process
                has too many open files. The message has the kernel's reason.
        """
        from fusedrl.channel.reader import WeightReader

        try:
            end = _host.Reader(self.pid, self.fd, self.session)
        except OverflowError as error:
            raise RuntimeError(
                f"max_readers: expected fewer than {error} open readers, got all; close some, or "
                "create the channel with more"
            ) from None
        except (OSError, ValueError) as error:
            raise RuntimeError(
                f"handle: expected a running publisher with pid {self.pid}, with its channel open, "
                f"of this user and seen by this process, got '{error}'; take a new handle from a "
                "publisher that runs, and let containers share process ids"
            ) from error
        try:
            return WeightReader(end, self.session)
        except BaseException:
            end.close()  # the traceback of the error would keep it open
            raise
