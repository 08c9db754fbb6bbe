"""The channel's protocol as a model: every interleaving of its atomic steps, and every death.

The publisher and each thread of a reader are programs of atomic steps. Between any two steps the
others may move, and a process may be killed, whose locks the kernel then drops. ``explore`` visits
every state that can be reached and checks what must hold in each. Waits are polled in slices, so
that a wake-up changes how soon a step is taken, and never whether it may be: none is modelled.

``python tests/channel/protocol_model.py`` makes larger searches than the tests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

EMPTY, WRITING, READY = "EMPTY", "WRITING", "READY"
# Where a program stands when at none of its steps.
IDLE, BLOCKED, UNDO, DONE = -1, -2, -3, -4
PUBLISH = ("lock", "writing", "copy first", "copy second", "version", "ready", "unlock", "publish")
LEASE = ("load", "lock", "check state", "check version", "release")  # leased when at "release"


class Slot(NamedTuple):
    """What the control page says of a slot, and the version that each half of its bytes is of."""

    state: str = EMPTY
    version: int = 0
    first: int = 0
    second: int = 0


class Word(NamedTuple):
    """``published``: the newest version and its slot, stored and loaded as one."""

    version: int = 0
    slot: int = -1


class Publisher(NamedTuple):
    """The step to come, the version and the slot that it is for, and the slot it has locked."""

    at: int = IDLE
    version: int = 0
    slot: int = -1
    locked: int = -1


class Thread(NamedTuple):
    """How many leases it still takes, the step to come, and the word that it loaded."""

    left: int
    at: int = 0
    word: Word = Word()


class Reader(NamedTuple):
    """A process with one open file: for each slot the leases counted and whether it is locked."""

    counts: tuple[int, ...]
    locks: tuple[bool, ...]
    threads: tuple[Thread, ...]

    def leasing(self, i: int) -> Reader:
        """One lease of slot ``i`` more; the first locks. A mutex of the process makes it atomic."""
        locks = self.locks if self.counts[i] else with_item(self.locks, i, True)
        return self._replace(counts=with_item(self.counts, i, self.counts[i] + 1), locks=locks)

    def releasing(self, i: int, unlocks_at: int, releases: int = 1) -> Reader:
        """One lease of slot ``i`` less, without the lock when at most ``unlocks_at`` are left."""
        left = self.counts[i] - releases
        locked = self.locks[i] and left > unlocks_at
        return self._replace(
            counts=with_item(self.counts, i, left), locks=with_item(self.locks, i, locked)
        )


DEAD = Reader((), (), ())


class State(NamedTuple):
    """All there is at one moment; a killed publisher is ``None``."""

    word: Word
    slots: tuple[Slot, ...]
    publisher: Publisher | None
    readers: tuple[Reader, ...]
    orphans: frozenset[int] = frozenset()  # slots locked by the dead

    def key(self) -> State:
        """The same for states that differ in the order of readers and threads alone."""
        readers = (r._replace(threads=tuple(sorted(r.threads))) for r in self.readers)
        return self._replace(readers=tuple(sorted(readers)))

    def leased(self, i: int) -> bool:
        """Whether a live reader has slot ``i`` locked."""
        return any(reader.locks[i] for reader in self.readers if reader is not DEAD)

    def refuses(self, i: int, *, shared: bool) -> bool:
        """Whether another's lock on slot ``i`` forbids one that is shared, or exclusive."""
        exclusive = self.publisher is not None and self.publisher.locked == i
        return exclusive or i in self.orphans or (not shared and self.leased(i))


Move = tuple[str, State]


