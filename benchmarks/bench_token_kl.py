"""token_kl and KLComputation: KL-penalised rewards of ragged samples, beside torchrl's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from fusedrl import ragged, token_kl

from . import peers
from .harness import Case, Run, Skipped

COEFF = 0.1
COUNTS = {8: 5.0, 64: 8.0, 256: 8.0}  # samples -> least speed-up over torchrl on lazy stacks
THREADS = (1, 2)  # of the CPU
OP_SIZES = ((8, 256), (256, 540), (1024, 1024))  # sequences, tokens of each
COLUMN_GOAL = 20.0  # at 256 samples, over torchrl's lazy stacks of the same samples
GPU_GOAL = 30.0  # the same on a GPU, in every form
WORK = 5 * 4  # bytes a token: policy, reference and reward in, KL and reward out

Samples = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def make_samples(count: int, device: str) -> Samples:
    """Packed samples of 64 to 1024 tokens: policy, reference, and a reward a token."""
    lengths = torch.randint(64, 1025, (count,), generator=torch.Generator().manual_seed(count))
    return [
        (
            -torch.rand(n, device=device),
            -torch.rand(n, device=device),
            torch.randn(n, 1, device=device),
        )
        for n in lengths.tolist()
    ]


def lazy(samples: Samples, under_next: bool = False) -> Any:
    """As torchrl's collectors deliver them: a stack of one TensorDict a sample, in fresh memory."""
    from tensordict import TensorDict, lazy_stack

    rows = []
    for p, q, r in samples:
        log_probs, ref_log_probs = {"full": p.clone()}, {"full": q.clone()}
        row = {"log_probs": log_probs, "ref_log_probs": ref_log_probs, "reward": r.clone()}
        rows.append(TensorDict({"next": row} if under_next else row))
    return lazy_stack(rows)


def nested(samples: Samples, layout: torch.layout) -> Any:
    """One nested tensor a column."""
    packed = [ragged.from_list(list(column)) for column in zip(*samples, strict=True)]
    if layout == torch.strided:
        p, q, r = (ragged.to_strided(column) for column in packed)
    else:
        offsets = packed[0].offsets
        p, q, r = (ragged.to_jagged(ragged.Packed(c.values, offsets)) for c in packed)
    return _columns(p, q, r, len(samples))


def padded(samples: Samples) -> Any:
    """Dense columns, NaN where there is no token."""
    p, q, r = (
        torch.nn.utils.rnn.pad_sequence(list(column), True, float("nan"))
        for column in zip(*samples, strict=True)
    )
    return _columns(p, q, r, len(samples))


def _columns(p: torch.Tensor, q: torch.Tensor, r: torch.Tensor, count: int) -> Any:
    from tensordict import TensorDict

    data = {"log_probs": {"full": p}, "ref_log_probs": {"full": q}, "reward": r}
    return TensorDict(data, batch_size=[count])


def cases(device: str, quick: bool, usable: set[str]) -> Iterator[Case | Skipped]:
    """Lazy stacks of every size; then the other representations of 256 samples."""
    samples = make_samples(max(COUNTS), device)
    if peers.TORCHRL not in usable:
        yield Skipped("KLComputation", "compares with torchrl's, which is not installed")
        yield packed_case(samples, {})
        yield from op_cases(device)
        return
    from torchrl.envs.llm.transforms import KLComputation as Reference

    from fusedrl import KLComputation

    ours, theirs = KLComputation(coeff=COEFF), Reference(coeff=COEFF)
    for count, goal in COUNTS.items():
        for threads in THREADS if device == "cpu" else (None,):
            for under_next in (False, True):
                yield lazy_case(
                    make_samples(count, device),
                    {"torchrl": theirs, "fusedrl": ours},
                    _goal(goal, count, device),
                    threads,
                    under_next,
                )
    yield from column_cases(samples, ours, theirs, _goal(COLUMN_GOAL, len(samples), device))
    yield packed_case(samples, {"torchrl": lambda pair: theirs(pair[0])})
    yield from op_cases(device)


def op_cases(device: str) -> Iterator[Case]:
    """The op on packed columns of few and of many tokens, and its gradients, beside plain torch."""
    for count, tokens in OP_SIZES:
        for threads in THREADS if device == "cpu" else (None,):
            for with_gradient in (False, True):
                yield op_case(count, tokens, device, threads, with_gradient)


