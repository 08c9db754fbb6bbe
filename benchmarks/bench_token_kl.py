"""token_kl and KLComputation: KL-penalised rewards of ragged samples, beside torchrl's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDict, lazy_stack
from torchrl.envs.llm.transforms import KLComputation as Reference

from fusedrl import KLComputation, ragged, token_kl

from .harness import Case

COEFF = 0.1
COUNTS = {8: 4.0, 64: 10.0, 256: 10.0}  # samples -> least speed-up over torchrl on lazy stacks
COLUMN_GOAL = 20.0  # at 256 samples, over torchrl's lazy stacks of the same samples

Samples = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def make_samples(count: int, device: str) -> Samples:
    """Ragged samples of 64 to 1024 tokens: policy, reference, and a reward a token."""
    lengths = torch.randint(64, 1025, (count,), generator=torch.Generator().manual_seed(count))
    return [
        (
            -torch.rand(n, device=device),
            -torch.rand(n, device=device),
            torch.randn(n, 1, device=device),
        )
        for n in lengths.tolist()
    ]


def lazy(samples: Samples) -> Any:
    """As torchrl's collectors deliver them: a stack of one TensorDict a sample."""
    return lazy_stack(
        [
            TensorDict({"log_probs": {"full": p}, "ref_log_probs": {"full": q}, "reward": r})
            for p, q, r in samples
        ]
    )


def nested(samples: Samples, layout: torch.layout) -> Any:
    """One nested tensor a column."""
    packed = [ragged.from_list(list(column)) for column in zip(*samples, strict=True)]
    if layout == torch.strided:
        p, q, r = (ragged.to_strided(column) for column in packed)
    else:
        offsets = packed[0].offsets
        p, q, r = (ragged.to_jagged(ragged.Ragged(c.values, offsets)) for c in packed)
    return _columns(p, q, r, len(samples))


def padded(samples: Samples) -> Any:
    """Dense columns, NaN where there is no token."""
    p, q, r = (
        ragged.to_padded(ragged.from_list(list(column)), float("nan"))
        for column in zip(*samples, strict=True)
    )
    return _columns(p, q, r, len(samples))


def _columns(p: torch.Tensor, q: torch.Tensor, r: torch.Tensor, count: int) -> Any:
    data = {"log_probs": {"full": p}, "ref_log_probs": {"full": q}, "reward": r}
    return TensorDict(data, batch_size=[count])


def cases(device: str, quick: bool) -> Iterator[Case]:
    """Lazy stacks of every size; then the other representations of 256 samples."""
    ours, theirs = KLComputation(coeff=COEFF), Reference(coeff=COEFF)
    for count, goal in COUNTS.items():
        samples = make_samples(count, device)
        yield Case(
            op="KLComputation",
            setting=f"{count} samples, lazy stack",
            make_input=lambda samples=samples: lazy(samples),
            contenders={"torchrl": theirs, "fusedrl": ours},
            truth=lambda _, samples=samples: truth(samples),
            answer=lambda td: torch.cat([r.flatten() for r in td.get("reward", as_list=True)]),
            goals={"torchrl": goal},
        )
    yield from column_cases(device, ours, theirs)


def column_cases(device: str, ours: KLComputation, theirs: Reference) -> Iterator[Case]:
    """Against torchrl on a lazy stack of the same samples, its fastest form for a reward."""
    count = max(COUNTS)
    samples = make_samples(count, device)
    lengths = [len(p) for p, _, _ in samples]

    def packed_op(data: Any) -> Any:
        p, q, r, offsets = data
        return token_kl(p, q, offsets=offsets, reward=r, coeff=COEFF, nan="missing")

    p, q, r = (torch.cat(column) for column in zip(*samples, strict=True))
    packed = (p, q, r.squeeze(-1), ragged.offsets_of(lengths, p.device))
    forms = {
        "jagged": (lambda: nested(samples, torch.jagged), ours),
        "strided nested": (lambda: nested(samples, torch.strided), ours),
        "padded": (lambda: padded(samples), ours),
        "packed": (lambda: packed, packed_op),
    }
    for name, (make, run) in forms.items():
        yield Case(
            op="KLComputation" if name != "packed" else "token_kl",
            setting=f"{count} samples, {name}",
            make_input=lambda make=make: (lazy(samples), make()),
            contenders={
                "torchrl": lambda pair: theirs(pair[0]),
                "fusedrl": lambda pair, run=run: run(pair[1]),
            },
            truth=lambda _: truth(samples),
            answer=lambda out, lengths=lengths: rewards_of(out, lengths),
            goals={"torchrl": COLUMN_GOAL},
        )


def rewards_of(out: Any, lengths: list[int]) -> torch.Tensor:
    """The penalised rewards of any answer, packed."""
    if isinstance(out, tuple):
        return out[1]
    reward = out.get("reward", as_list=True)
    if isinstance(reward, torch.Tensor) and not reward.is_nested:
        return torch.cat([row[:n].flatten() for row, n in zip(reward, lengths, strict=True)])
    rows = reward if isinstance(reward, list) else reward.unbind()
    return torch.cat([row[:n].flatten() for row, n in zip(rows, lengths, strict=True)])


def truth(samples: Samples) -> torch.Tensor:
    """Penalised rewards in float64, packed."""
    return torch.cat(
        [r.flatten().double() - COEFF * (p.double() - q.double()) for p, q, r in samples]
    )
