"""Ray's workers as forks of a process that has imported what they need, which takes each seconds.

Ray starts ``ray_forks.py`` in the place of Python. The first makes a server, in the environment
that Ray gives its workers, for all nodes of the process that has started them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import forks

EXECUTABLE = f"{sys.executable} {Path(__file__).resolve()}"  # ``py_executable`` of a runtime_env


def ask(arguments: list[str]) -> None:
    """Have a worker forked, and wait until it has ended."""
    node = Path(f"/proc/{os.environ['RAY_RAYLET_PID']}/stat").read_text()
    driver = int(node.rsplit(")", 1)[1].split()[1])  # the node's parent
    # Ray reads the job once, when it is imported.
    name = f"fusedrl-ray-forks-{driver}-{os.environ['RAY_JOB_ID']}"
    server = forks.Server(name, ["ray_imports"], driver)
    forks.start(server, arguments, [0, 1, 2], dict(os.environ), str(Path.cwd())).wait()


if __name__ == "__main__":
    ask(sys.argv[1:])
