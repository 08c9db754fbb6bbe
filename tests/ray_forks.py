"""Ray's workers as forks of a process that has imported what they need, which takes each seconds.

Ray starts ``ray_forks.py`` in the place of Python. The first that a node starts makes a server, in
the environment that the node gives its workers, and which ends with the node.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import forks

EXECUTABLE = f"{sys.executable} {Path(__file__).resolve()}"  # ``py_executable`` of a runtime_env
NODE = "RAY_RAYLET_PID"


def ask(arguments: list[str]) -> None:
    """Have a worker forked, and wait until it has ended."""
    # Ray reads the job once, when it is imported.
    name = f"fusedrl-ray-forks-{os.environ[NODE]}-{os.environ['RAY_JOB_ID']}"
    server = forks.Server(name, ["ray_imports"], int(os.environ[NODE]))
    forks.start(server, arguments, [0, 1, 2], dict(os.environ), str(Path.cwd())).wait()


if __name__ == "__main__":
    ask(sys.argv[1:])
