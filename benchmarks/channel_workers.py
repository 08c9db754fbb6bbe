"""Processes that read weights while they are updated, and what they find."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

SPAWN = mp.get_context("spawn")
TIMEOUT_S = 300.0


class Weights(nn.Module):
    """Tensors of about the shapes of a transformer, ``nbytes`` in all, each of its version's number."""

    def __init__(self, nbytes: int, tensors: int = 400):
        super().__init__()
        side = int((nbytes / 4 / (tensors / 4) / 5) ** 0.5)
        shapes = [(3 * side, side), (side, side), (side, side), (side,)] * (tensors // 4)
        self.tensors = nn.ParameterList(torch.zeros(shape) for shape in shapes)
        self.requires_grad_(False)
        self.version = 0
        self.nbytes = sum(x.nbytes for x in self.tensors)

    def train_on(self) -> int:
        """Become the next version."""
        self.version += 1
        for x in self.tensors:
            x.fill_(self.version)
        return self.version

    def forward(self) -> tuple[float, float]:
        """The least and the most of the first and last element of every tensor."""
        flat = [x.view(-1) for x in self.tensors]
        low, high = torch.stack([end for x in flat for end in (x[0], x[-1])]).aminmax()
        return low.item(), high.item()


class Worker:
    """A process that runs ``job(*arguments, pipe)`` until it is closed."""

    def __init__(self, job: Callable[..., None], *arguments: Any):
        self.pipe, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=job, args=(*arguments, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, what: Any, meanwhile: Callable[[], Any]) -> Any:
        """Its answer, with ``meanwhile`` done in this process."""
        self.pipe.send(what)
        meanwhile()
        return self.answer()

    def answer(self) -> Any:
        """What the job sent next.

        Raises:
            TimeoutError: it sent nothing.
        """
        if not self.pipe.poll(TIMEOUT_S):
            raise TimeoutError(f"worker {self.process.pid}: no answer within {TIMEOUT_S:.0f} s")
        return self.pipe.recv()

    def close(self) -> None:
        """End the job."""
        self.pipe.send(0)
        self.process.join(TIMEOUT_S)


def compute(module: Weights, refresh: Callable[[], Any], pipe: Any) -> None:
    """Asked for a version, do one forward after another until one has all of its weights."""
    pipe.send("open")
    while version := pipe.recv():
        ends = None
        while ends != (version, version):
            refresh()
            ends = module()
        pipe.send(version)


def compute_torchrl(scheme: Any, nbytes: int, pipe: Any) -> None:
    """The worker of torchrl's scheme, whose thread applies the updates."""
    torch.set_num_threads(1)
    module = Weights(nbytes)
    scheme.init_on_receiver(model_id="policy", model=module, worker_idx=0)
    scheme.connect(worker_idx=0)
    compute(module, lambda: None, pipe)


def compute_channel(handle: Any, nbytes: int, pipe: Any) -> None:
    """A reader that looks for a newer version before every forward."""
    torch.set_num_threads(1)
    module = Weights(nbytes)
    with handle.open() as reader:
        compute(module, lambda: reader.load_into(module), pipe)


def lease(handle: Any, pipe: Any) -> None:
    """Take as many leases as asked for; answer with how many were torn, and how many mis-tagged."""
    torch.set_num_threads(1)
    with handle.open() as reader:
        pipe.send("open")
        while count := pipe.recv():
            torn = mistagged = 0
            for _ in range(count):
                with reader.lease() as held:
                    ends = [x.aminmax() for x in held.weights.values(True, True)]
                    low, high = min(e.min.item() for e in ends), max(e.max.item() for e in ends)
                    torn += low != high
                    mistagged += not low == high == held.version
            pipe.send((torn, mistagged))


class Leases:
    """Readers that lease one version after another under continuous publishing; call it to count."""

    def __init__(self, readers: int, leases: int, nbytes: int):
        from fusedrl import WeightChannel

        self.module = Weights(nbytes, tensors=8)
        self.channel = WeightChannel.create(self.module, slots=readers + 2)
        self.leases = leases // readers
        self._publish()
        self.readers = [Worker(lease, self.channel.handle) for _ in range(readers)]
        for reader in self.readers:
            reader.answer()

    def __call__(self, _: Any = None) -> Tensor:
        """[2]: torn leases, and leases whose weights are not those of their version."""
        published, done = self.module.version, threading.Event()
        publisher = threading.Thread(target=self._publish_until, args=(done,))
        publisher.start()
        try:
            for reader in self.readers:
                reader.pipe.send(self.leases)
            counts = torch.tensor([reader.answer() for reader in self.readers])
        finally:
            done.set()
            publisher.join()
        if self.module.version < published + len(self.readers):
            raise RuntimeError("leases: expected versions to follow each other, got hardly any")
        return counts.sum(0).double()

    def _publish(self) -> None:
        self.channel.publish(version=self.module.train_on())

    def _publish_until(self, done: threading.Event) -> None:
        while not done.is_set():
            self._publish()

    def close(self) -> None:
        """End the readers."""
        for reader in self.readers:
            reader.close()
        self.channel.close()