def op_case(count: int, tokens: int, device: str, threads: int | None, with_gradient: bool) -> Case:
    """A reward a token; the gradient is that of the reward in the policy's log-probs."""
    seeded = torch.Generator().manual_seed(count)
    columns = [torch.randn(count * tokens, generator=seeded).to(device) for _ in range(4)]
    p, q, reward, upstream = columns
    p.requires_grad_(with_gradient)

    def plain_torch() -> Any:
        kl = p - q
        return kl, reward - COEFF * kl

    def ours() -> Any:
        return token_kl(p, q, reward=reward, coeff=COEFF)

    def run(op: Callable[[], Any]) -> Any:
        if not with_gradient:
            return op()
        return torch.autograd.grad(op()[1], p, upstream)[0]

    def of(out: Any) -> torch.Tensor:
        return out if with_gradient else out[1]

    def truth_of(_: Any) -> torch.Tensor:
        kl = p.detach().double() - q.double()
        return -COEFF * upstream.double() if with_gradient else reward.double() - COEFF * kl

    return Case(
        op="token_kl",
        setting=f"{count} x {tokens} tokens, packed"
        + (", gradient" if with_gradient else "")
        + _on_threads(threads),
        make_input=lambda: None,
        contenders={"torch": lambda _: run(plain_torch), "fusedrl": lambda _: run(ours)},
        truth=truth_of,
        answer=of,
        goals={"torch": 1.0}
        if count == OP_SIZES[-1][0]
        else {},  # few tokens take as long as the checks
        host_bound=True,
        threads=threads,
    )


def _on_threads(threads: int | None) -> str:
    return "" if threads is None else f", {threads} thread{'s' if threads > 1 else ''}"


def _goal(on_cpu: float, count: int, device: str) -> float:
    return GPU_GOAL if device == "cuda" and count == max(COUNTS) else on_cpu


def lazy_case(
    samples: Samples, contenders: dict[str, Run], goal: float, threads: int | None, under_next: bool
) -> Case:
    """Both classes on what torchrl's collectors deliver."""

    def rewards(td: Any) -> torch.Tensor:
        following = td["next"] if under_next else td
        return torch.cat([row.flatten() for row in following.get("reward", as_list=True)])

    return Case(
        op="KLComputation",
        setting=f"{len(samples)} samples, lazy stack"
        + (', under "next"' if under_next else "")
        + _on_threads(threads),
        make_input=lambda: lazy(samples, under_next),
        contenders=contenders,
        truth=lambda _: truth(samples),
        answer=rewards,
        goals={"torchrl": goal},
        work=tokens_of(samples) * WORK,
        host_bound=True,
        threads=threads,
    )


def column_cases(samples: Samples, ours: Run, theirs: Run, goal: float) -> Iterator[Case]:
    """Against torchrl on a lazy stack of the same samples, its fastest form for a reward."""
    forms = {
        "jagged": lambda: nested(samples, torch.jagged),
        "strided nested": lambda: nested(samples, torch.strided),
        "padded": lambda: padded(samples),
    }
    lengths = [len(p) for p, _, _ in samples]
    for name, make in forms.items():
        yield Case(
            op="KLComputation",
            setting=f"{len(samples)} samples, {name}",
            make_input=lambda make=make: (lazy(samples), make()),
            contenders={
                "torchrl": lambda pair: theirs(pair[0]),
                "fusedrl": lambda pair: ours(pair[1]),
            },
            truth=lambda _: truth(samples),
            answer=lambda out: rewards_of(out, lengths),
            goals={"torchrl": goal},
            work=tokens_of(samples) * WORK,
            host_bound=True,
        )


def packed_case(samples: Samples, theirs: dict[str, Run]) -> Case:
    """The op itself on packed columns, beside plain torch and, on a lazy stack, torchrl."""
    p, q, r = (torch.cat([x.flatten() for x in column]) for column in zip(*samples, strict=True))
    lengths = [len(sample[0]) for sample in samples]

    def plain_torch(_: Any) -> Any:
        kl = p - q
        return kl, r - COEFF * kl

    def ours(_: Any) -> Any:
        return token_kl(p, q, reward=r, coeff=COEFF, nan="missing")

    return Case(
        op="token_kl",
        setting=f"{len(samples)} samples, packed",
        make_input=lambda: (lazy(samples) if theirs else None, None),
        contenders={**theirs, "torch": plain_torch, "fusedrl": ours},
        truth=lambda _: truth(samples),
        answer=lambda out: rewards_of(out, lengths),
        goals={"torchrl": COLUMN_GOAL, "torch": 1.0},
        work=tokens_of(samples) * WORK,
        host_bound=True,
    )


def tokens_of(samples: Samples) -> int:
    """Tokens of all samples."""
    return sum(len(p) for p, _, _ in samples)


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
