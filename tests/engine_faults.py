"""Faults in the workers of an engine, while they load weights: told to them through files."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch


class Faults:
    """What befalls an engine's workers in the middle of loading.

    Args:
        folder: that the workers see.
    """

    KINDS = ("fails", "allocates", "spoils", "dies", "stops", "halts")

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def told(
        self, kind: str, rank: int = 0, before: int = 10, always: bool = False
    ) -> Iterator[None]:
        """One worker has a fault.

        Args:
            kind: the worker ``"fails"``, ``"allocates"`` more memory than there is, ``"spoils"`` a
                weight, ``"dies"``, or ``"stops"`` until the block ends; ``"halts"`` is to stop and
                then to fail.
            rank: of the worker.
            before: how many weights it has loaded then.
            always: whether each load has it, and not only the next one.
        """
        assert kind in self.KINDS
        self.lift()
        (self._folder / f"fault-{kind}-{rank}").write_text(f"{before} {int(always)}")
        try:
            yield
        finally:
            self.lift()

    def failing(self, rank: int = 0, **options: Any) -> AbstractContextManager[None]:
        """One worker fails."""
        return self.told("fails", rank, **options)

    def stopping(self, rank: int = 0) -> AbstractContextManager[None]:
        """One worker stops, until the block ends."""
        return self.told("stops", rank)

    def lift(self) -> None:
        """End them."""
        for file in self._folder.glob("fault-*"):
            file.unlink(missing_ok=True)

    def wait(self, seconds: float = 60) -> int:
        """Until a worker has come to its fault; its pid."""
        deadline = time.monotonic() + seconds
        while not (self._folder / "fault-reached").exists():
            assert time.monotonic() < deadline, "no worker came to the fault"
            time.sleep(0.01)
        return int((self._folder / "fault-reached").read_text())

    def within(self, weights: list[Any], rank: int) -> Iterator[Any]:
        """The weights as a worker gets them."""
        for number, (name, tensor) in enumerate(weights):
            for kind in self.KINDS:
                file = self._folder / f"fault-{kind}-{rank}"
                if file.exists():
                    before, always = map(int, file.read_text().split())
                    if before == number:
                        tensor = self._befall(kind, file, always, tensor)
            yield name, tensor

    def _befall(self, kind: str, file: Path, always: int, tensor: torch.Tensor) -> torch.Tensor:
        reached = self._folder / "fault-reached"
        reached.with_suffix(".new").write_text(str(os.getpid()))
        reached.with_suffix(".new").rename(reached)
        while kind in ("stops", "halts") and file.exists():
            time.sleep(0.01)
        if not always:
            file.unlink(missing_ok=True)
        if kind in ("fails", "halts"):
            raise MemoryError("out of memory in the middle")
        if kind == "allocates":
            torch.empty(1 << 60)
        if kind == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "spoils":
            tensor = tensor.clone()
            tensor.view(-1)[[0, -1]] += 1  # both ends, as each of several workers has its part
        return tensor


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
