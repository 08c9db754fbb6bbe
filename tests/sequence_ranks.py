"""What each rank of split sequences runs, where a forked process can import it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fusedrl import (
    exact_kl,
    linear_exact_kl,
    linear_policy_loss,
    linear_token_log_probs,
    linear_top_k_kl,
    token_log_probs,
    top_k_kl,
)

CLASSES, WIDTH, TOKENS, SEQUENCES, KNOWN = 37, 6, 24, 4, 5


class Layout(NamedTuple):
    """Where the ranks' parts start and end, and the offsets of packed sequences if any are."""

    bounds: list[int]
    offsets: list[int] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (TOKENS,) if self.offsets else (SEQUENCES, TOKENS // SEQUENCES)

    def part(self, rank: int) -> tuple[Any, ...]:
        return (..., slice(*self.bounds[rank : rank + 2]))


# Sequences end exactly at some bounds, and go on over others; one spans three parts.
LAYOUTS = {
    2: {
        "padded": Layout([0, 4, 6]),
        "goes on": Layout([0, 9, 24], [0, 3, 3, 13, 24]),
        "ends at the boundary": Layout([0, 13, 24], [0, 3, 3, 13, 24]),
        "starts with one token": Layout([0, 12, 24], [0, 4, 12, 13, 24]),
        "as many tokens as sequences": Layout([0, 4, 24], [0, 3, 9, 13, 24]),
    },
    3: {
        "padded": Layout([0, 1, 4, 6]),
        "spans all": Layout([0, 9, 10, 24], [0, 2, 20, 24, 24]),
        "both": Layout([0, 9, 19, 24], [0, 9, 15, 24, 24]),
    },
}


def problem(layout: Layout) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = layout.shape

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator)

    inputs = {
        "logits": 2 * draw(*shape, CLASSES),
        "ref_logits": 2 * draw(*shape, CLASSES),
        "hidden": draw(*shape, WIDTH),
        "ref_hidden": draw(*shape, WIDTH + 1),
        "weight": draw(CLASSES, WIDTH),
        "bias": draw(CLASSES),
        "ref_weight": draw(CLASSES, WIDTH + 1),
        "tokens": torch.randint(CLASSES, shape, generator=generator),
        # The first token of a part is kept at some bounds and dropped at others.
        "mask": torch.rand(shape, generator=generator) < 0.7,
        "advantages": draw(*shape),
        "of_sequences": draw(SEQUENCES),
        "old": draw(*shape) - 4,
        "ref": draw(*shape) - 4,
        "rollout": draw(*shape) - 4,
        "upstream": draw(2, *shape),
    }
    teacher, ids = (2 * draw(*shape, CLASSES)).log_softmax(-1).topk(KNOWN)
    ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
    return inputs | {"ids": ids, "teacher": teacher}


OF_ROWS = {"logits", "ref_logits", "hidden", "ref_hidden"}
SEVERAL_A_TOKEN = {"ids", "teacher"}
OF_TOKENS = {"tokens", "mask", "advantages", "old", "ref", "rollout", "upstream"}
LEAVES = (*sorted(OF_ROWS), "weight", "bias", "ref_weight")


def part_of(inputs: dict[str, Tensor], layout: Layout, rank: int) -> dict[str, Tensor]:
    part = layout.part(rank)
    rows, tokens = (*part, slice(None)), part
    cut = {name: inputs[name][rows] for name in OF_ROWS | SEVERAL_A_TOKEN}
    return inputs | cut | {name: inputs[name][tokens] for name in OF_TOKENS}


Case = Callable[..., tuple[Tensor, ...]]


def log_probs(x: dict[str, Tensor], **options: Any) -> tuple[Tensor, ...]:
    return (token_log_probs(x["logits"], x["tokens"], **options),)


def log_probs_and_entropy(x: dict[str, Tensor], **options: Any) -> tuple[Tensor, ...]:
    return token_log_probs(
        x["logits"], x["tokens"].int(), x["mask"], entropy=True, temperature=0.7, **options
    )


def linear_log_probs(x: dict[str, Tensor], **options: Any) -> tuple[Tensor, ...]:
    head = x["hidden"], x["weight"], x["tokens"], x["mask"]
    return linear_token_log_probs(*head, bias=x["bias"], softcap=5.0, entropy=True, **options)


def kl_in(direction: str) -> Case:
    def kl(x: dict[str, Tensor], **options: Any) -> tuple[Tensor, ...]:
        pair = x["logits"], x["ref_logits"], x["mask"]
        return (exact_kl(*pair, direction=direction, **options),)

    return kl


def linear_kl(x: dict[str, Tensor], **options: Any) -> tuple[Tensor, ...]:
    heads = x["hidden"], x["weight"], x["ref_hidden"], x["ref_weight"], x["mask"]
    return (linear_exact_kl(*heads, bias=x["bias"], direction="jensen_shannon", **options),)


