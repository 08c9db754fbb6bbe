"""What a collector loads, and what it refuses before anything changes."""

from __future__ import annotations

import pytest
import torch
from counting_dialogs import Counting, Rounded, seen
from tensordict.nn import TensorDictModule


class TestBadStates:
    """Are refused before anything changes: the dialogs go on."""

    @pytest.fixture
    def module(self) -> TensorDictModule:
        return TensorDictModule(Rounded(torch.nn.Linear(1, 1)), ["seen"], ["action"])

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda state: state.pop("frames"), "expected an integer 'frames', got None"),
            (lambda state: state.update(iter="1"), "expected an integer 'iter', got '1'"),
            (lambda state: state.pop("env_state_dict"), "expected an entry 'env_state_dict'"),
            (lambda state: state.pop("policy_state_dict"), "expected an entry 'policy_state_"),
            (lambda state: state.update(policy_version="a"), "expected a version of type"),
            (
                lambda state: state["policy_state_dict"].update(more=torch.ones(1)),
                r"policy_state_dict'\]: expected the entries that there are, got \['more'\] beside",
            ),
            (
                lambda state: state["policy_state_dict"].update(
                    {"module.linear.bias": torch.ones(7)}
                ),
                r"expected module.linear.bias of shape \(1,\), got \(7,\)",
            ),
        ],
    )
    def test_refused(self, collect, module, change, message):
        options = {"policy": module, "track_policy_version": True, "total_dialog_turns": -1}
        collector, other = (collect(Counting(2, 9), **options) for _ in range(2))
        first = [seen(c.next()) for c in (collector, other)]
        state = other.state_dict()
        state["policy_state_dict"] = {
            key: value + 1 for key, value in state["policy_state_dict"].items()
        }
        change(state)
        before = [parameter.clone() for parameter in module.parameters()]
        with pytest.raises(ValueError, match=message):
            collector.load_state_dict(state)
        assert all(map(torch.equal, before, module.parameters()))
        assert first[0] == first[1] and seen(collector.next()) == seen(other.next())

    def test_what_is_no_state(self, collect):
        with pytest.raises(TypeError, match="state_dict: expected a mapping, got list"):
            collect().load_state_dict([])

    def test_a_part_of_a_state_is_taken_when_asked_for(self, collect, module):
        collector = collect(policy=module)
        state = collector.state_dict()
        del state["policy_state_dict"], state["env_state_dict"]
        collector.load_state_dict(state | {"frames": 4}, strict=False)
        assert collector.stats()["frames"] == 4
