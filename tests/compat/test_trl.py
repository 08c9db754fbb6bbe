"""The private names of TRL that we need are there."""

from __future__ import annotations

import pytest

from fusedrl.compat.trl import TRL

pytest.importorskip("trl")


@pytest.mark.parametrize("place", TRL.needed)
def test_trl_has_the_name(place):
    TRL.require(place)
