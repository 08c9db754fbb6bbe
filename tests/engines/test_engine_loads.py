"""Whichever call of an update fails, an engine answers with whole versions by their numbers."""

import asyncio
import contextlib

import pytest

from fusedrl import WeightHandle
from fusedrl.vllm.engine_loads import EngineLoads, to_its_end


class Engine:
    """What an engine's calls do, of which one fails.

    Args:
        failing: the number of the call that fails, or of the first of those that do.
        last: that of the last one.
        lost: it does what it was told to, though its answer does not come.
        error: that it fails with.
    """

    def __init__(self, failing=0, last=None, lost=False, error=RuntimeError):
        self.failing, self.last = failing, failing if last is None else last
        self.lost, self.error = lost, error
        self.key = id(self)
        self.calls = 0
        self.is_paused = self.begun = False
        self.weights = self.name = "default"
        self.stale = False
        self.attempt = None
        self.held = False

    def answers_rightly(self):
        return self.weights == self.name and not self.stale

    def says_nothing_wrong(self):
        """Even if somebody else resumed it."""
        return self.name in (self.weights, "unknown")

    async def called(self, effect):
        self.calls += 1
        fails = self.failing <= self.calls <= self.last
        if not fails or self.lost:
            effect()
        assert self.says_nothing_wrong()
        if fails:
            raise self.error("no answer")

    async def paused(self):
        return self.is_paused

    async def hold(self, info):
        await self.called(lambda: setattr(self, "held", not info["hold"].get("over", False)))

    async def label(self):
        return self.name

    async def number(self, version):
        await self.called(lambda: setattr(self, "name", version))

    async def pause(self, in_flight):
        assert self.held
        await self.called(lambda: setattr(self, "is_paused", True))

    async def resume(self):
        await self.called(lambda: setattr(self, "is_paused", False))
        assert self.answers_rightly()

    async def withhold(self):
        pass

    async def start(self):
        def effect():
            if self.begun:
                raise RuntimeError("already begun")
            self.begun = True

        await self.called(effect)

    async def load(self, info):
        def effect():
            if not self.begun:
                raise RuntimeError("not begun")
            self.attempt, self.weights, self.stale = info["attempt"], str(info["version"]), True

        await self.called(effect)

    async def finish(self, version):
        def effect():
            if not self.begun:
                raise RuntimeError("not begun")
            self.begun, self.name = False, version or self.name

        await self.called(effect)

    async def forget(self):
        await self.called(lambda: setattr(self, "stale", False))

    async def init(self, state):
        def effect():
            if state["expect"] == "ended" and self.begun:
                raise RuntimeError("not ended")
            if state["expect"] == "untouched" and state["attempt"] == self.attempt:
                raise RuntimeError("touched")

        await self.called(effect)


def loads_of(engine):
    return EngineLoads(WeightHandle(1, 3, "secret"), lambda: None, engine)


# hold twice, pause, number, init, start, load, forget, finish, resume, hold
RESUME, CALLS = 10, 11


def test_an_update_takes_these_calls():
    engine = Engine()
    loads = loads_of(engine)
    assert [loads.load(3), loads.load(4)] == [3, 4]
    assert engine.calls == 2 * CALLS
    assert (engine.weights, engine.name, engine.is_paused) == ("4", "4", False)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("lost", [False, True], ids=["refused", "answer lost"])
@pytest.mark.parametrize("many", [1, 2, 100], ids=["one call", "two calls", "all calls"])
@pytest.mark.parametrize("failing", range(1, CALLS + 1))
def test_an_engine_that_goes_on_has_what_it_says(failing, many, lost, error):
    engine = Engine(failing, failing + many - 1, lost, error)
    loads = loads_of(engine)
    notes = []
    try:
        loads.load(3)
    except error as raised:
        notes = getattr(raised, "__notes__", [])
    assert engine.is_paused or (engine.says_nothing_wrong() and not engine.stale)
    # Whoever is not told that it stays paused finds it running.
    assert notes or not engine.is_paused
    engine.last = 0
    assert loads.load(4) == loads.version == 4
    assert not engine.is_paused
    assert engine.weights == engine.name == "4"


def test_one_that_failed_in_the_middle_stays_paused_until_an_update_succeeds():
    engine = Engine(failing=7, lost=True)
    with pytest.raises(RuntimeError, match="no answer"):
        loads_of(engine).load(3)
    assert engine.is_paused
    engine.failing = engine.last = engine.calls + 7
    engine.lost = False
    # Of another trainer, whose update never touches the model.
    with pytest.raises(RuntimeError, match="no answer"):
        loads_of(engine).load(4)
    assert engine.is_paused
    assert loads_of(engine).load(5) == 5
    assert not engine.is_paused


@pytest.mark.parametrize("failing", [0, *range(3, RESUME)])
def test_a_pause_that_the_user_made_stays(failing):
    engine = Engine(failing)
    engine.is_paused = True
    loads = loads_of(engine)
    with contextlib.suppress(RuntimeError):
        loads.load(3)
    assert engine.is_paused
    assert failing or engine.weights == engine.name == "3"


def test_a_cancellation_takes_effect_at_the_end():
    done = []

    async def work():
        await asyncio.sleep(0.05)
        done.append(True)
        raise ValueError("that nobody waits for")

    async def main():
        task = asyncio.create_task(to_its_end(work()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert done == [True]

    asyncio.run(main())
