"""What holds of the channel's protocol in every state, and mutants of it of which it does not."""

from __future__ import annotations

import pytest

from .protocol_model import LEASE, PUBLISH, Protocol, explore


@pytest.mark.parametrize(
    ("protocol", "states"),
    [
        pytest.param(
            Protocol(slots=2, threads=2, leases=1, publishes=3), 1_500, id="two leases on one file"
        ),
        pytest.param(Protocol(threads=2, leases=1, copies_fail=False), 3_500, id="and a slot more"),
        pytest.param(Protocol(slots=2, readers=2, publishes=3), 5_500, id="two readers"),
        pytest.param(Protocol(publishes=5), 4_900, id="two slots more than leases in flight"),
        pytest.param(
            Protocol(slots=4, readers=2, leases=1, publishes=4, copies_fail=False),
            3_600,
            id="the same, two readers",
        ),
    ],
)
def test_every_interleaving_and_death_keeps_the_promises(protocol, states):
    found = explore(protocol)
    assert found.fault is None, str(found)
    assert found.states > states  # the search is not cut short


def without(program: tuple[str, ...], *steps: str) -> tuple[str, ...]:
    return tuple(step for step in program if step not in steps)


def later(program: tuple[str, ...], step: str) -> tuple[str, ...]:
    return (*without(program, step), step)


RE_READ = (*LEASE[:-1], "load the tag", LEASE[-1])
MUTANTS = {
    "publishes before the copy ends": ("published", Protocol(later(PUBLISH, "copy second"))),
    "publishes before it unlocks": ("gets no lease", Protocol(later(PUBLISH, "unlock"))),
    "does not mark what it writes": ("torn", Protocol(without(PUBLISH, "writing"))),
    "writes the published slot": ("published", Protocol(spares_published=False, slots=2)),
    "keeps its lock": ("gets no lease", Protocol(without(PUBLISH, "unlock"))),
    "reader without checks": (
        "torn",
        Protocol(lease=without(LEASE, "check state", "check version")),
    ),
    "reader that checks no state": ("torn", Protocol(lease=without(LEASE, "check state"))),
    "reader that checks no version": (
        "mis-tagged",
        Protocol(lease=without(LEASE, "check version")),
    ),
    "reader that does not lock": ("torn", Protocol(lease=without(LEASE, "lock"))),
    "reader that tags with what is published by then": ("mis-tagged", Protocol(lease=RE_READ)),
    "first of two releases unlocks": (
        "torn",
        Protocol(unlocks_at=1, slots=2, threads=2, leases=1),
    ),
    "two threads release one lease": ("torn", Protocol(releases=2)),
    "locks outlive their holder": ("the dead", Protocol(death_unlocks=False)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_breaks_a_promise(name):
    fault, mutant = MUTANTS[name]
    found = explore(mutant)
    assert found.fault is not None and fault in found.fault, str(found)
