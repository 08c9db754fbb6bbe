"""How the policy of ``fusedrl demo`` was trained: the first part of its ``report.html``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_PAGE = """\
<body>
<h1>How the policy was trained</h1>
<p class="soft">GRPO on the questions of the bundled chats, in two processes; the reward is the
share of digits in an answer. The policy that generated was {staleness:.1f} versions behind on
average, {most:.0f} at most.</p>
<div class="plots">{reward}{kl}</div>
<table id="time" style="margin-bottom: 2rem">
<caption class="soft">Where {total:.0f} seconds went</caption>{time}</table>
"""


def add_training(page: Path, batches: Sequence[dict[str, Any]], seconds: dict[str, Any]) -> None:
    """Put the training in front of what ``fusedrl score`` wrote.

    Args:
        page: the report of the scoring.
        batches: what ``train()`` of ``examples/grpo.py`` returned.
        seconds: the time that each part of the demo took.
    """
    versions = [batch["version"] for batch in batches]
    behind = [batch["newest"] - batch["version"] for batch in batches]
    total = sum(seconds.values())
    parts = (
        f'<tr><td>{part}</td><td align="right">{taken:.1f} s</td>'
        f'<td align="right">{taken / total:.0%}</td></tr>'
        for part, taken in seconds.items()
    )
    training = _PAGE.format(
        staleness=sum(behind) / len(behind),
        most=max(behind),
        reward=_plot("reward of an answer", versions, [batch["reward"] for batch in batches]),
        kl=_plot("KL to the reference, nats an answer", versions, [b["kl"] for b in batches]),
        total=total,
        time="".join(parts),
    )
    scored = page.read_text(encoding="utf-8")
    page.write_text(scored.replace("<body>\n", training, 1), encoding="utf-8")


def _plot(label: str, versions: Sequence[float], values: Sequence[float]) -> str:
    """A line over the batches, from the least value or 0 to the largest, with versions marked."""
    low, high = min(0.0, *values), max(values)
    across = 460 / max(len(values) - 1, 1)
    points = " ".join(
        f"{10 + across * i:.1f},{165 - 145 * (value - low) / max(high - low, 1e-9):.1f}"
        for i, value in enumerate(values)
    )
    every = -(-len(values) // 6)
    marks = "".join(
        f'<text x="{10 + across * i:.1f}" y="182" text-anchor="middle">v{versions[i]:.0f}</text>'
        for i in range(0, len(values), every)
    )
    return (
        f'<figure><svg viewBox="0 0 480 190" role="img" aria-label="{label}">'
        f'<polyline points="{points}" fill="none" stroke="var(--bar)" stroke-width="2.5"/>'
        f'<text x="0" y="12">{high:.2f} at most</text>{marks}</svg>'
        f"<figcaption>{label}, batch after batch, and the versions that generated</figcaption>"
        "</figure>"
    )


def parts_of(batches: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Seconds of the training, by what the trainer did: the first batch includes the start."""
    first, *others = batches
    return {
        "start of the worker, until its first batch": first["waiting"],
        "waiting for further batches": sum(batch["waiting"] for batch in others),
        "loss, gradients and optimiser": sum(batch["training"] for batch in (first, *others)),
        "publishing weights": sum(batch["publishing"] for batch in (first, *others)),
    }
