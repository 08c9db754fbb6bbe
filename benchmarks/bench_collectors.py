"""What a collector adds to each turn of its policy and environment, beside torchrl's.

Policy and environment cost nothing here: the turns are made before the clock starts, handed out
one by one, and freed after it stops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import peers
from .harness import Case, Run

NEEDS = {peers.TORCHRL}
DEVICES = {"cpu"}

TURNS = 8  # of each row in a batch
LENGTH = 4  # turns of a dialog
ROWS = (8, 64)
GOAL = 1.5  # times torchrl's speed
MODES: dict[str, dict[str, Any]] = {
    "turns": {},
    "flat turns": {"flatten_data": True},
    "completed": {"yield_completed_trajectories": True},
    "last steps": {"yield_only_last_steps": True},
}


def cases(device: str, quick: bool, usable: set[str]) -> Iterator[Case]:
    """Every mode, for few rows and many, in one tensordict or one a row."""
    for rows in ROWS[:1] if quick else ROWS:
        for lazy in (True, False):
            for mode, options in MODES.items():
                yield overhead_case(mode, options, rows, lazy)


def overhead_case(mode: str, options: dict[str, Any], rows: int, lazy: bool) -> Case:
    """One batch of ``TURNS`` turns of every row."""
    from torchrl.collectors.llm import LLMCollector as Reference

    from fusedrl import LLMCollector

    wanted = rows * TURNS // (LENGTH if mode == "last steps" else 1)
    given = {"dialog_turns_per_batch": wanted, "total_dialog_turns": -1} | options
    return Case(
        op="LLMCollector",
        setting=f"{mode}, {rows} rows, {TURNS} turns, {'lazy stack' if lazy else 'dense'}",
        make_input=script(rows, lazy),
        contenders={
            "torchrl": collecting(Reference, rows, lazy, given),
            "fusedrl": collecting(LLMCollector, rows, lazy, given),
        },
        truth=lambda turns: expected(mode, rows),
        answer=lambda batch: batch["seen"].flatten(),
        goals={"torchrl": GOAL},
        host_bound=True,
    )


def script(rows: int, lazy: bool) -> Callable[[], list[Any]]:
    """Makes the turns of a batch, and what each dialog goes on with."""

    def make() -> list[Any]:
        turns = []
        for turn in range(TURNS):
            over = turn % LENGTH == LENGTH - 1
            state = observation(rows, turn, False, lazy)
            state.set("action", state.get("seen"))
            after = observation(rows, turn + 1, over, lazy).set("reward", torch.ones(rows, 1))
            turns.append(state.set("next", after))
        # A dialog goes on with what the environment is given for the next turn, and returns then.
        return list(zip(turns, [*turns[1:], observation(rows, TURNS, False, lazy)], strict=True))

    return make


def observation(rows: int, turn: int, over: bool, lazy: bool) -> Any:
    """What an environment of texts returns."""
    from tensordict import NonTensorStack, TensorDict

    state = TensorDict(
        {
            "seen": (turn + 100 * torch.arange(rows)).unsqueeze(-1),
            "text": NonTensorStack(*[f"turn {turn} of dialog {row}" for row in range(rows)]),
            "done": torch.full((rows, 1), over),
            "terminated": torch.full((rows, 1), over),
        },
        batch_size=(rows,),
    )
    return state.to_lazystack(0) if lazy else state


def collecting(collector: Any, rows: int, lazy: bool, options: dict[str, Any]) -> Run:
    """Takes the next batch of a collector whose environment answers as the script says."""
    from torchrl.data import Binary, Composite, NonTensor, Unbounded
    from torchrl.envs import EnvBase

    class Scripted(EnvBase):
        script: Iterator[Any]

        def __init__(self) -> None:
            super().__init__(batch_size=(rows,))
            flag = {"shape": (rows, 1), "dtype": torch.bool}
            self.observation_spec = Composite(
                seen=Unbounded((rows, 1), dtype=torch.int64),
                text=NonTensor((rows,), example_data="a"),
                shape=(rows,),
            )
            self.action_spec = Unbounded((rows, 1), dtype=torch.int64)
            self.reward_spec = Unbounded((rows, 1))
            self.full_done_spec = Composite(
                done=Binary(1, **flag), terminated=Binary(1, **flag), shape=(rows,)
            )

        def step_and_maybe_reset(self, tensordict: Any) -> Any:
            return next(self.script)

        def _reset(self, tensordict: Any = None, **kwargs: Any) -> Any:
            return observation(rows, 0, False, lazy)

        def _step(self, tensordict: Any) -> Any:
            raise NotImplementedError

        def _set_seed(self, seed: int | None) -> None:
            pass

    env = Scripted()
    batches = iter(collector(env, policy=lambda turn: turn, **options))

    def run(turns: list[Any]) -> Any:
        env.script = iter(turns)
        batch = next(batches)
        env.script = iter(())  # the caller is the last to let go of the turns
        return batch

    return run


def expected(mode: str, rows: int) -> torch.Tensor:
    """What the batch has under ``"seen"``."""
    dialogs, turns = 100 * torch.arange(rows), torch.arange(TURNS)
    if mode == "last steps":
        return (dialogs + turns[LENGTH - 1 :: LENGTH, None]).flatten().double()
    if mode == "completed":
        halves = turns.reshape(-1, 1, LENGTH) + dialogs[:, None]
        return halves.flatten().double()
    return (dialogs[:, None] + turns).flatten().double()