@dataclass(frozen=True)
class Protocol:
    """The rules, which mutants change, and how many take part."""

    publish: tuple[str, ...] = PUBLISH
    lease: tuple[str, ...] = LEASE
    spares_published: bool = True  # the publisher leaves the published slot alone
    unlocks_at: int = 0  # leases of a file on a slot that are left when the slot is unlocked
    releases: int = 1  # how often a lease counts as released
    death_unlocks: bool = True
    slots: int = 3
    readers: int = 1
    threads: int = 1  # of each reader
    leases: int = 2  # of each thread, one after the other
    publishes: int = 4
    copies_fail: bool = True  # a publish may raise halfway

    def start(self) -> State:
        """Nothing is published, and nobody has moved."""
        threads = (Thread(self.leases),) * self.threads
        reader = Reader((0,) * self.slots, (False,) * self.slots, threads)
        return State(Word(), (Slot(),) * self.slots, Publisher(), (reader,) * self.readers)

    def moves(self, state: State) -> Iterator[Move]:
        """Every step that somebody can take, and every death."""
        if state.publisher is not None:
            yield from self.publisher_moves(state, state.publisher)
            held = {state.publisher.locked} - {-1}
            yield "publisher is killed", self.bury(state._replace(publisher=None), held)
        for r, reader in enumerate(state.readers):
            for t in range(len(reader.threads)):
                yield from self.thread_moves(state, r, t)
            if reader is not DEAD:
                held = {i for i, locked in enumerate(reader.locks) if locked}
                without = state._replace(readers=with_item(state.readers, r, DEAD))
                yield f"reader {r} is killed", self.bury(without, held)

    def bury(self, state: State, held: set[int]) -> State:
        """``state`` when the kernel has closed the files of the dead."""
        return state if self.death_unlocks else state._replace(orphans=state.orphans | held)

    def candidates(self, state: State) -> list[int]:
        """The slots that the publisher may write, in the order in which it tries them."""
        most = self.slots - (state.word.version > 0 and self.spares_published)
        return [(state.word.slot + 1 + i) % self.slots for i in range(most)]

    def publisher_moves(self, state: State, me: Publisher) -> Iterator[Move]:
        """The publisher's next step, if there is one."""
        if me.at in (IDLE, BLOCKED):
            if me.at == BLOCKED or me.version < self.publishes:
                version = me.version + (me.at == IDLE)
                begun = Publisher(0, version, self.candidates(state)[0])
                yield f"publisher: begins version {version}", state._replace(publisher=begun)
            return
        i, step = me.slot, self.publish[me.at]
        says = f"publisher: {step}, slot {i}"
        if step == "lock" and state.refuses(i, shared=False):
            candidates = self.candidates(state)
            later = candidates[candidates.index(i) + 1 :]
            tried = me._replace(slot=later[0]) if later else Publisher(BLOCKED, me.version)
            yield f"{says}: refused", state._replace(publisher=tried)
            return
        me = me._replace(at=me.at + 1, locked={"lock": i, "unlock": -1}.get(step, me.locked))
        if me.at == len(self.publish):
            me = Publisher(IDLE, me.version, locked=me.locked)
        fields: dict[str, dict[str, Any]] = {
            "writing": {"state": WRITING},
            "copy first": {"first": me.version},
            "copy second": {"second": me.version},
            "version": {"version": me.version},
            "ready": {"state": READY},
        }
        slot = state.slots[i]._replace(**fields.get(step, {}))
        slots = with_item(state.slots, i, slot)
        word = Word(me.version, i) if step == "publish" else state.word
        yield says, state._replace(word=word, slots=slots, publisher=me)
        if step == "copy second" and self.copies_fail:
            again = Publisher(IDLE, me.version - 1)
            yield f"{says}: raises, unlocks", state._replace(publisher=again)

    def thread_moves(self, state: State, r: int, t: int) -> Iterator[Move]:
        """The next step of a reader's thread, if there is one."""
        reader = state.readers[r]
        me = reader.threads[t]
        if me.at == DONE or (me.at == 0 and not state.word.version):
            return
        step = "undo" if me.at == UNDO else self.lease[me.at]
        after = me._replace(at=me.at + 1, word=state.word if step == "load" else me.word)
        i = after.word.slot
        slot, says = state.slots[i], f"reader {r}, thread {t}: {step}, slot {i}"
        if step == "lock" and not reader.counts[i] and state.refuses(i, shared=True):
            says, after = f"{says}: refused", Thread(me.left)
        elif step == "lock":
            reader = reader.leasing(i)
        elif step == "check state" and slot.state != READY:
            says, after = f"{says}: {slot.state}", me._replace(at=UNDO)
        elif step == "check version" and slot.version != me.word.version:
            says, after = f"{says}: {slot.version}", me._replace(at=UNDO)
        elif step == "load the tag":
            after = after._replace(word=Word(state.word.version, i))
        elif step in ("undo", "release"):
            times = self.releases if step == "release" else 1
            reader, left = (
                reader.releasing(i, self.unlocks_at, times),
                me.left - (step == "release"),
            )
            after = Thread(left) if left else Thread(0, DONE)
        reader = reader._replace(threads=with_item(reader.threads, t, after))
        yield says, state._replace(readers=with_item(state.readers, r, reader))

    def leased(self, thread: Thread) -> bool:
        """Whether the thread has a lease."""
        return thread.at >= 0 and self.lease[thread.at] == "release"

    def fault(self, state: State) -> str | None:
        """What must not be and is so in ``state``."""
        word = state.word
        if word.version and state.slots[word.slot] != Slot(READY, *(word.version,) * 3):
            return f"published names version {word.version}, which its slot does not hold"
        for r, reader in enumerate(state.readers):
            for thread in filter(self.leased, reader.threads):
                slot, version = state.slots[thread.word.slot], thread.word.version
                if slot.first != slot.second:
                    return f"torn: reader {r} leases halves of {slot.first} and {slot.second}"
                if slot.first != version:
                    return f"mis-tagged: reader {r} leases {slot.first} as {version}"
        if state.orphans:
            return f"the dead lock slots {sorted(state.orphans)}"
        roomy = self.slots >= self.readers * self.threads + 2
        if roomy and state.publisher is not None and state.publisher.at == BLOCKED:
            return "the publisher is blocked, with two slots more than leases in flight"
        return self.stuck_publisher(state) or self.stuck_reader(state)

    def stuck_publisher(self, state: State) -> str | None:
        """Alone, it publishes or finds every slot that it may write leased by the living."""
        before = state.word.version
        for _ in range(2 * self.slots + len(self.publish)):
            moves = [] if state.publisher is None else self.publisher_moves(state, state.publisher)
            state = next((after for _, after in moves), state)
            if state.word.version > before:
                return None
        if state.publisher is None or state.publisher == Publisher(IDLE, self.publishes):
            return None
        free = [i for i in self.candidates(state) if not state.leased(i)]
        return f"the publisher cannot lock slots {free}, which nobody leases" if free else None

    def stuck_reader(self, state: State) -> str | None:
        """With nobody else moving, a thread gets its lease once something is published."""
        waiting = [
            (r, t)
            for r, reader in enumerate(state.readers)
            for t, thread in enumerate(reader.threads)
            if state.word.version and thread.at != DONE
        ]
        for r, t in waiting:
            now = state
            for _ in range(2 * len(self.lease)):
                if self.leased(now.readers[r].threads[t]):
                    break
                [(_, now)] = self.thread_moves(now, r, t)
            else:
                return f"reader {r}, thread {t} gets no lease though nobody else moves"
        return None


