"""What a collector loads of a state."""

from __future__ import annotations

import pytest
import torch
from counting_dialogs import Rounded
from tensordict.nn import TensorDictModule


def test_a_part_of_a_state_is_taken_when_asked_for(collect):
    policy = TensorDictModule(Rounded(torch.nn.Linear(1, 1)), ["seen"], ["action"])
    collector = collect(policy=policy)
    state = collector.state_dict()
    del state["policy_state_dict"], state["env_state_dict"]
    with pytest.raises(KeyError, match="env_state_dict"):
        collector.load_state_dict(state)
    collector.load_state_dict(state | {"frames": 4}, strict=False)
    assert collector.stats()["frames"] == 4
