"""The reader's end of a weight channel."""

from __future__ import annotations

import faulthandler
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

from tensordict import TensorDict
from torch import Tensor, nn

from fusedrl import _host
from fusedrl.channel.checks import MAX_VERSION, SLICE_S, count, seconds
from fusedrl.channel.cuda import CudaMemory
from fusedrl.channel.follow import FOLLOWERS, Follower, ModuleFollower, Target, followers_of
from fusedrl.channel.memory import Closed, HostMemory, Memory, read_manifest

_Tensors = tuple[Tensor, int, list[Tensor], TensorDict]  # slot, its address, its views
# The targets of load_into(), by each part of the module, as parameters may outlive a wrapper around
# them. C code forgets a module that is deleted, so that no interrupt can be lost there.
_LOADED: dict[weakref.ref[nn.Module], Target] = {}


@dataclass(frozen=True)
class WeightHandle:
    """The address of a channel: small, picklable, without tensors.

    Processes of the publisher's user, on its machine, can open it while the publisher runs. It
    contains a secret of this channel, so that it never opens another one.
    """

    pid: int
    fd: int
    session: str = field(repr=False)

    def open(self) -> WeightReader:
        """Open the channel as a reader.

        Raises:
            RuntimeError: the publisher has ended, or runs another version of this package or as
                another user; the channel has ``max_readers`` readers; or the kernel refuses. The
                message says which.
        """
        try:
            end = _host.Reader(self.pid, self.fd, self.session)
        except (OSError, ValueError) as error:
            raise RuntimeError(
                f"handle: expected a running publisher with pid {self.pid}, with its channel open, "
                f"of this user and visible to this process, got '{error}'; get a new handle from a "
                "running publisher, and let containers share the PID namespace"
            ) from error
        try:
            return WeightReader(end, self.session)
        except BaseException:
            end.close()  # the error's traceback would keep it open
            raise


class Lease(_host.Lease):
    """One complete version of the weights, unchanged while the lease is held.

    It is released once: by ``release()``, at the end of its ``with`` block, or when it is dropped.
    Its tensors do not hold it: they may be overwritten after the release. ``version`` is its
    number; ``held`` is whether it is not released and its reader is open.
    """

    __slots__ = ("reader",)
    reader: WeightReader

    @property
    def weights(self) -> TensorDict:
        """Read-only views of the channel's memory, nested by the dots of the names."""
        return self._tensors()[3]

    @property
    def views(self) -> list[Tensor]:
        """The same tensors in a list, one for each stored entry of the layout."""
        return self._tensors()[2]

    def _tensors(self) -> _Tensors:
        reader, slot = self.reader, self.slot  # read before another thread releases it
        reader.require_open()
        if not self.held:
            raise RuntimeError(
                f"lease: expected one that is held, got version {self.version} after its release; "
                "use the weights inside the with block, or clone them"
            )
        known = reader._slots.get(slot)
        # Pickling a view for another process moves its storage into other shared memory.
        if known is None or known[0].data_ptr() != known[1]:
            flat = reader.memory.slot(slot)
            views = reader.layout.views(flat)
            known = flat, flat.data_ptr(), views, reader.layout.tensordict(views).lock_()
            reader._slots[slot] = known
        return known


