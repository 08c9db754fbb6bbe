"""What ranks run that publish a sharded model together, for processes to import."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models.tiny import model_of
from shared_models import sharded
from torch import nn
from torch.distributed.fsdp import fully_shard

from fusedrl import ChannelWeightSyncScheme, WeightChannel
from fusedrl.channel.layout import Layout
from fusedrl.channel.tensors import Weight
from fusedrl.vllm import EngineWeights

PATIENCE = 60.0  # seconds for ranks on busy cores


def model(kind: str = "qwen2") -> Any:
    return sharded(model_of(kind))


def set_to(weights: nn.Module, number: float) -> None:
    with torch.no_grad():
        for parameter in weights.parameters():
            parameter.fill_(number)


def leased(channel: WeightChannel) -> tuple[int, set[float]] | None:
    """The newest version and the numbers in it, where there are slots."""
    if not channel.holds:
        return None
    with channel.handle.open() as reader, reader.lease() as lease:
        values = torch.cat([t.flatten() for t in lease.weights.values(True, True)])
        return lease.version, set(values.unique().tolist())


def said(function: Any, *args: Any, **options: Any) -> Any:
    """What a call returns, or the text of its error."""
    try:
        return function(*args, **options)
    except (Exception, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"


def publishes(holders: list[int] | None, kind: str, **options: Any) -> list[Any]:
    """Versions, what readers get of them, and what gathering by hand gives."""
    weights = model(kind)
    holds = None if holders is None else dist.get_rank() in holders
    with WeightChannel.create(weights, holds=holds, rank_timeout=PATIENCE, **options) as channel:
        found = [channel.publish(), channel.version, channel.publish(version=7)]
        expected = [parameter.full_tensor() for parameter in weights.parameters()]
        if channel.holds:
            with channel.handle.open() as reader, reader.lease() as lease:
                got = [lease.weights[tuple(n.split("."))] for n, _ in weights.named_parameters()]
                assert len(got) == len(expected)
                assert all(
                    torch.equal(a, b.to(a.dtype)) for a, b in zip(got, expected, strict=True)
                )
                found += [lease.version, channel.device.type]
        else:
            for use in (lambda: channel.handle, lambda: channel.device, channel.readers):
                assert "RuntimeError: channel: expected one with slots" in said(use)
        set_to(weights, 2.0)
        return [*found, channel.publish(), leased(channel)]


def without_a_slot() -> list[Any]:
    """What all ranks get where the readers hold all slots: an error, and then a version."""
    weights = model()
    with WeightChannel.create(weights, slots=2, rank_timeout=PATIENCE) as channel:
        channel.publish()
        if channel.holds:
            readers = [channel.handle.open() for _ in range(2)]
            leases = [readers[0].lease()]
        channel.publish()
        if channel.holds:
            leases.append(readers[1].lease())
        error = said(channel.publish, timeout=0)
        if channel.holds:
            for lease, reader in zip(leases, readers, strict=True):
                lease.release()
                reader.close()
        return [error, channel.publish(), channel.version]


def alone() -> list[Any]:
    """One rank creates and publishes before the others do; then all do it together."""
    weights = model()
    found = []
    if dist.get_rank() != 0:
        dist.barrier()
    began = time.monotonic()
    found.append(said(WeightChannel.create, weights, rank_timeout=1.0))
    found.append(time.monotonic() - began < 20)
    if dist.get_rank() == 0:
        dist.barrier()
    with WeightChannel.create(weights, rank_timeout=1.0) as channel:
        channel.rank_timeout = PATIENCE
        dist.barrier()
        if dist.get_rank() != 0:
            dist.barrier()
        channel.rank_timeout = 1.0
        began = time.monotonic()
        found.append(said(channel.publish))  # whose timeout, for a slot, is a minute
        found.append(time.monotonic() - began < 20)
        if dist.get_rank() == 0:
            dist.barrier()
        channel.rank_timeout = PATIENCE
        found.append(channel.publish())
    return found


@contextmanager
def after_writing(action: Any, *args: Any) -> Any:
    """Act when the weights are in the slot and nobody knows of it."""
    write = Layout.write

    def writes(*its: Any) -> None:
        write(*its)
        action(*args)

    Layout.write = writes
    try:
        yield
    finally:
        Layout.write = write


def errors(rank: int) -> list[Any]:
    """What all ranks say where one has weights that do not fit, and then publish again."""
    weights, other = model(), nn.Linear(3, 3)
    fully_shard(other, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    mine = dist.get_rank() == rank
    whole = {name: parameter.full_tensor() for name, parameter in weights.named_parameters()}
    with WeightChannel.create(weights, rank_timeout=PATIENCE) as channel:
        found = [
            said(channel.publish, whole if mine else None),
            said(channel.publish, other if mine else None),
            said(channel.publish, version="x" if mine else None),
            said(channel.publish, timeout=-1 if mine else None),
            said(channel.publish, version=7 if mine else 5),
            said(channel.publish, version=7 if mine else None),
        ]
        with after_writing(int if mine else str, "written"):
            found.append(said(channel.publish))
        create = partial(WeightChannel.create, weights, rank_timeout=PATIENCE)
        return [*found, said(create if mine else channel.publish), channel.publish()]


def layouts() -> list[Any]:
    """Ranks that create channels for different models, or where none holds slots, or one cannot."""
    dtype = torch.bfloat16 if dist.get_rank() else None
    weights, mine = model(), bool(dist.get_rank())
    wrong = {"slots": 1, "dtype": torch.int8, "max_readers": 0, "rank_timeout": -1.0}
    options = [
        {"rank_timeout": PATIENCE, **({name: x} if mine else {})} for name, x in wrong.items()
    ]
    return [
        *(said(WeightChannel.create, weights, **each) for each in options),
        said(WeightChannel.create, weights, dtype=dtype, rank_timeout=PATIENCE),
        said(WeightChannel.create, weights, holds=False, rank_timeout=PATIENCE),
        said(WeightChannel.create, weights, slots=1, rank_timeout=PATIENCE),
        WeightChannel.create(weights, rank_timeout=PATIENCE).publish(),
    ]


@contextmanager
def at_tensor(number: int, action: Any) -> Any:
    """Act before the tensor of this number is gathered."""
    gather, count = Weight.value, 0

    def value(self: Weight, *args: Any) -> Any:
        nonlocal count
        count += 1
        if count == number:
            action()
        return gather(self, *args)

    Weight.value = value
    try:
        yield
    finally:
        Weight.value = gather


def interrupted(rank: int) -> list[Any]:
    """Ctrl-C on one rank while tensors are gathered."""
    weights = model()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    action = (lambda: signal.raise_signal(signal.SIGINT)) if dist.get_rank() == rank else int
    with WeightChannel.create(weights, rank_timeout=PATIENCE) as channel:
        with at_tensor(3, action):
            found = [said(channel.publish), channel.version]
        return [*found, channel.publish()]


def killed(rank: int) -> Any:
    """What the others say where one ends by SIGKILL while tensors are gathered."""
    weights = model()
    action = (lambda: os.kill(os.getpid(), signal.SIGKILL)) if dist.get_rank() == rank else int
    channel = WeightChannel.create(weights, rank_timeout=2.0, timeout=1.0)
    with channel, at_tensor(3, action):
        return said(channel.publish), channel.version


def peak(rows: int) -> tuple[int, int, int]:
    """Bytes of memory beyond what was there that a publish takes at most; a tensor's; a slot's."""
    torch.manual_seed(0)
    weights = nn.Sequential(*(nn.Linear(rows, rows, bias=False) for _ in range(16)))
    for layer in weights:
        fully_shard(layer, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    with WeightChannel.create(weights, slots=2, rank_timeout=PATIENCE) as channel:
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 2**16)  # M_MMAP_THRESHOLD: what is freed is no memory of this process
        channel.publish()  # what is allocated once, such as gloo's buffers
        libc.malloc_trim(0)
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = _status("VmRSS")
        channel.publish()  # into a slot whose memory is new
        return _status("VmHWM") - before, 4 * rows * rows, Layout.of(weights).nbytes


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(name))
    return int(line.split()[1]) * 1024


def updates_of_a_collector() -> list[Any]:
    """Versions where a scheme of torchrl's collectors publishes on the first rank."""
    weights = model()
    if dist.get_rank() == 0:
        scheme = ChannelWeightSyncScheme()
        scheme.init_on_sender(model_id="policy", model=weights)
        scheme.connect()
        found = [scheme.version, scheme.send(), leased(scheme.channel)]
        scheme.shutdown()
        return found
    with WeightChannel.create(weights, rank_timeout=PATIENCE) as channel:
        return [channel.publish(), channel.publish(), said(EngineWeights, channel, object())]
