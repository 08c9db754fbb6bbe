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
        self.weights = self.former = self.named = self.keys = "default"
        self.attempt = None
        self.held = False

    def answers_rightly(self):
        return self.weights == self.named and self.keys in (None, self.weights)

    def says_nothing_wrong(self):
        """Even if somebody else resumed it."""
        return self.named in (self.weights, "unknown")

    async def called(self, effect, half=None):
        self.calls += 1
        fails = self.failing <= self.calls <= self.last
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

    async def name(self, label):
        await self.called(lambda: setattr(self, "named", label))

    async def pause(self, mode):
        assert self.held
        await self.called(lambda: setattr(self, "paused", True))

    async def resume(self):
        def effect():
            assert self.answers_rightly()
            self.paused, self.keys = False, self.weights

        await self.called(effect)

    async def forget(self):
        assert self.paused
        await self.called(lambda: setattr(self, "keys", None))

    async def tell(self, message):
        if hold := message.get("hold"):
            await self.called(lambda: setattr(self, "held", hold["name"]))
        elif update := message.get("update"):
            await self.called(
                lambda: self.load(update["attempt"], str(update["version"])),
                lambda: self.load(update["attempt"], "half"),
            )
        elif attempt := message.get("undo"):
            await self.called(lambda: self.undo(attempt))
        else:
            await self.called(lambda: setattr(self, "held", False))

    def load(self, attempt, weights):
        assert self.paused
        if self.attempt != attempt:
            self.attempt, self.former = attempt, self.weights
        self.weights = weights

    def undo(self, attempt):
        assert self.paused or self.attempt != attempt
        if self.attempt == attempt:
            assert self.keys is None
            self.weights = self.former


def updates_of(engine):
    return Updates(WeightHandle(1, 3, "secret"), lambda: None, engine)


# hold twice, pause, name, forget, update, name, resume, leave
UPDATE, RESUME, CALLS = 6, 8, 9


def test_an_update_takes_these_calls():
    engine = Engine()
    updates = updates_of(engine)
    assert [updates.load(3), updates.load(4)] == [3, 4]
    assert engine.calls == 2 * CALLS
    assert (engine.weights, engine.named, engine.paused) == ("4", "4", False)


def failed(updates, version, error=RuntimeError):
    """The notes of an update that may fail, and the notes of none that does not."""
    try:
        updates.load(version)
    except error as raised:
        return getattr(raised, "__notes__", [])
    return []


FAILING = [
    pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt]),
    pytest.mark.parametrize("lost", [False, True], ids=["refused", "answer lost"]),
    pytest.mark.parametrize("failing", range(3, CALLS + 1)),
]


def for_each_failing(test):
    for mark in FAILING:
        test = mark(test)
    return test


@for_each_failing
def test_whichever_call_fails_it_answers_with_the_version_before(failing, lost, error):
    engine = Engine(failing + CALLS, None, lost, error)
    updates = updates_of(engine)
    assert updates.load(3) == 3
    notes = failed(updates, 4, error)
    assert not engine.paused
    assert not engine.held or failing == CALLS  # it learns of its end from the next update
    if failing == CALLS and error is RuntimeError:
        assert (engine.weights, engine.named, notes) == ("4", "4", [])
    elif failing < CALLS:
        assert (engine.weights, engine.named, updates.version) == ("3", "3", 3)
        assert notes == ["engine: it goes on with the version before, '3'"]
    assert updates.load(5) == updates.version == 5
    assert engine.weights == engine.named == "5"


@for_each_failing
@pytest.mark.parametrize("many", [2, 3, 4, 100], ids=str)
def test_if_more_calls_fail_it_goes_on_with_what_it_says_or_not_at_all(failing, many, lost, error):
    engine = Engine(failing, failing + many - 1, lost, error)
    updates = updates_of(engine)
    notes = failed(updates, 3, error) if failing < CALLS else [str(updates)]
    assert engine.paused or (engine.says_nothing_wrong() and engine.weights != "half")
    # Whoever is not told that it stays paused finds it running.
    assert not engine.paused or "parts of two versions" in notes[0]
    engine.last = 0
    assert updates.load(4) == updates.version == 4
    assert not engine.paused
    assert engine.weights == engine.named == "4"


@pytest.mark.parametrize("failing", [1, 2])
def test_a_server_that_cannot_be_taken_is_left_alone(failing):
    engine = Engine(failing)
    with pytest.raises(RuntimeError, match="no answer"):
        updates_of(engine).load(3)
    assert (engine.weights, engine.named, engine.paused) == ("default", "default", False)


def test_one_that_cannot_go_back_stays_paused_until_an_update_succeeds():
    engine = Engine(failing=UPDATE, last=UPDATE + 1)
    with pytest.raises(RuntimeError, match="no answer"):
        updates_of(engine).load(3)
    assert engine.paused
    engine.failing = engine.last = engine.calls + UPDATE
    # Of another trainer, whose update fails too.
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
