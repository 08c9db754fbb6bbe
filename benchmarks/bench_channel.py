"""The weight channel beside torchrl's shared-memory scheme: whole versions, and how soon."""

from __future__ import annotations

import ctypes
import fcntl
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import peers
from .harness import Case, Skipped

DEVICES = {"cpu"}

MB = 10**6
SIZES = {"100 MB": 100 * MB, "1 GB": 1000 * MB}
QUICK_SIZES = {"8 MB": 8 * MB}
READERS = 4
LEASES = 100_000
FRAMES = 800
CALLS = 1000  # of what takes microseconds, to a measurement
PUBLISH_GOAL = 0.8  # of one large copy_


def cases(device: str, quick: bool, usable: set[str]) -> Iterator[Case | Skipped]:
    """Torn and mis-tagged weights, publishing, leasing, loading, and all of it end to end."""
    sizes = QUICK_SIZES if quick else SIZES
    yield from whole_leases(LEASES // 50 if quick else LEASES)
    yield from lease_case()
    for size, nbytes in sizes.items():
        yield from publish_case(size, nbytes)
    yield from load_cases(*next(iter(sizes.items())))
    if peers.TORCHRL not in usable:
        yield Skipped("channel, collectors", "compares with torchrl's scheme: it is not installed")
        return
    if quick:
        yield Skipped("channel, collectors", "starts collectors, which takes a minute: no --quick")
        return
    yield from whole_frames(FRAMES)
    for size, nbytes in sizes.items():
        yield from end_to_end_case(size, nbytes)


def counted(
    what: str, setting: str, contender: str, run: Callable[[Any], Tensor], op: str = "channel"
) -> Iterator[Case]:
    """A case each for what is torn and what is mis-tagged: their number is the error."""
    for i, fault in enumerate(("torn", "mis-tagged")):
        yield Case(
            op=f"{op}: {fault} {what} (how many: max error)",
            setting=setting,
            make_input=lambda: None,
            contenders={contender: run},
            truth=lambda _: torch.zeros((), dtype=torch.float64),
            answer=lambda counts, i=i: counts[i],
        )


def whole_leases(leases: int) -> Iterator[Case]:
    """Readers in their own processes, each tensor of each lease looked at as a whole."""
    from .channel_workers import Leases

    with closing(Leases(READERS, leases, MB)) as run:
        setting = f"{leases} leases of 1 MB, {READERS} readers, continuous publishing"
        yield from counted("leases", setting, "fusedrl", run)


def whole_frames(frames: int) -> Iterator[Case]:
    """Frames of a torchrl collector whose policy tells which weights it computed with."""
    from torchrl.collectors import MultiAsyncCollector
    from torchrl.weight_update import SharedMemWeightSyncScheme

    from fusedrl import ChannelWeightSyncScheme

    from .channel_frames import Frames

    def collect(scheme: Any, env: Any, policy: Any, **options: Any) -> Any:
        schemes = {"policy": scheme}
        return MultiAsyncCollector([env], policy, weight_sync_schemes=schemes, **options)

    schemes = {"torchrl": SharedMemWeightSyncScheme, "fusedrl": ChannelWeightSyncScheme}
    for contender, scheme in schemes.items():
        with closing(Frames(partial(collect, scheme()), frames)) as run:
            setting = f"{frames} frames, MultiAsyncCollector, 400 tensors, continuous updates"
            yield from counted("frames", setting, contender, run)


def publish_case(size: str, nbytes: int) -> Iterator[Case]:
    """Weights into a slot, beside plain copies of as many bytes."""
    from tensordict import TensorDict

    from fusedrl import WeightChannel

    from .channel_workers import Weights

    module = Weights(nbytes)
    module.train_on()
    fresh = TensorDict.from_module(module).data
    shared = fresh.clone().share_memory_()
    source = torch.cat([x.view(-1) for x in module.tensors])
    target = torch.zeros_like(source)
    with WeightChannel.create(module) as channel:
        for _ in range(3):  # every page of every slot is there before the clock starts
            channel.publish()
        yield Case(
            op="channel: publish",
            setting=f"{size}, {len(module.tensors)} tensors float32",
            make_input=lambda: None,
            contenders={
                "TensorDict.update_, as torchrl": lambda _: shared.update_(fresh),
                "fusedrl": lambda _: channel.publish(),
            },
            timed_only={
                "copy_ of one tensor": lambda _: target.copy_(source),
                "memmove, one thread": lambda _: ctypes.memmove(
                    target.data_ptr(), source.data_ptr(), source.nbytes
                ),
            },
            goals={"copy_ of one tensor": PUBLISH_GOAL},
            work=2 * source.nbytes,
        )


def lease_case() -> Iterator[Case]:
    """A lease and its release, beside the two locks of the kernel that it is made of."""
    from fusedrl import WeightChannel

    from .channel_workers import Weights

    module = Weights(8 * MB)
    flock = [struct.pack("hhqqhi", kind, 0, 0, 1, 0, 0) for kind in (fcntl.F_RDLCK, fcntl.F_UNLCK)]

    def leases(_: Any) -> None:
        for _ in range(CALLS):
            reader.lease().release()

    def locks(_: Any) -> None:
        for _ in range(CALLS):
            for command in flock:
                fcntl.fcntl(file, fcntl.F_OFD_SETLK, command)

    with ExitStack() as stack:
        channel = stack.enter_context(WeightChannel.create(module))
        channel.publish()
        reader = stack.enter_context(channel.handle.open())
        file = stack.enter_context(tempfile.TemporaryFile())
        yield Case(
            op="channel: lease and release",
            setting=f"{CALLS} times, 400 tensors",
            make_input=lambda: None,
            contenders={"fusedrl": leases},
            timed_only={"fcntl, lock and unlock": locks},
            host_bound=True,
        )


def load_cases(size: str, nbytes: int) -> Iterator[Case]:
    """A new version into a module of a reader: its parameters rebound, or copied."""
    from fusedrl import WeightChannel

    from .channel_workers import Weights

    module, aliased, copied, plain = (Weights(nbytes) for _ in range(4))

    def publish() -> None:
        channel.publish(version=module.train_on())

    def load_state_dict(_: None) -> None:
        with reader.lease() as lease:
            plain.load_state_dict(lease.weights.flatten_keys(".").to_dict())

    def bytes_copied(_: None) -> Tensor:
        reader.load_into(aliased, "alias")
        slots = [range(*_ends(line)) for line in _maps() if "fusedrl-channel" in line]
        own = [x.nbytes for x in aliased.tensors if not any(x.data_ptr() in s for s in slots)]
        return torch.tensor(float(sum(own)), dtype=torch.float64)

    with ExitStack() as stack:
        channel = stack.enter_context(WeightChannel.create(module, slots=4))
        readers = [stack.enter_context(channel.handle.open()) for _ in range(3)]
        reader = readers[2]
        publish()
        yield Case(
            op="channel: load_into",
            setting=f"a new version, {size}, {len(module.tensors)} tensors",
            make_input=publish,
            contenders={
                "fusedrl, alias": lambda _: readers[0].load_into(aliased, "alias"),
                "fusedrl, copy": lambda _: readers[1].load_into(copied, "copy"),
                "lease and load_state_dict": load_state_dict,
            },
            host_bound=True,
        )
        yield Case(
            op="channel: bytes that load_into copies (how many: max error)",
            setting=f"alias, a new version, {size}",
            make_input=publish,
            contenders={"fusedrl": bytes_copied},
            truth=lambda _: torch.zeros((), dtype=torch.float64),
            host_bound=True,
        )


def end_to_end_case(size: str, nbytes: int) -> Iterator[Case]:
    """From the trainer's update until a worker has computed with all of the new weights."""
    from tensordict import TensorDict
    from torchrl.weight_update import SharedMemWeightSyncScheme

    from fusedrl import WeightChannel

    from .channel_workers import SPAWN, Weights, Worker, compute_channel, compute_torchrl

    module = Weights(nbytes)
    fresh = TensorDict.from_module(module).data
    scheme = SharedMemWeightSyncScheme()
    scheme.init_on_sender(
        model_id="policy",
        weights=fresh.clone(),  # else the trainer's own weights become the shared ones
        devices=[torch.device("cpu")],
        num_workers=1,
        ctx=SPAWN,
    )

    with ExitStack() as stack:
        channel = stack.enter_context(WeightChannel.create(module))
        channel.publish(version=module.train_on())
        theirs = stack.enter_context(closing(Worker(compute_torchrl, scheme, nbytes)))
        ours = stack.enter_context(closing(Worker(compute_channel, channel.handle, nbytes)))
        scheme.connect()
        stack.callback(scheme.shutdown)
        for worker in (theirs, ours):
            worker.answer()

        yield Case(
            op="channel: update to computing",
            setting=f"{size}, {len(module.tensors)} tensors, one worker",
            make_input=module.train_on,
            contenders={
                "torchrl": lambda version: theirs.ask(version, lambda: scheme.send(fresh)),
                "fusedrl": lambda version: ours.ask(
                    version, lambda: channel.publish(None, version)
                ),
            },
            host_bound=True,
        )


def _maps() -> list[str]:
    return Path("/proc/self/maps").read_text().splitlines()


def _ends(line: str) -> tuple[int, int]:
    start, end = line.split()[0].split("-")
    return int(start, 16), int(end, 16)