def with_item(items: tuple, i: int, item: Any) -> tuple:
    """``items`` with another at ``i``."""
    return (*items[:i], item, *items[i + 1 :])


@dataclass
class Found:
    """How many states there are, and a shortest way to one that must not be."""

    states: int
    fault: str | None = None
    trace: list[Move] = field(default_factory=list)

    def __str__(self) -> str:
        """A line for each step: what moved, what ``published`` and the slots are after it."""
        lines = [f"{self.states} states, {self.fault or 'nothing wrong'}"]
        for n, (step, state) in enumerate(self.trace):
            slots = "  ".join(f"{s.state} {s.version} [{s.first}|{s.second}]" for s in state.slots)
            word = f"{state.word.version} in slot {state.word.slot}" if state.word.version else "-"
            lines.append(f"{n:3}  {step:42}  published {word:12}  {slots}")
        return "\n".join(lines)


def explore(protocol: Protocol) -> Found:
    """Visit every state, the nearest first; stop at the first that must not be."""
    start = protocol.start()
    origins: dict[State, tuple[State | None, Move]] = {start.key(): (None, ("start", start))}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        for move in protocol.moves(state):
            key, after = move[1].key(), move[1]
            if key in origins:
                continue
            origins[key] = (state.key(), move)
            backwards = after.word.version < state.word.version
            if fault := "published goes back" if backwards else protocol.fault(after):
                return Found(len(origins), fault, list(trace(origins, key))[::-1])
            queue.append(after)
    return Found(len(origins))


def trace(origins: dict[State, tuple[State | None, Move]], key: State | None) -> Iterator[Move]:
    """The moves that led to a state, the last first."""
    while key is not None:
        key, move = origins[key]
        yield move


if __name__ == "__main__":
    for size in (
        {"slots": 2, "readers": 2, "threads": 2, "leases": 1},
        {"slots": 3, "readers": 2, "publishes": 3},
        {"slots": 3, "threads": 2},
        {"slots": 4, "readers": 2, "leases": 1, "publishes": 6},
    ):
        print(size, explore(Protocol(**size)), flush=True)
