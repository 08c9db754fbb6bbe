"""What the functions in TRL's place say of themselves, each once."""

from __future__ import annotations

import logging

import torch

logger = logging.getLogger("fusedrl")

_said: set[str] = set()


def log_once(message: str) -> None:
    """Warn of something that holds for every step that follows, the first time."""
    if not torch.compiler.is_compiling() and message not in _said:
        _said.add(message)
        logger.warning(message)
