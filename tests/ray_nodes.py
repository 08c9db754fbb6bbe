"""Ray for the tests: a cluster of two nodes of this machine, started by the first that needs it."""

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

NODES = ["left", "right"]
NAMESPACE = "fusedrl-tests"


class Nodes:
    """The cluster, while there is one."""

    def __init__(self) -> None:
        self._cluster: Any = None
        self._on_sigterm: Any = None

    def start(self) -> Any:
        """The cluster, where no actor runs, and whose workers can import the tests' modules."""
        if self._cluster is not None:
            end_actors()
            return self._cluster
        import ray
        from ray.cluster_utils import Cluster

        self._on_sigterm = signal.getsignal(signal.SIGTERM)
        node = {"num_cpus": 2, "object_store_memory": 80 * 2**20}  # /dev/shm may be small
        head = {
            **node,
            "include_dashboard": False,
            "resources": {NODES[0]: 1},
            "_system_config": {"prestart_worker_first_driver": False},  # they are no forks
        }
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._cluster.add_node(**node, resources={NODES[1]: 1})
        tests = str(Path(__file__).parent)
        environment: dict[str, Any] = {"env_vars": {"PYTHONPATH": tests, "OMP_NUM_THREADS": "1"}}
        if sys.platform == "linux":
            environment["py_executable"] = ray_forks.EXECUTABLE
        ray.init(
            address=self._cluster.address,
            namespace=NAMESPACE,
            log_to_driver=False,
            runtime_env=environment,
        )
        return self._cluster

    def stop(self) -> None:
        """End it, and with it what Ray does to this process."""
        if self._cluster is None:
            return
        import ray

        ray.shutdown()
        self._cluster.shutdown()
        self._cluster = None
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
