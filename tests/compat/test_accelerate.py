"""The private names of accelerate that we need are there."""

from __future__ import annotations

import pytest

from fusedrl.compat.accelerate import ACCELERATE

pytest.importorskip("accelerate")


@pytest.mark.parametrize("place", ACCELERATE.needed)
def test_accelerate_has_the_name(place):
    ACCELERATE.require(place)
