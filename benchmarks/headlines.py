"""The comparisons that a stranger is shown: a few settings of the benchmarks, in plain words.

Where an op was measured in float32 and bfloat16, the dtype is the one in which we gain less.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .harness import Row


@dataclass(frozen=True)
class Headline:
    """What one bar shows; ``detail`` refers to the groups of the pattern ``setting``."""

    title: str
    op: str
    rival: str
    setting: str
    detail: str


@dataclass(frozen=True)
class Comparison:
    """Our time and memory beside a rival's, in one setting of a headline."""

    title: str
    detail: str
    speedup: float
    ours: Row
    rival: Row


HEADLINES = (
    Headline(
        title="KL-penalised rewards, two small models",
        op="RetrieveKL",
        rival="torchrl",
        setting=r"(\d+) x ~(\d+) tokens, .*hidden (128), V (\d+)",
        detail=r"vs. torchrl's RetrieveKL: \1 chats of \2 tokens, hidden size \3, \4 classes",
    ),
    Headline(
        title="KL-penalised rewards, two larger models",
        op="RetrieveKL",
        rival="torchrl",
        setting=r"(\d+) x ~(\d+) tokens, .*hidden (512), V (\d+)",
        detail=r"vs. torchrl's RetrieveKL: \1 chats of \2 tokens, hidden size \3, \4 classes",
    ),
    Headline(
        title="Exact KL from logits",
        op="exact_kl",
        rival="two log_softmax + sum",
        setting=r"\[(\d+), (\d+)\] float32, reverse",
        detail=r"vs. two log_softmax and a sum in torch: \1 tokens, \2 classes, float32",
    ),
    Headline(
        title="Token log-probs from logits",
        op="token_log_probs",
        rival="torchrl path",
        setting=r"\[(\d+), (\d+)\] bfloat16, 100% kept",
        detail=r"vs. torchrl's cross_entropy: \1 tokens, \2 classes, bfloat16",
    ),
    Headline(
        title="Token log-probs from hidden states",
        op="linear_token_log_probs",
        rival="lm_head + torchrl path",
        setting=r"(\d+) x (\d+) x (\d+) float32, 30% kept",
        detail=r"vs. LM head and torchrl's cross_entropy: \1 tokens, hidden size \2, \3 classes",
    ),
    Headline(
        title="Log-probs and entropy in TRL",
        op="trl: selective_log_softmax_and_entropy",
        rival="TRL",
        setting=r"\[(\d+), (\d+), (\d+)\] bfloat16",
        detail=r"vs. TRL's function: \1 rows of \2 tokens, \3 classes, bfloat16",
    ),
    Headline(
        title="GRPO loss and gradients in TRL",
        op="trl: fused LM head, forward + backward",
        rival="TRL",
        setting=r"GRPO, (\d+) tokens, hidden (\d+), V (\d+) float32",
        detail=r"vs. TRL's fused head: \1 tokens, hidden size \2, \3 classes, float32",
    ),
    Headline(
        title="KL-penalised rewards from log-probs",
        op="KLComputation",
        rival="torchrl",
        setting=r"(\d+) samples, lazy stack",
        detail=r"vs. torchrl's KLComputation: \1 samples of 64 to 1024 tokens, a lazy stack",
    ),
    Headline(
        title="Collecting dialogs",
        op="LLMCollector",
        rival="torchrl",
        setting=r"turns, (\d+) rows, (\d+) turns, lazy stack",
        detail=r"vs. torchrl's LLMCollector: \1 dialogs of \2 turns, overhead of the collector",
    ),
    Headline(
        title="Asynchronous collection during training",
        op="AsyncCollector: dialogs end to end",
        rival="torchrl",
        setting=r"(\d+) turns of (\d+) dialogs, .*",
        detail=r"vs. torchrl's AsyncCollector: \1 turns of \2 dialogs, a tiny model",
    ),
    Headline(
        title="Weight update of a worker",
        op="channel: update to computing",
        rival="torchrl",
        setting=r"(\d+ [MG]B), (\d+) tensors, one worker",
        detail=r"vs. torchrl's shared-memory scheme: \1 in \2 tensors, until a worker uses it",
    ),
    Headline(
        title="Weight update of a vLLM engine",
        op="vLLM update",
        rival="save_pretrained + reload_weights",
        setting=r"(\d+)M parameters, bfloat16",
        detail=r"vs. save_pretrained and reload_weights: \1 million parameters, bfloat16",
    ),
)


def comparisons(rows: Iterable[Row]) -> list[Comparison]:
    """The headlines that ``rows`` hold, the largest speed-up first."""
    settings: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.median_ms is not None:
            settings.setdefault((row.op, row.setting), []).append(row)
    found = [_largest(_of_headline(headline, settings)) for headline in HEADLINES]
    return sorted(filter(None, found), key=lambda one: one.speedup, reverse=True)


def _of_headline(
    headline: Headline, settings: dict[tuple[str, str], list[Row]]
) -> Iterator[Comparison]:
    for (op, setting), rows in settings.items():
        match = re.fullmatch(headline.setting, setting)
        ours = next((row for row in rows if row.ours), None)
        rival = next((row for row in rows if row.contender == headline.rival), None)
        if op == headline.op and match and ours and rival and rival.speedup is not None:
            detail = match.expand(headline.detail)
            yield Comparison(headline.title, detail, rival.speedup, ours, rival)


def _largest(found: Iterable[Comparison]) -> Comparison | None:
    """The setting in which the rival takes longest."""
    return max(found, key=lambda one: one.rival.median_ms or 0.0, default=None)
