"""The command line: one module for each command, imported only when its command is named.

The module of a command has ``add_arguments(parser)``, ``run(args) -> exit code`` and ``EXAMPLES``,
which is the end of its help: lines to paste into a shell, and the exit codes.
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
from typing import TextIO

from fusedrl import __version__

COMMANDS = {
    "score": "score your chats under a policy and its reference: log-probs, KL, a heat map",
    "demo": "train a tiny policy by GRPO, and score its drift in its own answers",
    "check": "compare every kernel with its definition in plain torch on this machine",
    "bench": "time every op beside what it replaces on this machine",
    "info": "print versions, devices and compiled libraries, and what is missing",
}

NEXT = """\
fusedrl: compiled kernels and drop-in torchrl classes for LLM post-training.

Begin here:
  fusedrl demo            # train a tiny policy by GRPO, and score its drift
  fusedrl check           # compare each kernel with its definition here
  fusedrl info            # what is installed, and how to get what is missing

Then:
  fusedrl score --help    # score your own chats with your own models
  fusedrl bench --quick   # how fast the ops are on this machine, in two minutes

`fusedrl --help` lists the commands and the exit codes.
`fusedrl COMMAND --help` has examples of a command.
"""

EXIT_CODES = """\
exit codes:
  0    the command is done
  1    a check failed, an answer was wrong, or chats were left out
  2    arguments or input were refused
  130  Ctrl-C
  141  nobody reads the rest of the output, as behind `| head`

`fusedrl COMMAND --help` has examples of a command.
"""

# Modules that commands import and that a plain installation may lack, named as their packages.
OPTIONAL = (
    *("transformers", "tokenizers", "tqdm", "jinja2", "pyarrow", "rich", "matplotlib", "vllm"),
    "peft",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Without arguments it prints what to do next. ``EXIT_CODES`` says what the codes mean.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    named = argv[0] if argv and argv[0] in COMMANDS else None
    try:
        try:
            return _run(argv, named)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here rather than at exit, where an error could not be caught
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        broken = isinstance(error, BrokenPipeError)
        if sys.stdout is None or not (full or (broken and _nobody_reads(sys.stdout))):
            raise
        # What is still buffered goes nowhere: Python would fail to flush it at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if broken:
            return 128 + signal.SIGPIPE
        print(f"{named or 'fusedrl'}: cannot write the output: {error.strerror}", file=sys.stderr)
        return 2


def _nobody_reads(stream: TextIO) -> bool:
    poll = select.poll()
    poll.register(stream.fileno(), select.POLLOUT)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _run(argv: list[str], named: str | None) -> int:
    if not argv:
        print(NEXT, end="")
        return 0
    parser = argparse.ArgumentParser(
        prog="fusedrl",
        description="Compiled kernels and drop-in torchrl classes for LLM post-training.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fusedrl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    try:
        for name, summary in COMMANDS.items():
            command = commands.add_parser(
                name,
                help=summary,
                description=f"{summary[0].upper()}{summary[1:]}.",
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
            if name == named:
                module = importlib.import_module(f"fusedrl.cli.{name}")
                module.add_arguments(command)
                command.epilog = module.EXAMPLES
                command.set_defaults(run=module.run)
        args = parser.parse_args(argv)
        return args.run(args)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in OPTIONAL:
            raise
        from fusedrl.cli.info import requirement  # imports torch

        wanted = requirement(package)
        print(f'{named}: needs {package}: pip install "{wanted}"', file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{named or 'fusedrl'}: interrupted", file=sys.stderr)
        return 130
