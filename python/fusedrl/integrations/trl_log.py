"""Warnings of the functions that replace TRL's, each logged once."""

from __future__ import annotations

import logging

import torch

logger = logging.getLogger("fusedrl")

_said: set[str] = set()


def log_once(message: str) -> None:
    """Log a warning the first time that it is given, because it holds for all later steps."""
    if not torch.compiler.is_compiling() and message not in _said:
        _said.add(message)
        logger.warning(message)
