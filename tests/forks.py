"""Programs that begin at once: forks of a server that has imported what takes them seconds.

The first that asks for a server starts it, in its own environment. A request has the arguments of a
Python, its environment, folder and standard files; the server forks, tells the program's pid, and
how it ended. The server ends with the process that it is given.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
import threading
import types
from pathlib import Path
from typing import Any, NamedTuple

NUMBER = struct.Struct("i")


class Program:
    """A process that a server has forked, the leader of its own group."""

    def __init__(self, server: socket.socket) -> None:
        self._server = server
        self.pid: int = self._answer()
        self._status: int | None = None

    def wait(self) -> int:
        """Its exit status, or the negative number of the signal that ended it."""
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(self._answer())
            self._server.close()
        return self._status

    def ended(self) -> bool:
        return self._status is not None or bool(select.select([self._server], [], [], 0)[0])

    def kill(self) -> None:
        if not self.ended():
            os.kill(self.pid, signal.SIGKILL)

    def _answer(self) -> int:
        answer = self._server.recv(NUMBER.size, socket.MSG_WAITALL)
        if not answer:
            raise ConnectionResetError("the server of forks has ended")
        return NUMBER.unpack(answer)[0]


class Server(NamedTuple):
    """Where to ask, what it has imported, and the process that it ends with."""

    name: str
    modules: list[str]
    lives_with: int


def start(
    of: Server,
    arguments: list[str],
    files: list[int],
    environ: dict[str, str],
    folder: str,
    *,
    taken_apart: bool = False,
) -> Program:
    """What ``python *arguments`` would be in that environment, folder and with those files.

    Its modules are taken apart at its end only if asked for: with all that is imported, that takes
    as long as to start an interpreter.
    """
    address = f"\0{of.name}"  # no file
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(address)
            listener.listen(128)
        except OSError:
            pass  # another one starts the server, or has
        else:
            listener.set_inheritable(True)
            numbers = (str(listener.fileno()), str(of.lives_with))
            command = [sys.executable, __file__, *numbers, *of.modules]
            one_thread = {"OMP_NUM_THREADS": "1"}  # others would be no part of a fork
            os.posix_spawn(command[0], command, {**os.environ, **one_thread}, setsid=True)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.connect(address)
    asked = {"argv": arguments, "environ": environ, "folder": folder, "taken_apart": taken_apart}
    socket.send_fds(server, [b"\0"], files)
    server.sendall(json.dumps(asked).encode())
    server.shutdown(socket.SHUT_WR)
    return Program(server)


def serve(listener: socket.socket, lives_with: int) -> dict[str, Any]:
    """Returns in each program, with what was asked for; and does not in the server."""
    alive = os.pidfd_open(lives_with)
    programs: dict[int, tuple[int, socket.socket]] = {}
    while True:
        ready = select.select([listener, alive, *programs], [], [])[0]
        if alive in ready:
            sys.exit()
        for ended in set(ready) & set(programs):
            pid, asking = programs.pop(ended)
            os.close(ended)
            tell(asking, os.waitpid(pid, 0)[1])
            asking.close()
        if listener not in ready:
            continue
        asking, _ = listener.accept()
        asked = request(asking)
        if asked is None:
            continue
        pid = os.fork()
        if not pid:
            for opened in (listener, asking, *(asking for _, asking in programs.values())):
                opened.close()
            for opened in (alive, *programs):
                os.close(opened)
            return asked
        programs[os.pidfd_open(pid)] = pid, asking
        tell(asking, pid)
        for file in asked["files"]:
            os.close(file)


def request(asking: socket.socket) -> dict[str, Any] | None:
    """None of one who has gone before it was sent."""
    _, files, _, _ = socket.recv_fds(asking, 1, 3)
    try:
        with asking.makefile("rb") as stream:
            return {**json.load(stream), "files": files}
    except (OSError, ValueError):
        asking.close()
        return None


def tell(asking: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # whoever asked may be gone
        asking.sendall(NUMBER.pack(number))


def become(
    files: list[int], argv: list[str], environ: dict[str, str], folder: str, taken_apart: bool
) -> None:
    """What Python would be if it were started so."""
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = writer(1)
    sys.stderr = sys.__stderr__ = writer(2, errors="backslashreplace", line_buffering=True)
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv[:] = argv if argv[0] != "-c" else ["-c", *argv[2:]]
    if taken_apart:
        run(*argv[:2])
    else:
        os._exit(run_and_flush(*argv[:2]))


def run(path: str, text: str = "") -> None:
    if path == "-c":
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(text, vars(main))
    else:
        sys.path.insert(0, str(Path(path).parent))
        runpy.run_path(path, run_name="__main__")


def run_and_flush(*program: str) -> int:
    """Up to the end of a program, as an interpreter does it; returns the status."""
    status: Any = 0
    try:
        run(*program)
    except SystemExit as stopped:
        status = stopped.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except Exception as error:
        print("Exception ignored:", error, file=sys.stderr)
        status = 120
    return status


def writer(number: int, **options: Any) -> io.TextIOWrapper:
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    binary = open(number, "wb", 0 if unbuffered else -1, closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(binary, write_through=unbuffered, **options)


if __name__ == "__main__":
    number, lives_with, *modules = sys.argv[1:]
    sys.path.pop(0)
    for module in modules:
        importlib.import_module(module)
    threads = os.listdir("/proc/self/task")  # noqa: PTH208
    assert len(threads) == 1, "the imports have started threads, of which a fork has none"
    become(**serve(socket.socket(fileno=int(number)), int(lives_with)))
