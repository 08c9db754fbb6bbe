"""Warnings about lasting conditions, each logged once per process."""

from __future__ import annotations

import functools
import logging

import torch


def warn_once(message: str) -> None:
    """Log a warning the first time it occurs; log nothing while torch.compile traces."""
    if not torch.compiler.is_compiling():
        _warn(message)


@functools.cache
def _warn(message: str) -> None:
    logging.getLogger("fusedrl").warning(message)
