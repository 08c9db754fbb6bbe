"""Bundled chats, a tiny chat model trained on them in seconds, and an environment."""

from fusedrl.demo.models import CHATS, make_reference

__all__ = ["CHATS", "make_reference"]
