"""Whichever call of an update fails, an engine answers with whole versions by their numbers."""

import asyncio
import contextlib

import pytest

from fusedrl import WeightHandle
from fusedrl.vllm.updates import Updates, to_its_end


class Engine:
    """What a server's calls do, of which one fails.

    Args:
        failing: the number of the call that fails, or of the first of those that do.
        last: that of the last one.
        lost: it does what it was told to, though its answer does not come.
        error: that it fails with.
    """

    address = "http://localhost:8000"
    in_loop, requests_wait = False, True

    def __init__(self, failing=0, last=None, lost=False, error=RuntimeError):
        self.failing, self.last = failing, failing if last is None else last
        self.lost, self.error = lost, error
        self.key = id(self)
        self.calls = 0
        self.paused = False
        self.weights = self.named = "default"
        self.stale = False
        self.attempt = None
        self.held = False

    def answers_rightly(self):
        return self.weights == self.named and not self.stale

    def says_nothing_wrong(self):
        """Even if somebody else resumed it."""
        return self.named in (self.weights, "unknown")

    async def called(self, effect):
        self.calls += 1
        fails = self.failing <= self.calls <= self.last
        if not fails or self.lost:
            effect()
        assert self.says_nothing_wrong()
        if fails:
            raise self.error("no answer")

    async def ask(self, call, *args):
        return await call(*args)

    async def is_paused(self):
        return self.paused

    async def label(self):
        return self.named

    async def name(self, label):
        await self.called(lambda: setattr(self, "named", label))

    async def pause(self, mode):
        assert self.held
        await self.called(lambda: setattr(self, "paused", True))

    async def resume(self):
        await self.called(lambda: setattr(self, "paused", False))
        assert self.answers_rightly()

    async def forget(self):
        await self.called(lambda: setattr(self, "stale", False))

    async def tell(self, message):
        def effect():
            if hold := message.get("hold"):
                self.held = not hold.get("over", False)
            elif update := message.get("update"):
                self.attempt, self.weights = update["attempt"], str(update["version"])
                self.stale = True
            elif message["untouched_by"] == self.attempt:
                raise RuntimeError("touched")

        await self.called(effect)


def updates_of(engine):
    return Updates(WeightHandle(1, 3, "secret"), lambda: None, engine)


# hold twice, pause, name, update, forget, name, resume, leave
UPDATE, RESUME, CALLS = 5, 8, 9


def test_an_update_takes_these_calls():
    engine = Engine()
    updates = updates_of(engine)
    assert [updates.load(3), updates.load(4)] == [3, 4]
    assert engine.calls == 2 * CALLS
    assert (engine.weights, engine.named, engine.paused) == ("4", "4", False)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("lost", [False, True], ids=["refused", "answer lost"])
@pytest.mark.parametrize("many", [1, 2, 100], ids=["one call", "two calls", "all calls"])
@pytest.mark.parametrize("failing", range(1, CALLS + 1))
def test_an_engine_that_goes_on_has_what_it_says(failing, many, lost, error):
    engine = Engine(failing, failing + many - 1, lost, error)
    updates = updates_of(engine)
    notes = []
    try:
        updates.load(3)
    except error as raised:
        notes = getattr(raised, "__notes__", [])
    assert engine.paused or (engine.says_nothing_wrong() and not engine.stale)
    # Whoever is not told that it stays paused finds it running.
    assert notes or not engine.paused
    engine.last = 0
    assert updates.load(4) == updates.version == 4
    assert not engine.paused
    assert engine.weights == engine.named == "4"


def test_one_that_failed_in_the_middle_stays_paused_until_an_update_succeeds():
    engine = Engine(failing=UPDATE, lost=True)
    with pytest.raises(RuntimeError, match="no answer"):
        updates_of(engine).load(3)
    assert engine.paused
    engine.failing = engine.last = engine.calls + UPDATE
    engine.lost = False
    # Of another trainer, whose update never touches the model.
    with pytest.raises(RuntimeError, match="no answer"):
        updates_of(engine).load(4)
    assert engine.paused
    assert updates_of(engine).load(5) == 5
    assert not engine.paused


@pytest.mark.parametrize("failing", [0, *range(3, RESUME)])
def test_a_pause_that_the_user_made_stays(failing):
    engine = Engine(failing)
    engine.paused = True
    updates = updates_of(engine)
    with contextlib.suppress(RuntimeError):
        updates.load(3)
    assert engine.paused
    assert failing or engine.weights == engine.named == "3"


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
