"""Checks of a job's inputs that need no model, so that a wrong path is told before any is loaded.

Nothing here loads torch or transformers, which takes seconds.
"""

from __future__ import annotations

from pathlib import Path

from fusedrl.scoring.chats import Survey, survey
from fusedrl.scoring.errors import ScoreError, reason
from fusedrl.scoring.records import Source


def check_inputs(chats: Source, policy: str, reference: str, template: Path | None) -> Survey:
    """Refuse a file or a folder that is not there, or that cannot be read.

    A model's name that may be one on a hub is left to whoever loads the model.

    Args:
        chats: the file of conversations.
        policy: directory or hub name.
        reference: directory or hub name.
        template: the file of a chat template, or ``None``.

    Returns:
        How many conversations the file has, and in which format.

    Raises:
        ScoreError: an input is refused; the message names it.
    """
    _check_file("chats", chats.path)
    read_template(template)
    for role, name in (("policy", policy), ("reference", reference)):
        _check_model(role, str(name))
    return survey(chats)


def read_template(path: Path | None) -> str | None:
    """The text of a chat template; ``None`` without a path.

    Raises:
        ScoreError: the file cannot be read, is not UTF-8, or is empty.
    """
    if path is None:
        return None
    _check_file("chat_template", path)
    try:
        # A byte order mark would be rendered at the start of every chat, so it is dropped.
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ScoreError(
            f"chat_template: cannot read {path}: {reason(error)}; check its permissions"
        ) from error
    except UnicodeDecodeError as error:
        raise ScoreError(
            f"chat_template: expected UTF-8 text in {path}: {reason(error)}; convert it to UTF-8"
        ) from error
    if not text.strip():
        raise ScoreError(
            f"chat_template: expected a Jinja template, got the empty file {path}; "
            "leave it out for the policy's own"
        )
    return text


def _check_file(name: str, path: Path) -> None:
    try:
        if path.is_file():
            return
        problem = "found something else" if path.exists() else "found none"
    except OSError as error:
        problem = reason(error)
    raise ScoreError(f"{name}: expected a file, {problem} at {path}; check the path")


def _check_model(role: str, name: str) -> None:
    path = Path(name)
    if not _can_only_be_a_path(name) or path.is_dir():
        return
    if path.is_file():
        raise ScoreError(
            f"{role}: expected a folder, found a file at {name}; "
            "pass the folder that save_pretrained wrote"
        )
    raise ScoreError(f"{role}: expected a folder, found none at {name}; check the path")


def _can_only_be_a_path(name: str) -> bool:
    """Whether a model of this name is no model of a hub, which are ``name`` or ``owner/name``."""
    return name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1