class WeightReader:
    """Reads complete versions of a channel's weights; :meth:`WeightHandle.open` makes one.

    Threads may share a reader; a forked child has to open the handle again. ``applied`` is the
    version that :meth:`load_into` loaded last; :attr:`ReaderInfo.applied`, which the publisher
    sees, is the newest version that was leased.
    """

    def __init__(self, end: _host.Reader, session: str) -> None:
        self.layout, self._timeout, memory = read_manifest(end.manifest())
        if not faulthandler.is_enabled():  # shows the line that writes to read-only memory
            faulthandler.enable(file=2)
        self._end: Any = end
        self.session = session
        self.on_gpu = memory["kind"] == "cuda"
        self.memory: Memory = (
            CudaMemory.open(memory) if self.on_gpu else HostMemory(end, self.layout.nbytes)
        )
        self.device = self.memory.device
        self._slots: dict[int, _Tensors] = {}
        # Re-entrant: the garbage collector may close a reader within a call.
        self._lock = threading.RLock()
        self.applied: int | None = None

    @property
    def version(self) -> int | None:
        """The newest published version, ``None`` before the first."""
        version = self._end.version()
        return None if version < 0 else version

    @property
    def is_open(self) -> bool:
        """Whether it is open, and was opened by this process."""
        return self._end.is_open()

    def require_open(self) -> None:
        """Raise ``RuntimeError`` if this is closed, or was opened by a parent process."""
        self._end.require_open()

    def wait_for(self, version: int, timeout: float | None = None) -> int:
        """Wait until ``version`` or a later one is published, and return the newest.

        Raises:
            TimeoutError: not published in ``timeout`` seconds; ``None``: the channel's timeout.
            RuntimeError: the publisher has ended; the message has its process id.
        """
        count("version", version, 0, MAX_VERSION)
        limit = seconds("timeout", timeout, self._timeout)
        deadline = time.monotonic() + limit
        while (newest := self._end.version()) < version:
            ended, remaining = self._end.ended(), deadline - time.monotonic()
            if (ended is not None or remaining <= 0) and self._end.version() < version:
                raise (TimeoutError if ended is None else RuntimeError)(
                    f"version: expected {version} or later within {limit} s, "
                    f"got {'none' if newest < 0 else newest}, and the publisher "
                    f"(pid {self._end.publisher_pid()}) {ended or 'runs'}; call publish() there, "
                    "raise timeout, or open the handle of a new channel if this one has ended"
                )
            self._end.wait(version, min(remaining, SLICE_S))
        return newest

    def lease(self, min_version: int | None = None, timeout: float | None = None) -> Lease:
        """Lease the newest version, which does not change until the lease is released.

        It waits for the first version, or for ``min_version`` or a later one.

        Raises:
            TimeoutError, RuntimeError: as for :meth:`wait_for`.
            RuntimeError: the current stream captures a CUDA graph.
        """
        self.require_open()
        if isinstance(self.memory, CudaMemory):
            self.memory.refuse_capture()
        self.wait_for(0 if min_version is None else min_version, timeout)
        deadline = 0.0
        while not (lease := Lease(self._end)).held:  # another version was published meanwhile
            limit = seconds("timeout", timeout, self._timeout)
            deadline = deadline or time.monotonic() + max(limit, SLICE_S)
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"timeout: expected to lease the newest version within {limit} s, got another "
                    "one at each attempt; publish less often, or raise timeout"
                )
        lease.reader = self
        if isinstance(self.memory, CudaMemory):
            lease.before_release = self.memory.give_back
        return lease

    def follow(
        self, module: nn.Module, mode: str = "alias", between_calls: bool = False
    ) -> Follower:
        """Keep a module at the newest version, which changes between calls and never during one.

        ``with follower.call() as version:`` encloses a call. The module's ``state_dict()`` returns
        copies, and its parameters require no gradients, since training would alter a version.
        Parameters that are replaced get the version again. A second call returns the same follower.

        Args:
            module, mode: as for :meth:`load_into`.
            between_calls: in alias mode, hold the version until the next one is loaded. Otherwise
                it is held only during calls, and weights may change between them.

        Raises:
            TypeError, ValueError: the module does not fit, follows with other arguments, or has
                parameters of another follower, or that this process publishes in the channel.
        """
        self.require_open()
        for f in [*FOLLOWERS]:
            if (f.reader, f.module, f.mode, f.between_calls) == (self, module, mode, between_calls):
                return f
        return ModuleFollower(self, module, mode, between_calls)

    def load_into(
        self,
        module: nn.Module,
        mode: str = "alias",
        *,
        min_version: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """Load the newest version into a module, and return its number.

        With ``"alias"`` parameters point to the channel's memory and require no gradients. Buffers
        are copied, as a forward pass may write to them. The version is held until the next one is
        loaded, the reader is closed, or all parts of the module are deleted; other tensors made
        from a parameter do not hold it. On a GPU, load on a stream that waits for the streams that
        use the previous version. On the CPU, a process that writes to a parameter ends with SIGSEGV
        and prints the line.

        With ``"copy"`` the version is copied into the module's memory, which keeps its addresses
        (for CUDA graphs), dtypes and gradients. Nothing is held afterwards.

        Args:
            module: has the channel's names and shapes; for alias, also its dtypes and device.
            min_version, timeout: as for :meth:`lease`.

        Raises:
            TypeError, ValueError: the module does not fit, follows a channel, or is the one that
                this process publishes; it keeps its weights.
            TimeoutError, RuntimeError: as for :meth:`lease`.
        """
        self.require_open()
        self.wait_for(0 if min_version is None else min_version, timeout)
        # One thread at a time, so that none loads an older version than the last.
        with self._lock, self.lease(min_version, timeout) as lease:
            target = _LOADED.get(weakref.ref(module))
            # By identity: two readers may have equal layouts. Target() refuses followed modules.
            fits = target and target.layout is self.layout and target.module() is module
            if not target or not fits or target.mode != mode or followers_of(module):
                target = Target(module, self, mode)
                parts = [weakref.ref(part, _LOADED.pop) for part in module.modules()]
                for former in {_LOADED[part] for part in parts if part in _LOADED}:
                    former.copy_aliased()
                _LOADED.update(dict.fromkeys(parts, target))
            target.load(lease.views, lease)
            self.applied = lease.version
            return lease.version

    def close(self) -> None:
        """Release all leases and close all followers; modules loaded by alias get other memory.

        Other tensors over the channel's memory, such as ``parameter.data``, may be overwritten. On
        a GPU it waits for the device if a lease is held. In a forked child it does nothing.
        """
        if not self.is_open:
            return
        for follower in [*FOLLOWERS]:
            if follower.reader is self:
                follower.close()
        with self._lock:
            for target in {*_LOADED.copy().values()}:
                if target.layout is self.layout:
                    target.copy_aliased()
            if isinstance(self.memory, CudaMemory) and self._end.leases():
                self.memory.synchronize()
            self.memory.close()
            self._end.close()
            self._end, self._slots = Closed(self._end.version()), {}

    def __enter__(self) -> WeightReader:
        """The reader."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.close()

    def __reduce__(self) -> Any:
        """Raise ``TypeError``: only a handle can be sent to another process."""
        raise TypeError(
            "channel: expected a WeightHandle to send to another process, got a "
            f"{type(self).__name__}; send channel.handle and open it there"
        )
