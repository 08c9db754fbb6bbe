"""The bundled chats, and two tiny chat models made from them in seconds."""

from fusedrl.demo.models import CHATS, make_models

__all__ = ["CHATS", "make_models"]
