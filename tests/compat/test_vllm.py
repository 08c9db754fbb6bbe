"""The private names of vLLM that we need are there."""

from __future__ import annotations

import pytest

from fusedrl.compat.vllm import VLLM

pytest.importorskip("vllm")


@pytest.mark.parametrize("place", VLLM.needed)
def test_vllm_has_the_name(place):
    VLLM.require(place)