def top_k(x: dict[str, Tensor], **options: Any) -> tuple[Tensor, ...]:
    known = x["ids"], x["teacher"], x["mask"]
    return (top_k_kl(x["logits"], *known, direction="forward", temperature=0.7, **options),)


def linear_top_k(x: dict[str, Tensor], **options: Any) -> tuple[Tensor, ...]:
    # Engines answer in float32, and with ids of 32 bits.
    known = x["ids"].int(), x["teacher"].float()
    options |= {"bias": x["bias"], "tail": "renormalize"}
    return (linear_top_k_kl(x["hidden"], x["weight"], *known, **options),)


def loss_of(name: str, advantages: str, **chosen: Any) -> Case:
    def loss(x: dict[str, Tensor], **options: Any) -> tuple[Tensor, ...]:
        columns = {"old_log_probs": x["old"], "ref_log_probs": x["ref"]}
        if chosen.get("importance"):
            columns["rollout_log_probs"] = x["rollout"]
        result = linear_policy_loss(
            *(x["hidden"], x["weight"], x["tokens"], x[advantages], x["mask"]),
            **{**columns, "loss": name, "clip": 0.9, "bias": x["bias"]},
            **{"kl_coeff": 0.1, "entropy_coeff": 0.05, **chosen, **options},
        )
        of_all = result.loss, result.objective, result.kl, result.entropy
        return (*of_all, result.log_probs, result.entropies)

    return loss


CASES: dict[str, Case] = {
    "token_log_probs": log_probs,
    "token_log_probs, mask and entropy": log_probs_and_entropy,
    "linear_token_log_probs": linear_log_probs,
    "exact_kl": kl_in("reverse"),
    "exact_kl, forward": kl_in("forward"),
    "linear_exact_kl": linear_kl,
    "top_k_kl": top_k,
    "linear_top_k_kl": linear_top_k,
    "grpo": loss_of("grpo", "of_sequences"),
    "dapo": loss_of("dapo", "advantages", importance={"high": 2.0}),
    "gspo": loss_of("gspo", "of_sequences"),
    "rloo": loss_of("rloo", "advantages"),
    "dr_grpo": loss_of("dr_grpo", "of_sequences", normalizer=9.0),
}


class Found(NamedTuple):
    """Values a token, values of the whole batch, and the gradient of each leaf that has one."""

    of_tokens: list[Tensor]
    of_batch: list[Tensor]
    gradients: dict[str, Tensor]


def run(case: Case, inputs: dict[str, Tensor], **options: Any) -> Found:
    leaves = {name: inputs[name].detach().clone().requires_grad_() for name in LEAVES}
    outputs = case(inputs | leaves, **options)
    shape = inputs["tokens"].shape
    of_tokens = [x for x in outputs if x.shape == shape]
    of_batch = [x for x in outputs if x.shape != shape]
    terms = [x for x in of_tokens if x.requires_grad]
    weighed = [(x * up).sum() for x, up in zip(terms, inputs["upstream"], strict=False)]
    total = torch.stack([*weighed, *(x for x in of_batch if x.requires_grad)]).sum()
    grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return Found(
        [x.detach() for x in of_tokens],
        [x.detach() for x in of_batch],
        {name: x for name, x in zip(leaves, grads, strict=True) if x is not None},
    )


def second_derivative(inputs: dict[str, Tensor], **options: Any) -> Tensor:
    logits = inputs["logits"].double().requires_grad_()
    values = token_log_probs(logits, inputs["tokens"], impl="reference", **options)
    (first,) = torch.autograd.grad((values**2).sum(), logits, create_graph=True)
    return torch.autograd.grad((first**2).sum(), logits)[0]


def refusals(rank: int, group: dist.ProcessGroup) -> list[str]:
    """What is said where the ranks' parts do not fit together; both hear of it."""
    rows, tokens = torch.zeros(3, 5), torch.zeros(3, dtype=torch.int64)
    padded, of_padded = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64)
    parts = (
        lambda: (rows, tokens, {"offsets": torch.tensor([0, 3])}),
        lambda: (rows, tokens, {"offsets": torch.tensor([0, 3 + 3 * rank])}),
        lambda: (rows, tokens, {"offsets": torch.tensor([0, 2 + rank, 6])}),
        lambda: (rows[: 3 * rank], tokens[: 3 * rank], {"offsets": torch.tensor([0, 3])}),
        lambda: (padded[: 1 + rank], of_padded[: 1 + rank], {}),
        lambda: (
            (padded, of_padded, {}) if rank else (rows, tokens, {"offsets": torch.tensor([0, 6])})
        ),
    )
    said = []
    for make in parts:
        logits, ids, options = make()
        try:
            token_log_probs(logits, ids, shift=True, sequence_group=group, **options)
        except ValueError as error:
            said.append(str(error))
    hidden, weight = torch.zeros(2, 3, 4), torch.zeros(5, 4)
    advantages = torch.zeros((2, 3) if rank else (2,))
    try:
        options = {"shift": True, "sequence_group": group}
        linear_policy_loss(hidden, weight, of_padded, advantages, **options)
    except ValueError as error:
        said.append(str(error))
    try:
        known = torch.arange(2 + rank).expand(3, -1), torch.full((3, 2 + rank), -3.0)
        options = {"offsets": torch.tensor([0, 6]), "shift": True, "sequence_group": group}
        top_k_kl(rows, *known, **options)
    except ValueError as error:
        said.append(str(error))
    return said


