"""Whichever call of an update fails, an engine answers with whole versions by their numbers."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest
import torch

from fusedrl import WeightChannel, WeightHandle
from fusedrl.vllm import EngineWeights
from fusedrl.vllm.update import Update, run_calls, shielded


class Engine:
    """What a server's calls do, of which some fail.

    Args:
        failing: the numbers of those that fail.
        lost: it does what it was told to, though its answer does not come.
        error: that it fails with.
    """

    address = "http://localhost:8000"
    in_loop, requests_wait = False, True
    is_users = False  # a pause before the update

    def __init__(self, failing=(), lost=False, error=RuntimeError):
        self.failing, self.lost, self.error = failing, lost, error
        self.calls = 0
        self.paused = self.stopped = False
        self.loaded = None
        self.weights = self.named = self.keys = "default"
        self.leased = None
        self.held = False

    def answers_rightly(self):
        return self.weights == self.named and self.keys in (None, self.weights)

    def says_nothing_wrong(self):
        """Even if somebody else resumed it."""
        return self.named in (self.weights, "unknown")

    async def called(self, effect, half=None):
        self.calls += 1
        fails = self.calls in self.failing
        if not fails or self.lost:
            effect()
        elif half:
            half()
        assert self.says_nothing_wrong()
        if fails:
            raise self.error("no answer")

    async def ask(self, call, *args):
        return await call(*args)

    async def is_paused(self):
        return self.paused

    async def label(self):
        return self.named

    async def set_label(self, label):
        await self.called(lambda: setattr(self, "named", label))

    async def pause(self, mode):
        assert self.held
        await self.called(lambda: setattr(self, "paused", True))

    async def resume(self):
        def effect():
            assert self.answers_rightly()
            self.paused, self.keys = False, self.weights

        await self.called(effect)

    async def reset_kv_cache(self):
        assert self.paused
        await self.called(lambda: setattr(self, "keys", None))
        return True

    async def reset_encoder_cache(self):
        pass

    async def send(self, message):
        if lease := message.get("lease"):
            assert lease["stays"] is (self.paused and self.named != "unknown" and self.is_users)
            await self.called(lambda: self.lease(str(lease["version"])))
        elif version := message.get("load"):
            await self.called(lambda: self.load(str(version)), lambda: self.load("half"))
        else:
            assert message["over"]
            await self.called(lambda: setattr(self, "held", False))

    def lease(self, version):
        self.leased, self.held = version, True

    def load(self, weights):
        assert self.paused
        assert self.keys is None
        assert self.named == "unknown"
        assert weights in (self.leased, "half")
        self.weights = weights


def update_of(engine):
    """A function that brings a version, with what it says that the engine has."""
    update = Update(engine, WeightHandle(1, 3, "secret"), SimpleNamespace(version=None))

    def load(version):
        return run_calls(update.run(version))

    return load, lambda: update.version


# lease, pause, forget, name, load, name, resume, over
PAUSE, NAME, LOAD, CALLS = 2, 4, 5, 8


def test_an_update_takes_these_calls():
    engine = Engine()
    load, _ = update_of(engine)
    assert [load(3), load(4)] == [3, 4]
    assert engine.calls == 2 * CALLS
    assert (engine.weights, engine.named, engine.paused) == ("4", "4", False)


FAILING = [
    pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt]),
    pytest.mark.parametrize("lost", [False, True], ids=["refused", "answer lost"]),
    pytest.mark.parametrize("failing", range(1, CALLS + 1)),
]


def for_each_failing(test):
    for mark in FAILING:
        test = mark(test)
    return test


@for_each_failing
def test_whichever_call_fails_it_has_the_version_before_or_this_one(failing, lost, error):
    engine = Engine([failing + CALLS], lost, error)
    load, version = update_of(engine)
    assert load(3) == 3
    raises = failing < PAUSE or error is KeyboardInterrupt
    with pytest.raises(error) if raises else contextlib.nullcontext():
        assert load(4) == 4
    has = 3 if failing < PAUSE else 4
    assert (engine.weights, engine.named, version()) == (str(has), str(has), has)
    assert not engine.paused
    assert not engine.held or failing == CALLS  # it learns of its end from the next update
    assert load(5) == version() == 5
    assert engine.weights == engine.named == "5"


@for_each_failing
@pytest.mark.parametrize("many", [2, 3, 4, 5, 6, 100], ids=str)
def test_if_more_calls_fail_it_goes_on_with_what_it_says_or_not_at_all(failing, many, lost, error):
    engine = Engine(range(failing, failing + many), lost, error)
    load, version = update_of(engine)
    with contextlib.suppress(RuntimeError, KeyboardInterrupt):
        load(3)
        assert version() == 3
    assert engine.paused or (engine.says_nothing_wrong() and engine.weights != "half")
    engine.failing = ()
    assert load(4) == version() == 4
    assert not engine.paused
    assert engine.weights == engine.named == "4"


def test_one_that_fails_twice_stays_paused_until_an_update_succeeds():
    engine = Engine([LOAD, LOAD + 4])  # after another pause, forget and name
    with pytest.raises(RuntimeError, match="version 3 at the second try, got no answer"):
        update_of(engine)[0](3)
    assert engine.paused
    assert engine.named == "unknown"
    assert not engine.held
    # Of another trainer, whose update fails too, before it has loaded anything.
    engine.stopped = False
    engine.failing = [engine.calls + PAUSE, engine.calls + PAUSE + 1]
    with pytest.raises(RuntimeError, match="no answer"):
        update_of(engine)[0](4)
    assert engine.paused
    assert update_of(engine)[0](5) == 5
    assert not engine.paused


@pytest.mark.parametrize("failing", range(CALLS + 1))
def test_a_pause_that_the_user_made_stays(failing):
    engine = Engine([failing])
    engine.paused = engine.is_users = True
    with contextlib.suppress(RuntimeError):
        update_of(engine)[0](3)
    assert engine.paused
    assert 0 < failing < PAUSE or engine.weights == engine.named == "3"


def test_an_address_that_others_reach_is_logged_once(caplog):
    caplog.set_level("WARNING", logger="fusedrl")  # vLLM's app makes the root logger's ERROR
    with WeightChannel.create({"a": torch.zeros(1)}) as channel:
        for host in ("127.0.0.1", "localhost", "[::1]", "10.0.0.7", "10.0.0.7", "trainer.example"):
            EngineWeights(channel, f"http://{host}:8000")
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == 2
    assert all("the channel's secret" in text for text in logged)


def test_cancellations_take_effect_at_the_end():
    done = []

    async def work():
        await asyncio.sleep(0.05)
        done.append(True)
        raise ValueError("that nobody waits for")

    async def main():
        task = asyncio.create_task(shielded(work()))
        for _ in range(3):
            await asyncio.sleep(0)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert done == [True]

    asyncio.run(main())
