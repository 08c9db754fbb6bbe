"""Ctrl-C by chance: an interrupt drops what it meets, and nothing stays leased."""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Callable
from typing import Any

import channel_workers as workers
import pytest
import torch
from torch import nn

from fusedrl import _host
from fusedrl.channel import WeightChannel, WeightReader
from fusedrl.channel.follow import followers_of, one_version

LONGEST_S = 0.001


def storm(call: Callable[[], Any], check: Callable[[], Any], interrupts: int) -> None:
    """Interrupt ``call`` by signals that come by chance, and ``check`` what is left by each."""
    chance, armed = random.Random(interrupts), False

    def interrupt(*_: Any) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(interrupts):
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, LONGEST_S))
                while armed:
                    call()
            except KeyboardInterrupt as error:
                sys.last_value = error  # as an interactive interpreter keeps it
                torch.set_grad_enabled(True)  # torch.no_grad() may be interrupted in its exit
            check()
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def of(policy: nn.Module) -> set[float]:
    return {float(x) for parameter in policy.parameters() for x in parameter.detach()}


class Uses:
    """Each way in which a reader uses a version, right after one is published."""

    def __init__(self, channel: WeightChannel, reader: WeightReader) -> None:
        self.channel, self.reader = channel, reader
        self.policy = workers.model_of_zeros(64)
        self.follower = reader.follow(self.policy)
        self.alone, self.aliased = workers.model_of_zeros(64), workers.model_of_zeros(64)

    def publish(self) -> int:
        version = (self.channel.version or 0) + 1
        self.channel.publish(workers.weights_of(version, 64), version, timeout=1)
        return version

    def write(self) -> None:
        with self.channel.writing() as writing:
            for view in writing.views:
                view.fill_(writing.version)

    def lease(self) -> None:
        with self.reader.lease() as lease:
            assert workers.version_in(lease.weights) == lease.version

    def drop(self) -> None:
        _host.Lease(of=self.reader.lease())

    def hold(self) -> None:
        with _host.Held(7, self.reader.lease(), self.reader.lease()) as value:
            assert value == 7 and self.channel.readers()[0].leased

    def alias(self) -> None:
        version = self.reader.load_into(self.aliased)
        assert of(self.aliased) == {version}

    def load(self) -> None:
        version = self.reader.load_into(self.alone, "copy")
        assert of(self.alone) == {version}

    def follow(self) -> None:
        with self.follower.call() as version:
            assert of(self.policy) == {version}

    def follow_within(self) -> None:
        with one_version(self.policy), self.follower.call() as version:
            assert of(self.policy) == {version}


@pytest.mark.parametrize("interrupts", [200, pytest.param(5000, marks=pytest.mark.slow)])
def test_a_storm_of_interrupts_leaves_nothing_leased(interrupts):
    with (
        WeightChannel.create(workers.weights_of(0, 64), timeout=5) as channel,
        channel.handle.open() as reader,
    ):
        uses, chance = Uses(channel, reader), random.Random(interrupts)
        uses.publish()
        ways = (uses.write, uses.lease, uses.drop, uses.hold, uses.load, uses.alias, uses.follow)
        ways += (uses.follow_within,)

        def call() -> None:
            uses.publish()
            chance.choice(ways)()

        def check() -> None:
            assert len(of(uses.aliased)) == 1
            reader.load_into(uses.aliased, "copy")
            assert channel.readers()[0].leased == () and uses.follower._running() is None
            assert not channel._end.writing()
            version = uses.publish()
            with reader.lease() as lease:
                assert workers.version_in(lease.weights) == lease.version == version

        storm(call, check, interrupts)
        for _ in range(5):  # more than there are slots
            uses.publish()
            uses.follow()


def test_a_follower_that_an_interrupt_did_not_let_begin_loads_nothing():
    with (
        WeightChannel.create(workers.weights_of(0, 64), timeout=5) as channel,
        channel.handle.open() as reader,
    ):
        channel.publish(workers.weights_of(1, 64))
        policy = workers.model_of_zeros(64)

        def check() -> None:
            for follower in followers_of(policy):
                follower.close()
            follower = reader.follow(policy)
            with follower.call() as version:
                channel.publish(workers.weights_of(version + 1, 64))
                policy.state_dict()
                policy.load_state_dict(policy.state_dict())
                assert of(policy) == {version}
            follower.close()

        storm(lambda: reader.follow(policy).close(), check, 200)


def test_a_channel_that_was_interrupted_as_it_closed_is_closed_by_the_next_call():
    channels: list[WeightChannel] = []

    def opens_and_closes() -> None:
        channels[:] = [WeightChannel.create({"a": torch.zeros(1)})]
        channels[0].close()

    def check() -> None:
        channels[0].close()
        with pytest.raises(RuntimeError, match="open"):
            channels[0].handle.open()

    opens_and_closes()
    storm(opens_and_closes, check, 300)


def test_an_error_that_is_kept_keeps_neither_a_lease_nor_a_slot():
    """Its traceback has the frames of the blocks that it left."""
    with (
        WeightChannel.create(workers.weights_of(0, 64)) as channel,
        channel.handle.open() as reader,
    ):
        uses, errors = Uses(channel, reader), []
        uses.publish()

        def fails() -> None:
            held = _host.Held(None, reader.lease())
            with reader.lease(), held, uses.follower.call(), channel.writing():
                raise KeyboardInterrupt

        for call in (fails, lambda: channel.publish(workers.weights_of(1, 64), 1)):
            with pytest.raises((KeyboardInterrupt, ValueError)) as error:
                call()
            errors.append(error)
        assert channel.readers()[0].leased == () and uses.follower._running() is None
        assert uses.publish() == 2
