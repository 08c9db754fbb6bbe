"""Ranks that an error took out of the collectives of a wrapper, where the others still are."""

from __future__ import annotations

import json
import time
from contextlib import suppress

from torch import distributed
from torch.distributed import distributed_c10d

from fusedrl.compat.torch import store_of_ranks

PATIENCE = 20.0  # seconds in which the others have to have left, too, before a rank comes back


class OutOfStep:
    """What some ranks say of it, beside their collectives.

    Args:
        ranks: the global ranks, this one among them.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.base = store_of_ranks()
        self._ranks = ranks
        self._store = distributed_c10d.PrefixStore(f"fusedrl out of step {ranks}", self.base)
        self._number = 0  # how often all of them have left and come back
        self._left: str | None = None  # why this rank has

    def leave(self, error: Exception) -> None:
        """Say that an error ended this rank's part, and hear whose error was the first.

        Raises:
            RuntimeError: this rank's collective failed after another rank had left it.
        """
        own = {"rank": distributed.get_rank(), "error": f"{type(error).__name__}: {error}"}
        self._left = own["error"]
        with suppress(distributed.DistError):  # the store has ended with its rank
            kept = self._store.compare_set(f"{self._number} first", "", json.dumps(own))
            self._store.add(f"{self._number} left", 1)
            first = json.loads(kept)
            # Gloo's errors are of this type; those of a computation mostly are not.
            if first["rank"] != own["rank"] and type(error) in _OF_COLLECTIVES:
                raise RuntimeError(
                    f"model: expected a call that every rank can make, got an error on rank "
                    f"{first['rank']} within the forward pass: {first['error']}; end all ranks, "
                    "and start them again"
                ) from error

    def come_back(self) -> None:
        """Wait until all ranks have left, so that none is in a collective any more.

        Raises:
            RuntimeError: some have not, and would take the next collective for theirs.
        """
        if self._left is None:
            return
        deadline = time.monotonic() + PATIENCE
        while self._store.add(f"{self._number} left", 0) < len(self._ranks):
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"model: expected an error of all ranks {list(self._ranks)} within the forward "
                    f"pass, got one of this rank alone, {self._left}; end all ranks, and start "
                    "them again"
                )
            time.sleep(0.01)
        self._number, self._left = self._number + 1, None


_OF_COLLECTIVES = (RuntimeError, distributed.DistBackendError, distributed.DistNetworkError)
_KNOWN: dict[tuple[int, ...], OutOfStep] = {}


def out_of_step(ranks: tuple[int, ...]) -> OutOfStep:
    """What these ranks say, as long as their process group lasts."""
    known = _KNOWN.get(ranks)
    if known is None or known.base is not store_of_ranks():
        known = _KNOWN[ranks] = OutOfStep(ranks)
    return known
