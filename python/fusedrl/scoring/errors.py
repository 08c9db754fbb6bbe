"""Errors of a scoring job, with printable messages."""

from __future__ import annotations

import re


class ScoreError(ValueError):
    """The job cannot continue with its input; the message has a remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class ChatError(ScoreError):
    """A chat cannot be scored; the message starts with ``file:line``."""

    def __init__(self, where: str, problem: str) -> None:
        """Prefix the problem with ``where``, which is ``file:line``."""
        super().__init__(f"{where}: {problem}")
        self.where = printable(where)


def printable(text: str) -> str:
    """``text`` on one line, with lone surrogates and control characters written as escapes.

    Non-UTF-8 paths and JSON strings may contain surrogates, which cannot be encoded.
    """
    return re.sub(
        r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]",
        lambda match: match[0].encode("unicode_escape").decode(),
        text,
    )


def reason(error: BaseException) -> str:
    """The message of an exception of another library, on one line of bounded length."""
    text = " ".join(str(error).split())
    if not isinstance(error, OSError | ValueError) or not text:
        text = f"{type(error).__name__}: {text}".removesuffix(": ")
    return text if len(text) <= 400 else f"{text[:400]}..."