def join(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )


def on_a_rank(rank: int, ranks: int, folder: str) -> None:
    join(rank, ranks, folder)
    group = dist.group.WORLD
    found = {}
    for name, layout in LAYOUTS[ranks].items():
        mine = part_of(problem(layout), layout, rank)
        options: dict[str, Any] = {"sequence_group": group, "shift": True}
        if layout.offsets is not None:
            options["offsets"] = torch.tensor(layout.offsets)
        for case, call in CASES.items():
            for shift in (True, False):
                found[name, case, shift] = run(call, mine, **options | {"shift": shift})
        found[name, "second derivative"] = second_derivative(mine, **options)
    found["refusals"] = refusals(rank, group) if ranks == 2 else []
    torch.save(found, f"{folder}/{rank}")
    dist.destroy_process_group()


class Split(NamedTuple):
    """A few tokens of a few sequences, of which parts may have as many."""

    lengths: list[int]  # of the ranks' parts
    offsets: Tensor
    shift: bool
    hidden: Tensor
    weight: Tensor
    tokens: Tensor
    advantages: dict[str, Tensor]  # of sequences and of tokens, in one and in two dimensions

    def loss(self, rank: int | None, form: str, **options: Any) -> Tensor:
        """Of a rank's part, or of all."""
        start = sum(self.lengths[:rank]) if rank is not None else 0
        end = len(self.tokens) if rank is None else start + self.lengths[rank]
        advantages = self.advantages[form]
        if form in ("[N]", "[1, N]"):
            advantages = advantages[..., start:end]
        return linear_policy_loss(
            *(self.hidden[start:end], self.weight, self.tokens[start:end], advantages, None),
            **{"offsets": self.offsets, "shift": self.shift, "loss": "reinforce", **options},
        ).loss


def split_of(seed: int, ranks: int) -> Split:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, count: int = 1) -> list[int]:
        return torch.randint(low, high + 1, (count,), generator=generator).tolist()

    (sequences,) = draw(1, 4)
    lengths = draw(1, 4, ranks) if seed % 2 else [sequences] * ranks
    count = sum(lengths)
    of_sequences, of_tokens = (torch.randn(n, generator=generator) for n in (sequences, count))
    return Split(
        lengths,
        torch.tensor([0, *sorted(draw(0, count, sequences - 1)), count]),
        seed % 3 == 0,
        torch.randn(count, 5, generator=generator),
        torch.randn(7, 5, generator=generator),
        torch.tensor(draw(0, 6, count)),
        {
            "[B]": of_sequences,
            "[B, 1]": of_sequences[:, None],
            "[N]": of_tokens,
            "[1, N]": of_tokens[None],
        },
    )


def on_a_rank_of_splits(rank: int, ranks: int, seeds: range, folder: str) -> None:
    join(rank, ranks, folder)
    found: dict[tuple[int, str], Tensor | str] = {}
    for seed in seeds:
        split = split_of(seed, ranks)
        for form in split.advantages:
            try:
                found[seed, form] = split.loss(rank, form, sequence_group=dist.group.WORLD)
            except ValueError as error:
                found[seed, form] = str(error)
    torch.save(found, f"{folder}/{rank}")
    dist.destroy_process_group()


GRID = LAYOUTS[2]["goes on"]
SHARDS = [0, 20, CLASSES]
GRID_CASES = ("linear_token_log_probs", "grpo", "gspo")


def on_a_grid(rank: int, folder: str) -> None:
    """Two parts of the sequences by two shards of the vocabulary, on four ranks."""
    join(rank, 4, folder)
    place, shard = divmod(rank, 2)
    sequences = [dist.new_group([i, i + 2]) for i in (0, 1)][shard]
    vocabulary = [dist.new_group([i, i + 1]) for i in (0, 2)][place]
    mine = part_of(problem(GRID), GRID, place)
    classes = slice(*SHARDS[shard : shard + 2])
    mine |= {name: mine[name][classes] for name in ("weight", "bias")}
    options = {"offsets": torch.tensor(GRID.offsets), "shift": True, "sequence_group": sequences}
    options |= {"vocab_group": vocabulary, "vocab_offset": classes.start}
    torch.save({case: run(CASES[case], mine, **options) for case in GRID_CASES}, f"{folder}/{rank}")
    dist.destroy_process_group()
