"""AsyncCollector beside torchrl's: overhead, dialogs end to end, whole frames, updates."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import peers
from .bench_channel import MB, counted
from .bench_collectors import ROWS, TURNS
from .harness import Case, Run

NEEDS = {peers.TORCHRL, peers.TRANSFORMERS}
DEVICES = {"cpu"}

BATCHES = 4  # in a run
OVERHEAD_GOAL = 5.0  # times torchrl's speed, on dialogs
GENERAL_GOAL = 1.0  # where the inner collector is torchrl's in both
CHATS_GOAL = 1.2
CHATS = ((4, 16), (16, 16))  # dialogs at a time, tokens in an answer
FRAMES = 10_000
SIZES = {"10 MB": 10 * MB, "100 MB": 100 * MB}
SETTLED = 0.05  # seconds until a worker that is waited for has its next batch ready

Collect = Callable[..., Any]


def cases(device: str, quick: bool, usable: set[str]) -> Iterator[Case]:
    """Batches of scripted and of generated turns, frames under updates, and updates."""
    for rows in ROWS[:1] if quick else ROWS:
        for lazy in (True, False):
            yield from dialogs_case(rows, lazy)
        yield from general_case(rows)
        yield from other_texts(rows)
    for rows, tokens in CHATS[:1] if quick else CHATS:
        yield from chats_case(rows, tokens)
    yield from other_log_probs(*CHATS[0])
    yield from whole_frames(FRAMES // 50 if quick else FRAMES)
    for size, nbytes in list(SIZES.items())[: 1 if quick else None]:
        yield from update_cases(size, nbytes)


def torchrls(env: Any, policy: Any, **options: Any) -> Any:
    """torchrl's collector."""
    from torchrl.collectors import AsyncCollector

    return AsyncCollector(env, policy, **options)


def shared(env: Any, policy: Any, **options: Any) -> Any:
    """torchrl's collector with weights through its shared memory."""
    from torchrl.weight_update import SharedMemWeightSyncScheme

    schemes = {"policy": SharedMemWeightSyncScheme()}
    return torchrls(env, policy, weight_sync_schemes=schemes, **options)


def ours(env: Any, policy: Any, **options: Any) -> Any:
    """Ours, whose weights go through a channel."""
    from fusedrl import AsyncCollector

    return AsyncCollector(env, policy, **options)


def dialogs(env: Any, policy: Any, **options: Any) -> Any:
    """Ours with our ``LLMCollector`` inside."""
    from fusedrl import LLMCollector

    return ours(env, policy, collector_class=LLMCollector, **options)


class Made:
    """Runs what ``make`` returns; called first outside the clock, where a contender may fail."""

    def __init__(self, make: Callable[[], Any]):
        self.make = make
        self.made: Any = None

    def __call__(self, argument: Any) -> Any:
        """As what is made."""
        if self.made is None:
            self.made = self.make()
        return self.made(argument)

    def close(self) -> None:
        """End the worker."""
        if self.made is not None:
            self.made.close()


class Collected:
    """Takes the next batches of a collector, and reads a value of each turn."""

    def __init__(self, collector: Any):
        self.collector = collector
        self.batches = iter(collector)

    def __call__(self, _: Any) -> list[Any]:
        """The batches."""
        batches = [next(self.batches) for _ in range(BATCHES)]
        for batch in batches:
            batch["seen"].sum().item()
        return batches

    def close(self) -> None:
        """End the worker."""
        self.collector.shutdown()


@contextmanager
def made(makes: Mapping[str, Callable[[], Any]]) -> Iterator[dict[str, Run]]:
    """Those that run, until the end."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(closing(Made(make))) for name, make in makes.items()}


def scripted_case(
    what: str, makes: Mapping[str, Callable[[], Any]], rows: int, goal: float, timed_only: str = ""
) -> Iterator[Case]:
    """A run of every collector's batches; ``timed_only`` has other answers."""
    with made(makes) as runs:
        yield Case(
            op="AsyncCollector: overhead",
            setting=f"{what}, {rows} rows, {BATCHES} batches of {TURNS} turns",
            make_input=settle,
            contenders={name: run for name, run in runs.items() if name != timed_only},
            timed_only={name: run for name, run in runs.items() if name == timed_only},
            truth=lambda _: expected(rows),
            answer=seen,
            goals={name: goal for name in runs if name.startswith("torchrl")},
            host_bound=True,
        )


def dialogs_case(rows: int, lazy: bool) -> Iterator[Case]:
    """Turns with texts."""
    from .collector_parts import dialogs_inside, nothing

    collects = {
        "torchrl": partial(torchrls, use_buffers=False),
        "torchrl, as it comes": torchrls,
        "torchrl, its LLMCollector inside": partial(
            torchrls, use_buffers=False, collector_class=dialogs_inside
        ),
        "fusedrl": dialogs,
    }
    makes = {
        name: partial(scripted, collect, nothing, rows, lazy, True)
        for name, collect in collects.items()
    }
    what = f"dialogs, {'lazy stack' if lazy else 'dense'}"
    yield from scripted_case(what, makes, rows, OVERHEAD_GOAL, "torchrl, as it comes")


def general_case(rows: int) -> Iterator[Case]:
    """Turns of tensors only, with torchrl's ``Collector`` in the worker."""
    from .collector_parts import repeat

    collects = {
        "torchrl": torchrls,
        "torchrl, use_buffers=False": partial(torchrls, use_buffers=False),
        "fusedrl": ours,
    }
    makes = {
        name: partial(scripted, collect, repeat, rows, False, False)
        for name, collect in collects.items()
    }
    yield from scripted_case("tensors", makes, rows, GENERAL_GOAL)


