"""The private names of transformers that we need are there."""

from __future__ import annotations

import pytest

from fusedrl.compat.transformers import TRANSFORMERS

pytest.importorskip("transformers")


@pytest.mark.parametrize("place", TRANSFORMERS.needed)
def test_transformers_has_the_name(place):
    TRANSFORMERS.require(place)
