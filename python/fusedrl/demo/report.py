"""The training section of the ``report.html`` of ``fusedrl demo``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_PAGE = """\
<body>
<h1>How the policy was trained</h1>
<p class="soft">GRPO on the questions of the bundled chats, in two processes; the reward is the
fraction of digits in an answer. Rollouts were {staleness:.1f} versions stale on average,
{most:.0f} at most.</p>
<div class="plots">{reward}{kl}</div>
<table id="time" style="margin-bottom: 2rem">
<caption class="soft">Time of each part, {total:.0f} seconds in total</caption>{time}</table>
"""


def add_training(page: Path, batches: Sequence[dict[str, Any]], seconds: dict[str, Any]) -> None:
    """Insert the training section at the top of the report of ``fusedrl score``.

    Args:
        page: the report to edit.
        batches: result of ``train()`` of ``examples/grpo.py``.
        seconds: time of each part of the demo.
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
        reward=_plot("mean reward of an answer", versions, [batch["reward"] for batch in batches]),
        kl=_plot("mean KL to the reference, nats per answer", versions, [b["kl"] for b in batches]),
        total=total,
        time="".join(parts),
    )
    scored = page.read_text(encoding="utf-8")
    page.write_text(scored.replace("<body>\n", training, 1), encoding="utf-8")


def _plot(label: str, versions: Sequence[float], values: Sequence[float]) -> str:
    """A line plot of ``values`` over the batches, labelled with policy versions."""
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
        f"<figcaption>{label}, for each batch and its policy version</figcaption>"
        "</figure>"
    )


def parts_of(batches: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Seconds of the training by activity of the trainer."""
    first, *others = batches
    return {
        "start of the worker and first batch": first["waiting"],
        "waiting for later batches": sum(batch["waiting"] for batch in others),
        "loss, gradients and optimiser": sum(batch["training"] for batch in (first, *others)),
        "publishing weights": sum(batch["publishing"] for batch in (first, *others)),
    }
