"""The command line: one module for each command, imported only for that command.

The module of a command has ``add_arguments(parser)``, ``run(args) -> exit code`` and ``EXAMPLES``,
the epilog of its help, with examples and exit codes. ``check``, ``bench`` and ``info`` print tables
with :func:`table`, which needs no further package.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import select
import signal
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from fusedrl import __version__

COMMANDS = {
    "score": "score chats under a policy and a reference: log-probs, KL, a heat map",
    "demo": "train a tiny policy with GRPO, and score the drift in its answers",
    "check": "compare every kernel with its plain-torch reference on this machine",
    "bench": "benchmark every op against what it replaces on this machine",
    "info": "print versions, devices and compiled libraries, and what is missing",
}

EPILOG = """\
Start with `fusedrl demo`; run `fusedrl check` on a new machine.
`fusedrl COMMAND --help` has examples and exit codes.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    named = argv[0] if argv and argv[0] in COMMANDS else "fusedrl"
    try:
        try:
            return _run(argv, named)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # an error at exit could not be caught
    except OSError as error:
        broken = isinstance(error, BrokenPipeError)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        # Other broken pipes, such as that of a worker, are ordinary errors.
        if sys.stdout is None or not (full or (broken and _has_no_reader(sys.stdout))):
            raise
        # Discard buffered output, which Python would fail to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if broken:
            return 128 + signal.SIGPIPE
        print(f"{named}: cannot write the output: {error.strerror}", file=sys.stderr)
        return 2


def _has_no_reader(stream: TextIO) -> bool:
    poll = select.poll()
    poll.register(stream.fileno(), select.POLLOUT)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _run(argv: list[str], named: str) -> int:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="fusedrl",
        description="Compiled kernels and drop-in torchrl classes for LLM post-training.",
        epilog=EPILOG,
        formatter_class=as_written,
    )
    parser.add_argument("--version", action="version", version=f"fusedrl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = parser
    try:
        for name, summary in COMMANDS.items():
            command = commands.add_parser(
                name, help=summary, description=summary, formatter_class=as_written
            )
            if name == named:
                module = importlib.import_module(f"fusedrl.cli.{name}")
                chosen = command
                module.add_arguments(command)
                command.epilog = module.EXAMPLES
                command.set_defaults(run=module.run)
        args, unknown = parser.parse_known_args(argv or ["--help"])
        if unknown:
            chosen.error(f"unrecognized arguments: {' '.join(unknown)}")
        return args.run(args)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        from fusedrl.cli.info import PACKAGES  # imports torch
        from fusedrl.compat.requirements import requirement

        if package not in PACKAGES:
            raise
        wanted = requirement(package)
        print(f'{named}: needs {package}: pip install "{wanted}"', file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{named}: interrupted", file=sys.stderr)
        return 130


def table(*rows: Sequence[Any]) -> str:
    """A Markdown table, aligned for terminals: header row first, names left, text last."""
    cells = [[" ".join(str(x).replace("|", "\\|").split()) for x in row] for row in rows]
    name, *wide = [max(map(len, column)) for column in zip(*cells, strict=True)]
    wide[-1] = 0
    padded = ([x.ljust(name), *map(str.rjust, rest, wide)] for x, *rest in cells)
    heading, *lines = (f"| {' | '.join(row)} |" for row in padded)
    return "\n".join([heading, "|---" * (1 + len(wide)) + "|", *lines])
