"""Warnings of what holds for all later calls, each logged once in a process."""

from __future__ import annotations

import functools
import logging

import torch


def warn_once(message: str) -> None:
    """Log a warning the first time that it is given; a graph that is being traced logs nothing."""
    if not torch.compiler.is_compiling():
        _warn(message)


@functools.cache
def _warn(message: str) -> None:
    logging.getLogger("fusedrl").warning(message)
