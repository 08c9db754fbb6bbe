"""Score conversations under a policy and a reference: the job behind ``fusedrl score``.

``job`` runs the whole. ``chats`` reads and checks the input, ``tokenization`` makes tokens of it
and finds those of the assistant, ``pretrained`` and ``checkpoint`` load and check the two models,
and ``batch_scores`` computes the scores. ``tables`` and ``report`` write the results, and
``output`` and ``signals`` take care that all files appear, or none.
"""

from fusedrl.scoring.errors import ChatError, ScoreError
from fusedrl.scoring.job import Settings, Summary, score_chats

__all__ = ["ChatError", "ScoreError", "Settings", "Summary", "score_chats"]
