"""Sends weights to workers of torchrl's multi-process collectors, by shared memory or by pipes."""

from __future__ import annotations

import threading
import time
from multiprocessing import connection
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from tensordict import TensorDictBase

# For each pipe, the threads that wrote, or still write, messages that have no answer yet.
_unanswered: WeakKeyDictionary[Any, list[threading.Thread]] = WeakKeyDictionary()


def worker_indices(collector: Any, worker_id: int | torch.device) -> list[int]:
    """Indices of the workers that ``worker_id`` names.

    Raises:
        ValueError: the collector has no such worker.
    """
    if isinstance(worker_id, int):
        indices = [worker_id] if 0 <= worker_id < collector.num_workers else []
    else:
        # Without a device the policy stays where it is.
        devices = enumerate(collector.policy_device)
        indices = [i for i, device in devices if device is None or device == worker_id]
    if not indices:
        raise ValueError(
            f"policy_weights: expected workers of the collector, 0 to {collector.num_workers - 1} "
            f"or devices {collector.policy_device}, got {worker_id!r}; name them by index or device"
        )
    return indices


def processes_of(collector: Any, worker_id: int | torch.device) -> list[int]:
    """Indices of the worker processes that ``worker_id`` names, after a check that all are alive.

    The list is empty if there is no collector, or if it has no processes.

    Raises:
        ValueError: the collector has no such worker.
        RuntimeError: the collector is shut down, or a worker is dead.
    """
    if not hasattr(collector, "procs"):
        return []
    if collector.closed:
        raise RuntimeError(
            "collector: expected a running one, got one that is shut down; make another"
        )
    indices = worker_indices(collector, worker_id)
    for index in indices:
        if not collector.procs[index].is_alive():
            raise _dead(collector, index)
    return indices


def wait_until_runs(collector: Any, index: int, deadline: float) -> None:
    """Wait until a worker's process is not stopped by a signal.

    Raises:
        RuntimeError: the worker dies meanwhile.
        TimeoutError: the worker is still stopped at ``deadline``, a time of ``time.monotonic()``.
    """
    process = collector.procs[index]
    while True:
        try:
            state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # gone
            state = "X"
        if state in "ZX" or not process.is_alive():
            raise _dead(collector, index)
        if state != "T":
            return
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(
                f"{_name(collector, index)}: expected a running process, got one that a signal "
                "stopped; let it go on with kill -CONT, or raise timeout"
            )
        connection.wait([process.sentinel], min(left, 0.02))


def reads(collector: Any, index: int, weights: TensorDictBase) -> bool:
    """Whether a worker's policy lives in the memory of ``weights``."""
    by_device = getattr(collector, "_policy_weights_dict", {})
    theirs = by_device.get(collector.policy_device[index])
    if theirs is None:
        return False
    for key, tensor in theirs.items(include_nested=True, leaves_only=True):
        ours = weights.get(key, None)
        if ours is None or ours.data_ptr() != tensor.data_ptr() or not ours.is_shared():
            return False
    return True


def update(collector: Any, index: int, weights: TensorDictBase, timeout: float) -> None:
    """Send weights through a worker's pipe, and wait until the worker has applied them.

    Raises:
        RuntimeError: the worker dies meanwhile, or drops batches if it is updated now.
        TimeoutError: it does not answer within ``timeout`` seconds.
    """
    if getattr(collector, "running", False) and not collector._running_free:
        raise RuntimeError(
            "collector: expected idle workers, got an asynchronous collector that is iterated: an "
            "update through its pipe makes a worker drop its batch and stop; pass the collector "
            "the policy itself, and TensorDict.from_module(policy) as policy_weights"
        )
    # Sending moves tensors into shared memory for good, so a copy is sent, as one buffer, because
    # each buffer needs an open file.
    copy = weights.data.consolidate(device=torch.device("cpu"))
    answer = _ask(collector, index, (copy, "update"), timeout)
    if not (isinstance(answer, tuple) and answer[-1] == "updated"):
        raise RuntimeError(
            f"{_name(collector, index)}: expected the answer 'updated', got {answer!r}; it belongs "
            "to an earlier message: make another collector"
        )


def _ask(collector: Any, index: int, message: Any, timeout: float) -> Any:
    """Send ``message`` and return its answer, past answers that earlier updates left unread."""
    deadline = time.monotonic() + timeout
    pipe, process = collector.pipes[index], collector.procs[index]
    writers = _unanswered.setdefault(pipe, [])
    earlier, failures = writers[-1:], []

    def send() -> None:
        try:
            for writer in earlier:  # two threads that write at a time would mix their messages
                writer.join()
            pipe.send(message)
        except Exception as error:
            failures.append(error)

    # A thread writes, because a full pipe blocks its writer until somebody reads.
    own = threading.Thread(target=send, daemon=True)
    writers.append(own)
    own.start()
    answer = None
    while writers:
        writers[0].join(max(0.0, deadline - time.monotonic()))
        if failures:
            writers.remove(own)
            if not isinstance(failures[0], ConnectionError):
                raise failures[0]
            raise _dead(collector, index) from failures[0]
        if not writers[0].is_alive():
            connection.wait([pipe, process.sentinel], max(0.0, deadline - time.monotonic()))
        try:
            if pipe.poll():
                answer = pipe.recv()
                writers.pop(0)
                continue
        except (EOFError, OSError) as error:
            raise _dead(collector, index) from error
        if not process.is_alive():
            raise _dead(collector, index)
        raise TimeoutError(
            f"{_name(collector, index)}: expected an answer within {timeout} s, got none; raise "
            "timeout if its rollouts take longer, else shut the collector down"
        )
    return answer


def busy(collector: Any, pids: set[int]) -> str:
    """The error message for workers that hold all slots of a channel."""
    workers = (i for i, process in enumerate(collector.procs) if process.pid in pids)
    names = ", ".join(_name(collector, index) for index in workers)
    return (
        f"timeout: expected the end of a policy call, got {names or pids} in one of an older "
        "version still; raise timeout, or make the updater with more slots"
    )


def _name(collector: Any, index: int) -> str:
    return f"worker {index} (pid {collector.procs[index].pid})"


def _dead(collector: Any, index: int) -> RuntimeError:
    collector.procs[index].join(1)  # its pipe closes a moment before it has an exit code
    return RuntimeError(
        f"{_name(collector, index)}: expected a living process, got exit code "
        f"{collector.procs[index].exitcode}; its own output says why it ended: make another "
        "collector"
    )
