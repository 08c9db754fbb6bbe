"""Python programs that begin at once, where those of a new interpreter import for seconds.

They are forks of a process that has imported what others wrote; they import fusedrl themselves.
Those that are about what an interpreter is started with, or loads, are no such programs, and what
is about its end is ``taken_apart``.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

import forks

IMPORTED = {
    "torch": ["torch._dynamo"],
    "tensordict": [],
    "torchrl": [
        "torchrl.collectors.llm",
        "torchrl.data",
        "torchrl.envs.llm.transforms",
        "torchrl.modules.llm",
        "torchrl.testing.mocking_classes",
    ],
    "transformers": ["transformers.models.auto", "transformers.models.qwen2.modeling_qwen2"],
    "rich": ["rich.console"],
}


def server() -> forks.Server:
    """One for all processes that share the tests."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    lives_with = os.getpid() if run is None else os.getppid()
    there = [name for name in IMPORTED if importlib.util.find_spec(name)]
    modules = [module for name in there for module in (name, *IMPORTED[name])]
    return forks.Server(f"fusedrl-programs-{run or lives_with}", modules, lives_with)


def start(
    *arguments: str | Path,
    stdout: IO[Any],
    stderr: IO[Any],
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    taken_apart: bool = False,
) -> forks.Program:
    """``python *arguments``: a script, or ``-c`` and its text."""
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123
        files = [file.fileno() for file in (nothing, stdout, stderr)]
        given = [str(argument) for argument in arguments]
        environ = dict(os.environ) if env is None else env
        folder = str(cwd or Path.cwd())
        return forks.start(server(), given, files, environ, folder, taken_apart=taken_apart)


def python(
    *arguments: str | Path,
    stdout: IO[Any] | None = None,
    stderr: IO[Any] | None = None,
    taken_apart: bool = False,
    **where: Any,
) -> subprocess.CompletedProcess[str]:
    """The program's end, with what it has written where no file is given."""
    if sys.platform != "linux":
        files = {"stdout": stdout or subprocess.PIPE, "stderr": stderr or subprocess.PIPE}
        command = [sys.executable, *arguments]
        return subprocess.run(command, **files, **where, text=True, check=False)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as told:
        files = {"stdout": stdout or out, "stderr": stderr or told}
        program = start(*arguments, **files, **where, taken_apart=taken_apart)
        try:
            status = program.wait()
        finally:
            program.kill()
        for file in (out, told):
            file.seek(0)
        texts = (file.read().decode() for file in (out, told))
        return subprocess.CompletedProcess(list(arguments), status, *texts)
