"""Numbers that the options of commands take, each with what is wrong of another text."""

from __future__ import annotations

import argparse
import math
from contextlib import suppress


def count(text: str) -> int:
    """An integer of at least 1."""
    with suppress(ValueError):
        if int(text) >= 1:
            return int(text)
    raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")


def above_zero(text: str) -> float:
    """A finite number above 0."""
    with suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")


def not_negative(text: str) -> float:
    """A finite number of at least 0."""
    with suppress(ValueError):
        if 0 <= float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {text!r}")
