"""What a page shows in its blocks of text is what its programs and commands print."""

from __future__ import annotations

import doctest
import re
from itertools import pairwise
from pathlib import Path

NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


def blocks(page: Path, language: str) -> list[str]:
    """The blocks of a page in one language, as they stand."""
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def texts(page: Path, of: str) -> str:
    """What a page shows after its blocks of one language, such as ``python``, block after block."""
    pairs = pairwise(re.findall(r"```(\w+)\n(.*?)```", page.read_text(), re.DOTALL))
    return "".join(text for (before, _), (kind, text) in pairs if (before, kind) == (of, "text"))


def assert_prints(shown: str, printed: str, *, figures: bool = True) -> None:
    """``printed`` is what is ``shown``, where ``...`` stands for anything.

    Without ``figures``, which differ from machine to machine or were made by a longer run, each
    line that is shown was printed with some numbers.
    """
    if figures:
        checker, options = doctest.OutputChecker(), doctest.ELLIPSIS
        assert checker.check_output(shown, printed, options), printed
    else:
        lines = {form(line) for line in printed.splitlines()}
        missing = [line for line in shown.splitlines() if form(line) not in lines]
        assert [line for line in missing if line != "..."] == [], printed


def form(line: str) -> str:
    """A line without what its numbers are, and without how many of them follow each other."""
    return re.sub(r"#(?:,? #)+", "#", " ".join(NUMBER.sub("#", line).split()))
