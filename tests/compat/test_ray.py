"""The private names of Ray that we need are there."""

from __future__ import annotations

import pytest

from fusedrl.compat.ray import RAY

pytest.importorskip("ray")


@pytest.mark.parametrize("place", RAY.needed)
def test_ray_has_the_name(place):
    RAY.require(place)
