"""Tiny models, on one thread."""

from one_thread import one_thread

__all__ = ["one_thread"]
