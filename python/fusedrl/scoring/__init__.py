"""Score conversations under a policy and a reference: the job behind ``fusedrl score``.

``chats`` reads and checks the input, ``masks`` finds the assistant tokens, ``models`` loads the two
models, ``batches`` runs them, ``tables`` and ``report`` write what comes out, ``output`` and
``signals`` see that it comes whole or not at all, ``job`` ties them.
"""

from fusedrl.scoring.errors import ChatError, ScoreError
from fusedrl.scoring.job import Settings, Summary, score_chats

__all__ = ["ChatError", "ScoreError", "Settings", "Summary", "score_chats"]
