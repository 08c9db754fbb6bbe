"""Faults in the workers of an engine, while they load weights: told to them through files."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


class Faults:
    """What befalls an engine's workers in the middle of loading.

    Args:
        folder: that the workers see.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def failing(self, rank: int = 0) -> Iterator[None]:
        """One worker fails with half of the weights."""
        with self._told("fails", rank):
            yield

    @contextmanager
    def stopping(self, rank: int = 0) -> Iterator[None]:
        """One worker stops with half of the weights, until the block ends."""
        with self._told("stops", rank):
            yield

    def lift(self) -> None:
        """End them."""
        for file in self._folder.glob("fault-*"):
            file.unlink(missing_ok=True)

    def wait(self, seconds: float = 60) -> int:
        """Until a worker has stopped; its pid."""
        deadline = time.monotonic() + seconds
        while not (self._folder / "fault-reached").exists():
            assert time.monotonic() < deadline, "no worker came to the fault"
            time.sleep(0.01)
        return int((self._folder / "fault-reached").read_text())

    @contextmanager
    def _told(self, kind: str, rank: int) -> Iterator[None]:
        self.lift()
        (self._folder / f"fault-{kind}-{rank}").touch()
        try:
            yield
        finally:
            self.lift()

    def within(self, weights: list[Any], rank: int) -> Iterator[Any]:
        """The weights as a worker gets them."""
        half = len(weights) // 2
        yield from weights[:half]
        if (self._folder / f"fault-fails-{rank}").exists():
            raise MemoryError("out of memory in the middle")
        stops = self._folder / f"fault-stops-{rank}"
        if stops.exists():
            reached = self._folder / "fault-reached"
            reached.with_suffix(".new").write_text(str(os.getpid()))
            reached.with_suffix(".new").rename(reached)
        while stops.exists():
            time.sleep(0.01)
        yield from weights[half:]


def inject(folder: Path, patch: pytest.MonkeyPatch) -> Faults:
    """Faults of the Qwen2 engines that are started while the patch lasts.

    Their workers are new interpreters, which call this module as a plugin of vLLM.

    Args:
        folder: for files.
        patch: of this process.
    """
    info = folder / "engine_faults-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: engine-faults\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nengine_faults = engine_faults:register\n"
    )
    patch.syspath_prepend(folder)
    patch.setenv("ENGINE_FAULTS", str(folder))
    return Faults(folder)


def register() -> None:
    """Have this worker load its weights with faults."""
    from vllm.distributed.parallel_state import get_world_group
    from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

    faults = Faults(Path(os.environ["ENGINE_FAULTS"]))
    load_weights = Qwen2ForCausalLM.load_weights

    def faulty(self: Any, weights: Any) -> Any:
        given = list(weights)
        _, first = given[0]
        # Names and shapes are compared with tensors that have no memory of their own.
        if first.untyped_storage().nbytes() >= first.nbytes:
            given = faults.within(given, get_world_group().rank)
        return load_weights(self, given)

    Qwen2ForCausalLM.load_weights = faulty
