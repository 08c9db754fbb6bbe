"""The worker process of an ``AsyncCollector``, which collects into shared memory.

The main thread collects. A second thread receives messages and detects the end of the trainer.
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

POLL_S = 0.2  # a fork may keep the sentinel of a dead process open: poll too
ORPHANED_S = 1.0  # time to shut down after the trainer has ended

logger = logging.getLogger("fusedrl")


class Job:
    """Pickles the function that makes the collector; errors of unpickling reach the trainer.

    Weights that the policy's scheme transfers are pickled as meta tensors.
    """

    def __init__(self, make: Callable[[], Any], weights: Iterable[Weight], scheme: Any) -> None:
        self._make = make
        names = {} if scheme is None else {*scheme.channel.layout.view_of, *scheme.buffers}
        self._transferred = {id(each.tensor) for each in weights if each.name in names}

    def __call__(self) -> Callable[[], Any]:
        """The function."""
        return self._make

    def __reduce__(self) -> Any:
        """Pickle the function now: multiprocessing can pickle locks only while spawning."""
        transferred = self._transferred

        class Pickler(cloudpickle.Pickler):
            def reducer_override(self, obj: Any) -> Any:
                if id(obj) not in transferred:
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
    """Make the collector, whose models follow the channels of ``schemes`` by name."""
    torch.set_num_threads(num_sub_threads)
    if init_fn is not None:
        init_fn()
    policy = make_policy()
    scheme = schemes.get("policy")
    if scheme is not None:  # torchrl's constructor may call the policy
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
    """Raised in the main thread by SIGTERM, to stop the worker."""


def main(end: socket.socket, trainers_end: socket.socket, job: Job) -> None:
    """Run the worker until the trainer stops it or ends."""
    trainers_end.close()
    # A separate process group: signals to the trainer's group do not reach the worker, and killing
    # this group ends the children of the environment. Launchers send SIGINT to each process.
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A background group would be stopped when it accesses the terminal: ignore these signals, so
    # that writing settings works and reading is an error.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    signal.signal(signal.SIGTTIN, signal.SIG_IGN)
    if torchrl.filter_warnings_subprocess:
        warnings.simplefilter("ignore")
    # Runs after the exit handlers registered later, and skips the teardown of modules, which takes
    # seconds.
    atexit.register(os._exit, 0)
    Worker(end).run(job)


class Worker:
    """Runs a collector and serves the trainer over a socket."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._collected = self._requested = 0  # numbers of batches
        self._orphaned = False
        self._segments = Segments()
        self._collector: Any = None
        self._batches: Iterator[Any] | None = None
        self._main_thread = threading.get_ident()

    def run(self, job: Job) -> None:
        """Make the collector, then collect and answer calls until the end."""
        try:
            signal.signal(signal.SIGTERM, _interrupt)
            threading.Thread(target=self._listen, daemon=True, name="fusedrl-listen").start()
            self._collector = job()()
            while True:
                self._do_next()
        except Interrupted:
            pass
        except BaseException as error:  # also SystemExit of user code
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            post(self._socket, "fail", pickled(error))
        finally:
            with contextlib.suppress(Exception):
                if self._collector is not None:
                    self._collector.shutdown()
            if self._orphaned:
                os.killpg(0, signal.SIGKILL)

    def _do_next(self) -> None:
        """Handle the next message, or collect if none is waiting."""
        if self._collected < self._requested and self._requests.empty():
            self._collected += 1
            self._collect()
        else:
            method, *arguments = self._requests.get()
            getattr(self, method)(*arguments)

    def _collect(self) -> None:
        self._batches = self._batches or iter(self._collector)
        batch, descriptor = next(self._batches, None), None
        if batch is None:
            self._batches = None  # iterate again if another state is loaded
        else:
            batch, descriptor = self._segments.pack(batch)
        post(self._socket, "take", frames_of(self._collector), batch, descriptor=descriptor)
        if descriptor is not None:
            os.close(descriptor)

    # Methods named in messages of the trainer.

    def make(self, last: int, released: Iterable[int] = ()) -> None:
        """Collect batches up to this number, counted from 1; ``released`` segments are free."""
        self._requested = max(self._requested, last)
        self._segments.release(released)

    def call(self, number: int, request: bytes, frames: int | None) -> None:
        """Call a pickled function with the collector; ``frames`` resets its frame count.

        Batches collected before have already been sent when the answer is posted.
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
        """Receive messages in a thread, and end this process when the trainer ends."""
        trainer: Any = multiprocessing.parent_process()
        parent = os.getppid()
        # A fork of the trainer may keep its ends of the socket and the sentinel open.
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
            logger.exception("AsyncCollector: the worker ends, since it cannot reach its trainer")
        self._orphaned = True
        signal.pthread_kill(self._main_thread, signal.SIGTERM)
        time.sleep(ORPHANED_S)
        os.killpg(0, signal.SIGKILL)


def _interrupt(*_: Any) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Interrupted


# Functions that the trainer sends; the first argument is the worker's collector.


def set_version(collector: Any, version: Any) -> None:
    """Tag the following turns with this version."""
    for tracker in trackers_of(collector):
        tracker.version = version


def set_seed(collector: Any, seed: int, static_seed: bool) -> Any:
    """Seed environment, torch and numpy, and reset the environment; returns the last seed."""
    last = collector.set_seed(seed, static_seed=static_seed)
    torch.manual_seed(seed)
    np.random.seed(seed)
    collector.reset()
    return last


def state_on_cpu(collector: Any) -> Any:
    """The collector's state with CPU tensors."""
    return map_leaves(lambda x: x.cpu() if isinstance(x, Tensor) else x, collector.state_dict())


def load_state(collector: Any, state: dict[str, Any], strict: bool, loads: bool) -> None:
    """Check a state, and load it if ``loads``; ``strict`` requires the policy's weights."""
    has_weights = policy_with_state(collector) is not None
    check_state(collector.state_dict(), state, strict and has_weights)
    if loads:
        collector.load_state_dict(state, strict=False)
        if "policy_version" in state:
            set_version(collector, state["policy_version"])
