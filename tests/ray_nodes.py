"""Ray for the tests: one node, started by the first that needs it."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import ray_forks

NAMESPACE = "fusedrl-tests"
# Ray takes a token that lies in the user's home, which programs that are forks would not have read.
os.environ["RAY_AUTH_MODE"] = "disabled"


class Nodes:
    """The cluster, while there is one."""

    def __init__(self) -> None:
        self._runs = False
        self._on_sigterm: Any = None

    def start(self) -> None:
        """A cluster where no actor runs, and whose workers can import the tests' modules."""
        if self._runs:
            end_actors()
            return
        import ray

        self._on_sigterm = signal.getsignal(signal.SIGTERM)
        folders = filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH")))
        variables = {"PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"}
        environment: dict[str, Any] = {"env_vars": variables}
        if sys.platform == "linux":
            environment["py_executable"] = ray_forks.EXECUTABLE
        ray.init(
            address="local",  # not that of another process
            num_cpus=4,
            object_store_memory=80 * 2**20,  # /dev/shm may be small
            include_dashboard=False,
            namespace=NAMESPACE,
            log_to_driver=False,
            runtime_env=environment,
            _system_config={"prestart_worker_first_driver": False},  # they are no forks
        )
        self._runs = True

    def stop(self) -> None:
        """End it, and with it what Ray does to this process."""
        if not self._runs:
            return
        import ray

        ray.shutdown()
        self._runs = False
        signal.signal(signal.SIGTERM, self._on_sigterm)


def living_actors() -> list[dict[str, Any]]:
    from ray._private.state import actors

    return [one for one in actors().values() if one["State"] in ("ALIVE", "PENDING_CREATION")]


def end_actors() -> None:
    """End what other files have left: a worker that waits for a task may hold a handle."""
    deadline = time.monotonic() + 120
    gc.collect()
    while living := living_actors():
        assert time.monotonic() < deadline, living
        for pid in (one["Pid"] for one in living if one["State"] == "ALIVE"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


nodes = Nodes()
