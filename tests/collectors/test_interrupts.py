"""Ctrl-C in a turn: the turns that follow have the versions of their tags, and updates work."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from channel_collector import Says, of, policy_of
from counting_dialogs import Counting
from interrupts import at_each_instruction, storm
from torch import nn
from torchrl.collectors import Collector

from fusedrl import ChannelWeightSyncScheme, LLMCollector, WeightChannel
from fusedrl.channel.following import Following
from fusedrl.collectors.versions import Versions
from fusedrl.vllm.engine_follower import EngineFollower

MODES = pytest.mark.parametrize("mode", ["alias", "copy"])
STRICT = pytest.mark.parametrize("strict", [False, True], ids=["signals", "anywhere"])
SOME = pytest.mark.parametrize("some", [60, pytest.param(None, marks=pytest.mark.slow)])


class Collecting:
    """A collector whose turns are interrupted, each after an update.

    Args:
        kind: which collector.
        mode: of the channel.
    """

    def __init__(self, kind: str, mode: Any) -> None:
        self.version = 0
        policy = policy_of(Says())
        if kind == "channel":
            self.channel = WeightChannel.create(policy_of(Says()), timeout=1.0)
            self.publish()
            self.collector: Any = LLMCollector(
                Counting(),
                policy=policy,
                dialog_turns_per_batch=1,
                reset_at_each_iter=True,
                channel=self.channel.handle,
                channel_mode=mode,
                track_policy_version=True,
            )
            return
        scheme = ChannelWeightSyncScheme(mode=mode)
        options = {"weight_sync_schemes": {"policy": scheme}, "track_policy_version": True}
        if kind == "scheme":
            self.collector = LLMCollector(
                Counting(), policy=policy, dialog_turns_per_batch=1, **options
            )
        else:
            self.collector = Collector(
                Counting(), policy, frames_per_batch=1, total_frames=-1, **options
            )
        self.channel = scheme.channel
        self.version = self.channel.version or 0

    def publish(self) -> None:
        self.version += 1
        self.channel.publish(policy_of(Says(self.version)), self.version, timeout=1)

    def turn(self) -> Any:
        return next(iter(self.collector))

    def check(self) -> None:
        """The next turns are right, and no version is held but one."""
        for _ in range(4):  # more than there are slots
            self.publish()
        self.collector.reset()
        assert of(self.turn()) == [self.version] * Counting().batch_size[0]
        assert set(self.channel.readers()[0].leased) <= {self.version}
        self.publish()

    def close(self) -> None:
        self.collector.shutdown()
        self.channel.close()


@pytest.fixture(params=["channel", "scheme", "torchrl"])
def collecting(request, mode):
    made = Collecting(request.param, mode)
    made.turn()
    yield made
    made.close()


@SOME
@STRICT
@MODES
def test_an_interrupt_at_any_instruction_of_a_turn(collecting, strict, some):
    assert at_each_instruction(collecting.turn, collecting.check, strict, some) > 50


@pytest.mark.parametrize("interrupts", [100, pytest.param(5000, marks=pytest.mark.slow)])
@MODES
def test_a_storm_of_signals(collecting, interrupts):
    storm(collecting.turn, collecting.check, interrupts, 0.005)


class Engine(EngineFollower):
    """A follower of an engine that is a number: its version."""

    def __init__(self, reader: Any) -> None:
        Following.__init__(self, reader, nn.Identity())
        self.engine = None
        self._updates: Any = SimpleNamespace(has=self._has, load=self._load)

    def _has(self, version: int) -> bool:
        return self.engine == version

    def _load(self, version: int) -> int:
        self.engine = version
        return version


@STRICT
def test_an_engine_gets_the_newest_version_after_an_interrupt(strict):
    with WeightChannel.create(policy_of(Says())) as channel, channel.handle.open() as reader:
        follower, versions = Engine(reader), Versions()
        versions.follow(follower)

        def turn() -> None:
            with versions.held():
                assert follower.engine == follower.version == reader.version

        def check() -> None:
            assert follower.running == 0
            channel.publish(policy_of(Says()))
            turn()
            channel.publish(policy_of(Says()))

        check()
        assert at_each_instruction(turn, check, strict) > 20


@pytest.mark.parametrize("what", ["turn", "update"])
@pytest.mark.parametrize("busy", [False, True])
def test_an_interrupt_without_a_channel_leaves_nobody_waiting(what, busy, monkeypatch):
    monkeypatch.setattr("fusedrl.collectors.versions.WAIT_S", 20.0)
    versions, begun, ended = Versions(), threading.Event(), []
    blocks = {"turn": versions.held, "update": versions.one_update}

    def enter(way: str, seconds: float = 0.0) -> None:
        with blocks[way]():
            begun.set()
            time.sleep(seconds)
        ended.append(way)

    def interrupted() -> None:
        if not busy:
            return enter(what)
        begun.clear()
        other = threading.Thread(target=enter, args=("update", 0.003))
        other.start()
        try:
            begun.wait()
            enter(what)
        finally:
            other.join()

    def check() -> None:
        ended.clear()
        for way in ("update", "turn"):
            thread = threading.Thread(target=enter, args=(way,))
            thread.start()
            thread.join()
        assert ended == ["update", "turn"]

    assert at_each_instruction(interrupted, check, strict=False) > 50
