"""The private names of the installed libraries that we need are there."""

from __future__ import annotations

import pytest
from private_names import NEEDED, missing_of


@pytest.mark.parametrize("name", sorted(NEEDED))
def test_a_library_has_each_name(name):
    pytest.importorskip(name)
    assert missing_of(name) == []


@pytest.mark.parametrize(
    "owner", ["torch.nn:Module", "torch.nn.modules.module", "accelerate.hooks:add_hook_to_module"]
)
def test_a_name_that_a_library_has_lost_is_seen(monkeypatch, owner):
    pytest.importorskip(owner.partition(".")[0])
    monkeypatch.setitem(NEEDED, "lossy", {owner: "_lost_name"})
    assert missing_of("lossy") == [f"{owner}._lost_name"]
