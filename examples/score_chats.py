"""Score conversations from Python, and print the tokens with the largest KL.

Needs `pip install "fusedrl[score]"`; runs in seconds, mostly to train the two tiny models.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from pyarrow import parquet

from fusedrl.demo import CHATS, make_reference
from fusedrl.scoring import score_chats

with tempfile.TemporaryDirectory() as folder:
    policy, reference, out = (Path(folder) / name for name in ("policy", "reference", "out"))
    # Replace these with any two chat models that share a tokenizer.
    make_reference(reference, steps=20)
    make_reference(policy, steps=25)
    summary = score_chats(CHATS, str(policy), str(reference), out)
    print(f"{len(summary.rows)} chats, mean KL {summary.mean('kl_mean'):.3f} nats per token")

    tokens = parquet.read_table(out / "tokens.parquet")
    for row in tokens.sort_by([("kl", "descending")]).slice(length=5).to_pylist():
        print(f"chat {row['chat']:>2}  turn {row['turn']}  {row['text']!r:>14}  {row['kl']:.3f}")
