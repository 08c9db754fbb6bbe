"""Check that memory, file descriptors and speed of collectors stay constant over many turns.

``python -m benchmarks.soak_collectors --turns 100000 --out soak.json`` prints a line at each of ten
points, and whether the last are like the first. Versions are published all the time, and turns are
tagged with them.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROWS = 8
TURNS = 64  # in a batch
POINTS = 10
PAUSE_S = 0.001  # between two versions: the publisher is not what is measured
GROWTH = {"rss_mib": 1.03, "descriptors": 1.0, "us_per_turn": 1.25}  # from first to last third


@dataclass
class Point:
    """What this process and its children have after so many turns; times are medians."""

    turns: int
    versions: int  # published so far
    rss_mib: float
    descriptors: int
    us_per_turn: float


class Says(nn.Module):
    """A policy with weights, whose action is one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.value = nn.Parameter(torch.zeros(1))

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        """One action for each observation."""
        return self.value.long().expand(seen.shape)


def counting_env() -> Any:
    """Dialogs of four turns and more, with texts."""
    from tensordict import NonTensorStack, TensorDict
    from torchrl.data import Binary, Composite, NonTensor, Unbounded
    from torchrl.envs import EnvBase

    class Counting(EnvBase):
        def __init__(self) -> None:
            super().__init__(batch_size=(ROWS,))
            flag = {"shape": (ROWS, 1), "dtype": torch.bool}
            self.observation_spec = Composite(
                seen=Unbounded((ROWS, 1), dtype=torch.int64),
                text=NonTensor((ROWS,), example_data="a"),
                shape=(ROWS,),
            )
            self.action_spec = Unbounded((ROWS, 1), dtype=torch.int64)
            self.reward_spec = Unbounded((ROWS, 1))
            self.full_done_spec = Composite(
                done=Binary(1, **flag), terminated=Binary(1, **flag), shape=(ROWS,)
            )
            self.turn = torch.zeros(ROWS, 1, dtype=torch.int64)

        def _state(self, **more: Any) -> Any:
            over = self.turn >= 4 + torch.arange(ROWS).unsqueeze(-1)
            texts = NonTensorStack(*[f"turn {n}" for n in self.turn.flatten().tolist()])
            state = {"seen": self.turn, "text": texts, "done": over, "terminated": over.clone()}
            return TensorDict(state | more, (ROWS,))

        def _reset(self, tensordict: Any = None, **kwargs: Any) -> Any:
            anew = None if tensordict is None else tensordict.get("_reset", None)
            kept = self.turn if anew is not None else torch.zeros_like(self.turn)
            self.turn = kept if anew is None else torch.where(anew.view_as(kept), 0, kept)
            return self._state()

        def _step(self, tensordict: Any) -> Any:
            self.turn = self.turn + 1
            return self._state(reward=torch.ones(ROWS, 1))

        def _set_seed(self, seed: int | None) -> None:
            pass

    return Counting()


def llm_collector(handle: Any) -> Any:
    """The collector, in this process."""
    from tensordict.nn import TensorDictModule

    from fusedrl import LLMCollector

    return LLMCollector(
        counting_env,
        policy=TensorDictModule(Says(), in_keys=["seen"], out_keys=["action"]),
        dialog_turns_per_batch=TURNS,
        channel=handle,
        track_policy_version=True,
    )


def async_collector(handle: Any) -> Any:
    """The same in a process of its own."""
    from tensordict.nn import TensorDictModule

    from fusedrl import AsyncCollector, LLMCollector

    return AsyncCollector(
        counting_env,
        TensorDictModule(Says(), in_keys=["seen"], out_keys=["action"]),
        frames_per_batch=TURNS,
        total_frames=-1,
        collector_class=LLMCollector,
        channel=handle,
        track_policy_version=True,
    )


COLLECTORS: dict[str, Callable[[Any], Any]] = {
    "LLMCollector": llm_collector,
    "AsyncCollector": async_collector,
}


def soak(make: Callable[[Any], Any], turns: int) -> Iterator[Point]:
    """Ten points of one collector."""
    from tensordict.nn import TensorDictModule

    from fusedrl import WeightChannel

    trained = TensorDictModule(Says(), in_keys=["seen"], out_keys=["action"])
    with WeightChannel.create(trained) as channel:
        stop = threading.Event()
        publisher = threading.Thread(target=publish, args=(channel, trained, stop))
        publisher.start()
        collector = make(channel.handle)
        try:
            yield from points(collector, channel, turns)
        finally:
            stop.set()
            publisher.join()
            collector.shutdown()


def publish(channel: Any, trained: nn.Module, stop: threading.Event) -> None:
    """Publish versions until told to stop; the value of the policy is its version."""
    version = 0
    while not stop.wait(PAUSE_S):
        version += 1
        with torch.no_grad():
            trained.module.value.fill_(version)
        channel.publish(trained, version)


def points(collector: Any, channel: Any, turns: int) -> Iterator[Point]:
    """Run batches; raises if a tag is not what the policy computed with."""
    batches, done = iter(collector), 0
    for point in range(1, POINTS + 1):
        times = []
        while done < turns * point / POINTS:
            start = time.perf_counter()
            batch = next(batches)
            times.append(1e6 * (time.perf_counter() - start) / batch.numel())
            done += batch.numel()
            if not torch.equal(batch["action"].flatten(), batch["policy_version"].flatten()):
                raise RuntimeError("policy_version: expected what the policy said, got another")
        yield Point(
            turns=done,
            versions=channel.version or 0,
            rss_mib=sum(map(resident_mib, processes())),
            descriptors=sum(len(list((process / "fd").iterdir())) for process in processes()),
            us_per_turn=statistics.median(times),
        )


def processes() -> list[Path]:
    """This one and its children, in ``/proc``."""
    own = Path("/proc/self")
    children = [pid for task in own.glob("task/*/children") for pid in task.read_text().split()]
    return [own, *(Path("/proc") / pid for pid in children)]


def resident_mib(process: Path) -> float:
    """Memory that a process has, in pages of its ``statm``."""
    return int((process / "statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def flat(points: list[Point]) -> dict[str, bool]:
    """For each figure whether the median of its last third is about that of its first."""
    third = len(points) // 3
    answers = {}
    for name, most in GROWTH.items():
        values = [getattr(point, name) for point in points]
        first, last = statistics.median(values[:third]), statistics.median(values[-third:])
        answers[name] = last <= most * first
    return answers


def main(arguments: list[str] | None = None) -> None:
    """Run the soaks that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=100_000)
    parser.add_argument("--collector", choices=sorted(COLLECTORS), action="append")
    parser.add_argument("--out", type=Path, help="a JSON file")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = {}
    for name in given.collector or COLLECTORS:
        found = []
        print(name, *Point.__dataclass_fields__, sep="\t", flush=True)
        for point in soak(COLLECTORS[name], given.turns):
            found.append(point)
            shown = (f"{value:.6g}" for value in asdict(point).values())
            print("", *shown, sep="\t", flush=True)
        results[name] = {"points": [asdict(point) for point in found], "flat": flat(found)}
        print("flat:", results[name]["flat"], flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
