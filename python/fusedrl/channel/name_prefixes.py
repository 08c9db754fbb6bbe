"""Names of weights with, or without, the prefix that a module around the model gives them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import takewhile

_PARALLEL = "module"  # what DistributedDataParallel calls the module that it wraps


@dataclass(frozen=True)
class PrefixChange:
    """What changes the names that were given: ``removed`` is taken off, ``added`` is put before."""

    removed: str = ""
    added: str = ""

    def __call__(self, name: str) -> str:
        """The name that is meant."""
        return self.added + name.removeprefix(self.removed)

    def __bool__(self) -> bool:
        """Whether names are not read as they are."""
        return bool(self.removed or self.added)

    def __str__(self) -> str:
        """What it does, for messages."""
        parts = [f"without {self.removed!r}"] if self.removed else []
        parts += [f"with {self.added!r} before them"] if self.added else []
        return " and ".join(parts) or "as they are"


def match_prefixes(given: Collection[str], known: Collection[str]) -> PrefixChange:
    """How ``given`` are read so that as many as possible are ``known``: as they are if that does.

    All of them are read in one way. What is taken off or put before is the path of a module that
    has all of the weights, on one of the two sides: a policy's around its model's, say.

    Raises:
        ValueError: several ways do equally well, and better than none.

    Example:
        >>> from fusedrl.channel.name_prefixes import match_prefixes
        >>> print(match_prefixes(["lm_head.weight"], ["model.lm_head.weight", "model.norm.weight"]))
        with 'model.' before them
    """
    wanted = set(known)
    if wanted.issuperset(given) or wanted.issubset(given):
        return PrefixChange()
    scores = {way: sum(way(name) in wanted for name in given) for way in _ways(given, known)}
    best = max(scores.values())
    if scores[PrefixChange()] == best:
        return PrefixChange()
    ways = [way for way, score in scores.items() if score == best]
    if len(ways) > 1:
        raise ValueError(
            f"weights: expected names that can be read in one way, got some that fit "
            f"{' or '.join(map(str, ways))}; put the whole prefix before them"
        )
    return ways[0]


def _ways(given: Collection[str], known: Collection[str]) -> Iterator[PrefixChange]:
    for removed in _paths(given):
        for added in _paths(known):
            off, on = ([part for part in path if part != _PARALLEL] for path in (removed, added))
            # One path for another would take the weights of another model.
            if not off or not on or off == on:
                yield PrefixChange(
                    "".join(f"{p}." for p in removed), "".join(f"{p}." for p in added)
                )


def _paths(names: Collection[str]) -> list[list[str]]:
    """Of each module that has all of ``names``, from the outermost, which has none, inwards."""
    levels = zip(*(name.split(".")[:-1] for name in names), strict=False)
    shared = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, levels)]
    return [shared[:depth] for depth in range(len(shared) + 1)]
