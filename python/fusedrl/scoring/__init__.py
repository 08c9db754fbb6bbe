"""Score conversations under a policy and a reference: the job behind ``fusedrl score``.

``job`` runs the job, and ``settings`` has its options. ``records`` reads the files, ``chats``
recognises the formats of their rows, ``messages`` converts messages to the form of chat templates,
``tokenization`` renders and tokenises them and finds the assistant's tokens, ``pretrained`` and
``checkpoint`` load and check the two models, and ``batch_scores`` computes the scores. ``tables``
and ``report`` write the results, and ``output`` makes all files appear, or none.

torch and transformers are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fusedrl.scoring.errors import ChatError, ScoreError
from fusedrl.scoring.settings import Settings

if TYPE_CHECKING:
    from fusedrl.scoring.job import Summary as Summary
    from fusedrl.scoring.job import score_chats as score_chats

__all__ = ["ChatError", "ScoreError", "Settings", "Summary", "score_chats"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'fusedrl.scoring' has no attribute {name!r}")
    from fusedrl.scoring import job

    return getattr(job, name)
