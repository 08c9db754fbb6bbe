"""The bundled chats, a tiny chat model made from them in seconds, and an environment of them."""

from fusedrl.demo.models import CHATS, make_reference

__all__ = ["CHATS", "make_reference"]
