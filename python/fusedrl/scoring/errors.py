"""What a scoring job refuses, in words that every terminal and file can hold."""

from __future__ import annotations

import re


class ScoreError(ValueError):
    """Input that the whole job cannot go on with; the message says what to change."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class ChatError(ScoreError):
    """One chat that cannot be scored; the message starts with ``file:line``."""

    def __init__(self, where: str, problem: str) -> None:
        """``where`` is ``file:line``."""
        super().__init__(f"{where}: {problem}")


def printable(text: str) -> str:
    """``text`` on one line, with lone surrogates and control characters written as escapes.

    A path that is not UTF-8 has surrogates, as any text from JSON may, and no file takes them.
    """
    return re.sub(
        r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]",
        lambda match: match[0].encode("unicode_escape").decode(),
        text,
    )


def reason(error: BaseException) -> str:
    """What an exception of another library says, on one line of bounded length."""
    text = " ".join(str(error).split())
    if not isinstance(error, OSError | ValueError) or not text:
        text = f"{type(error).__name__}: {text}".removesuffix(": ")
    return text if len(text) <= 400 else f"{text[:400]}..."
