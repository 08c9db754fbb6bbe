"""The table of a channel's readers as a model: every interleaving of its atomic steps.

Readers come, leave and are killed at any step, and the publisher looks who died. What must hold: a
death is told of once, and of nobody who lives; none is forgotten that still has room in the table.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

OUTSIDE, LOCKED, LOADED, OPEN = "outside", "locked", "loaded", "open"
GONE, DEAD, DEAD_EARLY = "gone", "dead", "dead before it had registered"


class Pids(NamedTuple):
    """An entry's one word: who died before, and who has it; 0 is nobody."""

    died: int = 0
    present: int = 0


class Reader(NamedTuple):
    """A process that opens the channel once; ``word`` is what it loaded of its entry."""

    at: str = OUTSIDE
    entry: int = -1
    word: Pids = Pids()


class Publisher(NamedTuple):
    """The entry that it looks at (-1 between looks), what it loaded there, and who lives there."""

    entry: int = -1
    word: Pids | None = None
    alive: bool | None = None


class State(NamedTuple):
    """All there is at one moment."""

    entries: tuple[Pids, ...]
    readers: tuple[Reader, ...]
    publisher: Publisher = Publisher()
    told: tuple[int, ...] = ()  # deaths
    lost: tuple[int, ...] = ()  # deaths that an entry had no room for


@dataclass(frozen=True)
class Registry:
    """The rules, which mutants change, and how many take part. Reader 0 has pid 1, and so on."""

    entries: int = 2
    readers: int = 3
    keeps_the_dead: bool = True  # who takes an entry moves a dead pid aside
    compares: bool = True  # words are changed only where they are as loaded
    prefers_empty: bool = True  # entries with nothing to lose are taken first

    def start(self) -> State:
        """Nobody is there."""
        return State((Pids(),) * self.entries, (Reader(),) * self.readers)

    def locked(self, state: State, i: int) -> bool:
        """Whether anybody alive has the lock of entry ``i``."""
        return any(r.entry == i and r.at in (LOCKED, LOADED, OPEN) for r in state.readers)

    def moves(self, state: State) -> Iterator[tuple[str, State]]:
        """Every step that somebody can take, and every death."""
        for r, reader in enumerate(state.readers):
            for says, after in self.reader_moves(state, r, reader):
                yield f"reader {r + 1}: {says}", after
            if reader.at in (LOCKED, LOADED, OPEN):
                dead = Reader(DEAD if reader.at == OPEN else DEAD_EARLY)
                yield f"reader {r + 1} is killed", put(state, r, dead)
        yield from self.publisher_moves(state, state.publisher)

    def choices(self, state: State) -> list[int]:
        """The entries that an opening reader may lock: the first that suits, as far as it saw."""
        free = [i for i in range(self.entries) if not self.locked(state, i)]
        if not self.prefers_empty:
            return free[:1]
        for suits in (lambda p: p.present == 0, lambda p: p.died == 0, lambda p: True):
            if chosen := [i for i in free if suits(state.entries[i])]:
                return chosen
        return []

    def reader_moves(self, state: State, r: int, reader: Reader) -> Iterator[tuple[str, State]]:
        """The next steps of one reader."""
        pid, i = r + 1, reader.entry
        if reader.at == OUTSIDE:
            for chosen in self.choices(state):
                yield f"locks entry {chosen}", put(state, r, Reader(LOCKED, chosen))
        elif reader.at == LOCKED:
            word = state.entries[i]
            yield f"loads {word}", put(state, r, Reader(LOADED, i, word))
        elif reader.at == LOADED:
            word = state.entries[i]
            if self.compares and word != reader.word:
                yield "loads again", put(state, r, Reader(LOADED, i, word))
                return
            before = reader.word
            kept = before.present or before.died if self.keeps_the_dead else before.died
            after = put(state, r, Reader(OPEN, i), Pids(kept, pid))
            if before.present and before.died and self.keeps_the_dead:
                after = after._replace(lost=(*state.lost, before.died))
            yield "registers", after
        elif reader.at == OPEN:
            left = state.entries[i]._replace(present=0)
            yield "leaves", put(state, r, Reader(GONE), left, i)

    def publisher_moves(self, state: State, me: Publisher) -> Iterator[tuple[str, State]]:
        """The publisher's next step: load a word, see whether it is locked, forget and tell."""
        i = me.entry
        if i < 0:
            yield "publisher looks", state._replace(publisher=Publisher(0))
            return
        after = Publisher(i + 1 if i + 1 < self.entries else -1)
        word = state.entries[i]
        if me.word is None:
            if word == Pids():
                yield f"publisher: entry {i} is empty", state._replace(publisher=after)
            else:
                seen = state._replace(publisher=Publisher(i, word))
                yield f"publisher loads {word} of entry {i}", seen
        elif me.alive is None:
            alive = me.word.present != 0 and self.locked(state, i)
            says = f"publisher: entry {i} is {'' if alive else 'not '}locked"
            yield says, state._replace(publisher=me._replace(alive=alive))
        elif self.compares and word != me.word:
            yield "publisher looks again", state._replace(publisher=Publisher(i))
        else:
            known = Pids(0, me.word.present) if me.alive else Pids()
            dead = {me.word.died} | ({0} if me.alive else {me.word.present})
            entries = (*state.entries[:i], known, *state.entries[i + 1 :])
            told = tuple(sorted((*state.told, *(dead - {0}))))
            told_state = state._replace(entries=entries, publisher=after, told=told)
            yield f"publisher tells of {dead - {0}}", told_state

    def fault(self, state: State) -> str | None:
        """What must not be and is so in ``state``."""
        for pid in set(state.told):
            if state.told.count(pid) > 1:
                return f"the death of {pid} is told of twice"
            if state.readers[pid - 1].at != DEAD:
                return f"{pid} is told to be dead, and is {state.readers[pid - 1].at}"
        remembered = {pid for entry in state.entries for pid in entry}
        for r, reader in enumerate(state.readers):
            pid = r + 1
            if reader.at == OPEN and state.entries[reader.entry].present != pid:
                return f"{pid} is open and is not in its entry"
            known = pid in remembered or pid in state.told or pid in state.lost
            if reader.at == DEAD and not known:
                return f"the death of {pid} is forgotten"
        # Two dead in one entry, a living reader in each other one, and the one that comes.
        roomy = self.readers < self.entries + 2
        return f"the death of {state.lost[0]} is lost" if state.lost and roomy else None


def put(state: State, r: int, reader: Reader, word: Pids | None = None, at: int = -1) -> State:
    """``state`` with another reader, and another word in its entry (or in entry ``at``)."""
    readers = (*state.readers[:r], reader, *state.readers[r + 1 :])
    state = state._replace(readers=readers)
    if word is None:
        return state
    i = reader.entry if at < 0 else at
    return state._replace(entries=(*state.entries[:i], word, *state.entries[i + 1 :]))


def explore(registry: Registry) -> tuple[int, str | None, list[str]]:
    """Visit every state; how many there are, a fault if any, and the moves that led to it."""
    start = registry.start()
    origins: dict[State, tuple[State, str] | None] = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        for says, after in registry.moves(state):
            if after in origins:
                continue
            origins[after] = state, says
            if fault := registry.fault(after):
                moves, at = [], after
                while (origin := origins[at]) is not None:
                    at, move = origin
                    moves.append(move)
                return len(origins), fault, moves[::-1]
            queue.append(after)
    return len(origins), None, []
