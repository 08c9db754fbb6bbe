"""Ctrl-C at any instruction: nothing stays leased, and the next turn is right."""

from __future__ import annotations

import channel_workers as workers
import pytest
import torch
from interrupts import at_each_instruction, storm
from torch import nn

from fusedrl import _host
from fusedrl.channel import WeightReader
from fusedrl.channel.following import Follower, one_version

STRICT = pytest.mark.parametrize("strict", [False, True], ids=["signals", "anywhere"])
MODES = pytest.mark.parametrize("mode", ["alias", "copy"])
STORMS = pytest.mark.parametrize("interrupts", [200, pytest.param(5000, marks=pytest.mark.slow)])


def model() -> nn.Module:
    return nn.ParameterDict({name: torch.zeros(64) for name in "abcd"})


def of(policy: nn.Module) -> set[float]:
    return {float(x) for parameter in policy.parameters() for x in parameter.detach()}


@pytest.fixture
def channel():
    with workers.WeightChannel.create(workers.weights_of(0, 64), timeout=5) as channel:
        channel.publish(workers.weights_of(1, 64))
        yield channel


def publish_next(channel) -> None:
    version = (channel.version or 0) + 1
    channel.publish(workers.weights_of(version, 64), version, timeout=1)


class Turns:
    """Turns of a reader or a follower in one way, of which each checks its weights.

    Args:
        way: which.
        reader: reads the channel.
        publishes: publishes a version before each turn.
    """

    def __init__(self, way: str, mode: str, reader: WeightReader, publishes) -> None:
        self.way, self.mode, self.reader, self.publishes = way, mode, reader, publishes
        self.policy = model()
        followed = way in ("follower", "keeps", "entered", "one_version", "dropped")
        self.follower = Follower(reader, self.policy, mode, way == "keeps") if followed else None

    def turn(self) -> None:
        self.publishes()
        getattr(self, f"_{self.way}", self._follower)()

    def _lease(self) -> None:
        with self.reader.lease() as lease:
            assert workers.version_in(lease.weights) == lease.version

    def _dropped(self) -> None:
        self.reader.lease().share()

    def _load_into(self) -> None:
        version = self.reader.load_into(self.policy, self.mode)
        assert of(self.policy) == {version}

    def _follower(self) -> None:
        with self.follower as version:
            assert of(self.policy) == {version}

    def _entered(self) -> None:
        with _host.Entered(self.follower) as version:
            assert of(self.policy) == {version}

    def _one_version(self) -> None:
        with one_version(self.policy):
            assert of(self.policy) == {self.follower.version}

    def check(self, channel) -> None:
        """What an interrupt may leave: no lease but those that are to be kept, and a right turn."""
        if self.way not in ("keeps", "load_into"):
            assert channel.readers()[0].leased == ()
        assert self.follower is None or self.follower.running == 0
        self.turn()
        leased = channel.readers()[0].leased
        held = self.way == "keeps" and self.mode == "alias"
        held = held or (self.way == "load_into" and self.mode == "alias")
        assert leased == ((channel.version,) if held else ())


WAYS = pytest.mark.parametrize(
    ("way", "mode"),
    [
        ("lease", "alias"),
        ("dropped", "alias"),
        *(
            (w, m)
            for w in ("load_into", "follower", "keeps", "one_version")
            for m in ("alias", "copy")
        ),
    ],
)


@pytest.mark.parametrize("publishes", [True, False], ids=["new", "same"])
@STRICT
@WAYS
def test_an_interrupt_at_any_instruction(channel, way, mode, strict, publishes):
    with channel.handle.open() as reader:
        turns = Turns(way, mode, reader, lambda: publishes and publish_next(channel))
        turns.turn()

        def interrupted() -> None:
            turns.turn()

        publishing = turns.publishes
        turns.publishes = lambda: None

        def check() -> None:
            turns.check(channel)
            publishing()

        publishing()
        assert at_each_instruction(interrupted, check, strict) > 50


@STORMS
@WAYS
def test_a_storm_of_signals(channel, way, mode, interrupts):
    with channel.handle.open() as reader:
        turns = Turns(way, mode, reader, lambda: publish_next(channel))
        turns.turn()
        storm(turns.turn, lambda: turns.check(channel), interrupts, 0.001)
        for _ in range(5):
            publish_next(channel)
        turns.check(channel)


@pytest.fixture
def blocks(channel):
    """Calls with a block of the channel's, and what has to hold after each, by name."""
    reader = channel.handle.open()
    follower = Follower(reader, model())

    def write() -> None:
        with channel.writing() as writing:
            for view in writing.views:
                view.fill_(writing.version)

    def use() -> None:
        with one_version(follower.module):
            assert of(follower.module) == {follower.version}

    def check() -> None:
        assert follower.running == 0 and channel.readers()[0].leased == ()
        publish_next(channel)
        with reader.lease() as lease:
            assert workers.version_in(lease.weights) == lease.version == channel.version

    yield {"publish": lambda: publish_next(channel), "writing": write, "one_version": use}, check
    reader.close()


BLOCKS = pytest.mark.parametrize("block", ["publish", "writing", "one_version"])


@BLOCKS
def test_an_interrupt_whose_exception_is_kept_leaves_nothing_locked(blocks, block):
    """As a debugger keeps it, with all frames that it went through."""
    calls, check = blocks
    assert at_each_instruction(calls[block], check, strict=False, keeps=True) > 20


@BLOCKS
@STORMS
def test_a_storm_of_signals_whose_exceptions_are_kept(blocks, block, interrupts):
    calls, check = blocks
    storm(calls[block], check, interrupts, 0.0005, keeps=True)
