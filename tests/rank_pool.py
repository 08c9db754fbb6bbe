"""Processes that are the ranks of one gloo group, and run functions together."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from prepared import processes

PATIENCE = 60  # seconds that a rank waits for another in a collective


class RankPool:
    """So many ranks, on one thread each, until :meth:`close`."""

    def __init__(self, size: int, folder: Path) -> None:
        self._pipes, self.workers = [], []
        for rank in range(size):
            ours, theirs = processes.Pipe()
            arguments = theirs, rank, size, str(folder / f"store{size}")
            worker = processes.Process(target=_serve, args=arguments, daemon=True)
            worker.start()
            theirs.close()
            self._pipes.append(ours)
            self.workers.append(worker)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What each rank's ``function(*args)`` returns; an error of a rank is an error here."""
        self.send(function, *args)
        answers = list(map(self.answer, range(len(self._pipes))))
        failed = [f"rank {rank}:\n{text}" for rank, (text, _) in enumerate(answers) if text]
        assert not failed, "\n".join(failed)
        return [answer for _, answer in answers]

    def send(self, function: Callable[..., Any], *args: Any) -> None:
        """Let each rank call ``function(*args)``."""
        for pipe in self._pipes:
            pipe.send((function, args))

    def answer(self, rank: int) -> tuple[str | None, Any]:
        """The text of the error of a rank, or ``None``, and what its function returned."""
        assert self._pipes[rank].poll(2 * PATIENCE), f"rank {rank} hangs"
        return self._pipes[rank].recv()

    def close(self) -> None:
        """End the processes."""
        for worker, pipe in zip(self.workers, self._pipes, strict=True):
            pipe.close()
            worker.join(5)
            worker.kill()


def _serve(pipe: Any, rank: int, size: int, store: str) -> None:
    torch.set_num_threads(1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # whoever has blocked it
    patience = timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", f"file://{store}", patience, rank=rank, world_size=size)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = None, function(*args)
        except Exception:
            answer = traceback.format_exc(), None
        pipe.send(answer)
