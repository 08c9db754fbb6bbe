"""The worker process of an ``AsyncCollector``, which collects into shared memory.

The main thread collects. A second one receives the trainer's messages, and waits for its end.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import multiprocessing
import os
import pickle
import queue
import select
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal, NoReturn

import cloudpickle
import numpy as np
import torch
import torchrl
from torch import Tensor, nn

from fusedrl.channel import WeightHandle
from fusedrl.channel.tensors import Weight
from fusedrl.collectors.options import check_state
from fusedrl.collectors.process.messages import pickled, post, receive
from fusedrl.collectors.process.shared_batches import Segments
from fusedrl.compat.torch import map_leaves
from fusedrl.compat.torchrl import frames_of, policy_with_state, set_frames
from fusedrl.weights.collector import follow_policy, one_version_a_batch, trackers_of

POLL_S = 0.2  # how often to check a process whose sentinel another process may keep open
ORPHANED_S = 1.0  # seconds to end in, once the trainer is gone

logger = logging.getLogger("fusedrl")


class Job:
    """Gives the worker a function that makes the collector, unpacked where errors are reported.

    The weights that the policy's scheme brings arrive on the meta device.
    """

    def __init__(self, make: Callable[[], Any], weights: Iterable[Weight], scheme: Any) -> None:
        self._make = make
        names = {} if scheme is None else {*scheme.channel.layout.view_of, *scheme.buffers}
        self._brought = {id(each.tensor) for each in weights if each.name in names}

    def __call__(self) -> Callable[[], Any]:
        """The function."""
        return self._make

    def __reduce__(self) -> Any:
        """Pickle the function, while the process is started and locks can be pickled too."""
        brought = self._brought

        class Pickler(cloudpickle.Pickler):
            def reducer_override(self, obj: Any) -> Any:
                if id(obj) not in brought:
                    return super().reducer_override(obj)  # pyright: ignore[reportAttributeAccessIssue]
                empty = torch.empty(obj.shape, dtype=obj.dtype, device="meta")
                if isinstance(obj, nn.Parameter):
                    empty = nn.Parameter(empty, requires_grad=False)
                return empty.__reduce_ex__(2)

        file = io.BytesIO()
        Pickler(file).dump(self._make)
        return partial, (pickle.loads, file.getvalue())


def make_collector(
    make: Callable[..., Any],
    make_policy: Callable[[], Any],
    channel: WeightHandle | None,
    schemes: dict[str, Any],
    *,
    channel_mode: Literal["alias", "copy"] = "alias",
    num_sub_threads: int = 1,
    init_fn: Callable[[], None] | None = None,
    pre_collect_hook: Callable[[], None] | None = None,
    post_collect_hook: Callable[[Any], None] | None = None,
) -> Any:
    """A collector whose models follow the channels of ``schemes``, named like them."""
    torch.set_num_threads(num_sub_threads)
    if init_fn is not None:
        init_fn()
    policy = make_policy()
    scheme = schemes.get("policy")
    if scheme is not None:  # the collector calls the policy, which needs its weights by then
        scheme.init_on_receiver(model_id="policy", model=policy)
        scheme.connect()
    collector = make(policy=policy)
    collector.pre_collect_hook, collector.post_collect_hook = pre_collect_hook, post_collect_hook
    if schemes:
        collector.register_scheme_receiver(schemes)
    if channel is not None:
        follower, _ = follow_policy(channel, collector.policy, channel_mode)
        one_version_a_batch(collector, follower, is_policy=True)
    return collector


class Interrupted(BaseException):
    """Raised in the main thread, wherever it is, when the worker has to end."""


def main(end: socket.socket, trainers_end: socket.socket, job: Job) -> None:
    """Collect what the trainer requests, until it says stop or ends."""
    trainers_end.close()
    # A signal to the trainer's group does not come here, and one to this group reaches what the
    # environment starts. Launchers send Ctrl-C to each process.
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A terminal stops processes of other groups than the trainer's that change its settings or read
    # from it. So it lets them, and reading is an error.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    signal.signal(signal.SIGTTIN, signal.SIG_IGN)
    if torchrl.filter_warnings_subprocess:
        warnings.simplefilter("ignore")
    # A spawned process runs this after what is registered from here on, and frees no modules, which
    # would take seconds.
    atexit.register(os._exit, 0)
    Worker(end).run(job)


class Worker:
    """Runs a collector for the trainer, at the other end of a socket."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._made = self._wanted = 0  # numbers of batches
        self._orphaned = False
        self._segments = Segments()
        self._collector: Any = None
        self._batches: Iterator[Any] | None = None
        self._main_thread = threading.get_ident()

    def run(self, job: Job) -> None:
        """Make the collector, then collect and answer until the end."""
        try:
            signal.signal(signal.SIGTERM, _interrupt)
            threading.Thread(target=self._listen, daemon=True, name="fusedrl-listen").start()
            self._collector = job()()
            while True:
                self._do_next()
        except Interrupted:
            pass
        except BaseException as error:  # also SystemExit, which a policy or a tool may raise
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            post(self._socket, "fail", pickled(error))
        finally:
            with contextlib.suppress(Exception):
                if self._collector is not None:
                    self._collector.shutdown()
            if self._orphaned:
                os.killpg(0, signal.SIGKILL)

    def _do_next(self) -> None:
        """Do what the trainer asks for next; its messages come before batches."""
        if self._made < self._wanted and self._requests.empty():
            self._made += 1
            self._collect()
        else:
            method, *arguments = self._requests.get()
            getattr(self, method)(*arguments)

    def _collect(self) -> None:
        self._batches = self._batches or iter(self._collector)
        batch, descriptor = next(self._batches, None), None
        if batch is None:
            self._batches = None  # another state may be loaded, with which collecting goes on
        else:
            batch, descriptor = self._segments.pack(batch)
        post(self._socket, "take", frames_of(self._collector), batch, descriptor=descriptor)
        if descriptor is not None:
            os.close(descriptor)

    # What the trainer asks for.

    def make(self, last: int, released: Iterable[int] = ()) -> None:
        """Make the batches up to this number, counted from 1; some segments are free."""
        self._wanted = max(self._wanted, last)
        self._segments.release(released)

    def call(self, number: int, request: bytes, frames: int | None) -> None:
        """Call a pickled function with the collector, which then begins anew with this count.

        All batches that were made before have been sent before the answer.
        """
        try:
            function, args = pickle.loads(request)
            result = cloudpickle.dumps(function(self._collector, *args))
            if frames is not None:
                set_frames(self._collector, frames)
            post(self._socket, "answer", number, result, frames is not None)
        except Exception as error:
            post(self._socket, "fail", pickled(error), number)

    def _listen(self) -> None:
        """Receive messages in a thread, and end the process once the trainer has ended."""
        trainer: Any = multiprocessing.parent_process()
        parent = os.getppid()
        # A process that the trainer has forked may keep its ends of the socket and of a pipe open.
        ends = select.poll()
        ends.register(self._socket, select.POLLIN)
        ends.register(trainer.sentinel, select.POLLIN)
        with contextlib.suppress(OSError, AttributeError):
            ends.register(os.pidfd_open(trainer.pid), select.POLLIN)
        try:
            while True:
                ready = dict(ends.poll(POLL_S * 1000))
                if self._socket.fileno() in ready:
                    message, _ = receive(self._socket)
                    if not message:
                        signal.pthread_kill(self._main_thread, signal.SIGTERM)
                    else:
                        self._requests.put(message)
                elif ready or os.getppid() != parent:
                    break
        except (EOFError, ConnectionError):
            pass
        except Exception:
            logger.exception("AsyncCollector: the worker ends, as it can hear its trainer no more")
        self._orphaned = True
        signal.pthread_kill(self._main_thread, signal.SIGTERM)
        time.sleep(ORPHANED_S)
        os.killpg(0, signal.SIGKILL)


def _interrupt(*_: Any) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Interrupted


# What the trainer calls here, with the worker's collector as the first argument.


def set_version(collector: Any, version: Any) -> None:
    """Tag what is collected from now on with this version."""
    for tracker in trackers_of(collector):
        tracker.version = version


def set_seed(collector: Any, seed: int, static_seed: bool) -> Any:
    """Seed the environment, torch and numpy, and reset the environment; returns the last seed."""
    last = collector.set_seed(seed, static_seed=static_seed)
    torch.manual_seed(seed)
    np.random.seed(seed)
    collector.reset()
    return last


def state_on_cpu(collector: Any) -> Any:
    """The collector's state, with tensors that may be sent."""
    return map_leaves(lambda x: x.cpu() if isinstance(x, Tensor) else x, collector.state_dict())


def load_state(collector: Any, state: dict[str, Any], strict: bool, loads: bool) -> None:
    """Load a state, or only raise unless it fits; ``strict`` wants the policy's weights in it."""
    has_weights = policy_with_state(collector) is not None
    check_state(collector.state_dict(), state, strict and has_weights)
    if loads:
        collector.load_state_dict(state, strict=False)
        if "policy_version" in state:
            set_version(collector, state["policy_version"])
