"""A linear op on one and on two threads, beside processes that keep the cores busy.

``python -m benchmarks.busy_cores`` prints medians in milliseconds: a row for each number of busy
processes. On cores that others use too, a call that waits for all its threads after each tile waits
for whichever of them does not run.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from fusedrl import linear_token_log_probs

ROWS, WIDTH, CLASSES = 304, 512, 32000
THREADS = (1, 2)
BUSY = (0, 1, 2, 4)
CALLS = 9


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """As many processes that never wait."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def milliseconds(call: Callable[[], object], threads: int) -> float:
    """The median of some calls, after one that does not count."""
    torch.set_num_threads(threads)
    call()
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def main() -> None:
    """Print the table."""
    hidden = torch.randn(ROWS, WIDTH).requires_grad_()
    weight = (torch.randn(CLASSES, WIDTH) / WIDTH**0.5).requires_grad_()
    tokens, upstream = torch.randint(0, CLASSES, (ROWS,)), torch.randn(ROWS)

    def forward() -> None:
        with torch.no_grad():
            linear_token_log_probs(hidden, weight, tokens)

    def forward_backward() -> None:
        out = linear_token_log_probs(hidden, weight, tokens).log_probs
        torch.autograd.grad(out, (hidden, weight), upstream)

    calls = {"forward": forward, "forward + backward": forward_backward}
    columns = [f"{name}, {threads} threads" for name in calls for threads in THREADS]
    print("busy processes", *columns, sep=" | ")
    for count in BUSY:
        with busy_processes(count):
            found = [milliseconds(call, threads) for call in calls.values() for threads in THREADS]
        print(count, *(f"{value:.0f} ms" for value in found), sep=" | ", flush=True)


if __name__ == "__main__":
    main()
