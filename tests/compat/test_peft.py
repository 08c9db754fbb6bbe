"""The private names of peft that we need are there."""

from __future__ import annotations

import pytest

from fusedrl.compat.peft import PEFT

pytest.importorskip("peft")


@pytest.mark.parametrize("place", PEFT.needed)
def test_peft_has_the_name(place):
    PEFT.require(place)