def scripted(collect: Collect, policy: Any, rows: int, lazy: bool, text: bool) -> Collected:
    """The batches of turns that are made beforehand."""
    from .collector_parts import Scripted

    env = partial(Scripted, rows, lazy, text, BATCHES * TURNS)
    return Collected(collect(env, policy, frames_per_batch=rows * TURNS))


def expected(rows: int) -> Tensor:
    """What the batches of a run have under ``"seen"``: [BATCHES, rows, TURNS]."""
    turns = torch.arange(BATCHES * TURNS).view(BATCHES, 1, TURNS)
    return (turns + 100 * torch.arange(rows)[:, None]).double()


def seen(batches: list[Any]) -> Tensor:
    """The same of batches."""
    return torch.stack([batch["seen"].squeeze(-1) for batch in batches])


def settle() -> None:
    """Let the workers get ready what they may before they are asked."""
    time.sleep(SETTLED)


def other_texts(rows: int) -> Iterator[Case]:
    """How many turns come with the text of another one."""
    from .collector_parts import nothing

    for name, collect in {"torchrl": torchrls, "fusedrl": dialogs}.items():
        with made({name: partial(scripted, collect, nothing, rows, False, True)}) as runs:
            yield Case(
                op="AsyncCollector: turns with another one's text (how many: max error)",
                setting=f"dense, {rows} rows, {BATCHES} batches of {TURNS} turns",
                make_input=settle,
                contenders=runs,
                truth=none_of_them,
                answer=with_other_texts,
                host_bound=True,
            )


def with_other_texts(batches: list[Any]) -> Tensor:
    """How many turns have not the text that goes with what was seen."""
    turns = [turn for batch in batches for turn in batch.reshape(-1).unbind(0)]
    wrong = 0
    for turn in turns:
        row, number = divmod(int(turn["seen"]), 100)
        wrong += turn["text"] != f"turn {number} of dialog {row}"
    return torch.tensor(float(wrong))


def none_of_them(_: Any) -> Tensor:
    """How many there ought to be."""
    return torch.zeros((), dtype=torch.float64)


def chats_case(rows: int, tokens: int) -> Iterator[Case]:
    """A model that generates and one that learns from it, an update a batch."""
    from .collector_parts import dialogs_inside
    from .learner import Learner

    collects = {
        "torchrl": shared,
        "torchrl, its LLMCollector inside": partial(shared, collector_class=dialogs_inside),
        "fusedrl": dialogs,
    }
    makes = {
        name: partial(Learner, collect, rows, tokens, BATCHES) for name, collect in collects.items()
    }
    turns = 4 * rows * BATCHES
    with one_thread(), made(makes) as runs:
        yield Case(
            op="AsyncCollector: dialogs end to end",
            setting=f"{turns} turns of {rows} dialogs, {tokens} tokens each, {BATCHES} updates",
            make_input=settle,
            contenders=runs,
            truth=lambda _: torch.tensor(float(turns), dtype=torch.float64),
            answer=lambda turns: torch.tensor(float(len(turns))),
            goals={name: CHATS_GOAL for name in runs if name.startswith("torchrl")},
            host_bound=True,
        )


def other_log_probs(rows: int, tokens: int) -> Iterator[Case]:
    """How many turns have log-probs that the weights of their version do not give."""
    from .learner import Learner

    turns = 4 * rows * BATCHES
    for name, collect in {"torchrl": shared, "fusedrl": dialogs}.items():
        learner = Made(partial(Learner, collect, rows, tokens, BATCHES, remember=True))
        with one_thread(), closing(learner):
            yield Case(
                op="AsyncCollector: turns of another version (how many: max error)",
                setting=f"{turns} turns of {rows} dialogs, {BATCHES} updates",
                make_input=lambda: None,
                contenders={name: learner},
                truth=none_of_them,
                answer=lambda turns, learner=learner: learner.made.of_another_version(turns),
                host_bound=True,
            )


@contextmanager
def one_thread() -> Iterator[None]:
    """Train with one of torch's threads, as a worker generates with one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def whole_frames(frames: int) -> Iterator[Case]:
    """Frames whose policy tells which weights it computed with."""
    from .channel_frames import Frames

    for contender, collect in {"torchrl": shared, "fusedrl": ours}.items():
        with closing(Made(partial(Frames, collect, frames))) as run:
            setting = f"{frames} frames, 400 tensors, continuous updates"
            yield from counted("frames", setting, contender, run, "AsyncCollector")


def update_cases(size: str, nbytes: int) -> Iterator[Case]:
    """What an update takes while the worker generates, and until a frame is made with it."""
    from tensordict import TensorDict

    from .channel_frames import Follower, Updated, canary

    trained = canary(nbytes)
    weights = TensorDict.from_module(trained).data
    collects = {"torchrl": shared, "fusedrl": ours}

    def train(seconds: float) -> int:
        time.sleep(seconds)
        return trained.module.train_on()

    makes = {name: partial(Updated, collect, weights, nbytes) for name, collect in collects.items()}
    with made(makes) as runs:
        yield Case(
            op="AsyncCollector: update_policy_weights_ while the worker generates",
            setting=f"{size}, a batch of 100 frames",
            make_input=partial(train, 1.0),  # the others' workers have finished their batches
            contenders=runs,
            host_bound=True,
        )
    makes = {
        name: partial(Follower, collect, weights, nbytes) for name, collect in collects.items()
    }
    with made(makes) as runs:
        yield Case(
            op="AsyncCollector: update to the first frame that was made with it",
            setting=f"{size}, batches of 1 frame",
            make_input=partial(train, SETTLED),
            contenders=runs,
            goals={"torchrl": 1.0},
            host_bound=True,
        )
