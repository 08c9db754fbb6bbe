"""Ray's workers as forks of a process that has imported what they need, which takes each seconds.

Ray starts ``ray_forks.py`` in the place of Python. The first that a node starts makes a server, in
the environment that the node gives its workers; each sends the server its arguments, environment
and standard files, and waits for the end of the worker that the server forks. The server ends with
its node.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

EXECUTABLE = f"{sys.executable} {Path(__file__).resolve()}"  # ``py_executable`` of a runtime_env
NODE = "RAY_RAYLET_PID"


def ask(arguments: list[str]) -> None:
    """Have a worker forked, and wait until it has ended."""
    # Ray reads the job once, when it is imported. A name that begins with 0 is no file.
    name = f"\0fusedrl-ray-forks-{os.environ[NODE]}-{os.environ['RAY_JOB_ID']}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(name)
            listener.listen(128)
        except OSError:
            pass  # another one starts the server, or has
        else:
            subprocess.Popen(
                [sys.executable, __file__, "serve", str(listener.fileno())],
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.connect(name)
        asked = {"argv": arguments, "environ": dict(os.environ), "folder": str(Path.cwd())}
        socket.send_fds(server, [b"\0"], [0, 1, 2])
        server.sendall(json.dumps(asked).encode())
        server.shutdown(socket.SHUT_WR)
        server.recv(1)  # nothing: the worker's end closes


def serve(listener: socket.socket) -> None:
    import ray
    import ray_dialogs  # noqa: F401
    import ray_models  # noqa: F401
    import torchrl.objectives.llm  # noqa: F401

    title: Any = ray._raylet  # type: ignore[attr-defined]
    title.setproctitle("ray forks")  # remembers where the environment lies, before it is replaced
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a worker
    node = os.pidfd_open(int(os.environ[NODE]))
    while node not in select.select([listener, node], [], [])[0]:
        asking, _ = listener.accept()
        _, files, _, _ = socket.recv_fds(asking, 1, 3)
        with asking.makefile("rb") as stream:
            asked = json.load(stream)
        if os.fork() == 0:
            listener.close()
            os.close(node)
            become(files, **asked)
        asking.close()
        for file in files:
            os.close(file)


def become(files: list[int], argv: list[str], environ: dict[str, str], folder: str) -> None:
    """What Python would be if it were started so."""
    os.setpgid(0, 0)  # Ray kills a worker with its group
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    sys.argv[:] = argv
    sys.path[0] = str(Path(argv[0]).parent)
    runpy.run_path(argv[0], run_name="__main__")
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(socket.socket(fileno=int(sys.argv[2])))
    else:
        ask(sys.argv[1:])
