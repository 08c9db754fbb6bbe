"""What is relied on of tensordict beyond its public interface."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict, lazy_stack
from torchrl.data.llm import History
from torchrl.modules.llm.policies import LogProbs

from fusedrl.compat import tensordict as compat


def stacked() -> Any:
    plain = TensorDict({"x": torch.zeros(2)}, batch_size=[2])
    return lazy_stack([plain, plain.clone()])


def made_like(value: Any) -> Any:
    """A copy that is given the attributes without its constructor, as the other side makes it."""
    made = type(value).__new__(type(value))
    for name, attribute in vars(value).items():
        object.__setattr__(made, name, attribute)
    return made


@pytest.mark.parametrize(
    ("found", "attributes", "types"),
    [
        (
            stacked()[0],
            {compat.ENTRIES, "_batch_size", "_device", "_td_dim_names"},
            {compat.ENTRIES: dict},
        ),
        (
            stacked(),
            {compat.LOCKED, compat.ROWS, "stack_dim", "_batch_size", "hook_in", "hook_out"},
            {compat.ROWS: list},
        ),
        (
            NonTensorData("x"),
            {compat.ENTRIES, compat.FIELDS},
            {compat.ENTRIES: TensorDict, compat.FIELDS: dict},
        ),
    ],
    ids=["plain", "stack", "tensorclass"],
)
def test_an_object_has_the_attributes_that_it_is_read_by(found, attributes, types):
    names = vars(found).keys() - compat.CACHES - {"_is_initialized", "_td_dim_name"}
    assert names == attributes
    assert {name: type(getattr(found, name)) for name in types} == types


def test_attributes_say_all_of_an_object():
    tensor = torch.zeros(2)
    plain = TensorDict({"x": tensor}, batch_size=[2])
    getattr(plain, compat.ENTRIES)["y"] = tensor
    made = made_like(plain)
    for found in (plain, made):
        assert found.get("x") is tensor and found.get("y") is tensor and not found.is_locked
    stack = lazy_stack([plain, made])
    copied = made_like(stack)
    assert copied.batch_size == (2, 2) and not copied.is_locked
    assert copied.get("x").shape == (2, 2)
    stack.lock_()
    assert getattr(plain, compat.LOCKED) is True and made.is_locked


@pytest.mark.parametrize("names", [None, ["dialog"]])
@pytest.mark.parametrize("lazy", [False, True], ids=["dense", "lazy"])
def test_a_copy_is_a_clone(names, lazy):
    chats = [[{"role": "user", "content": text}] for text in ("a", "b")]
    given = TensorDict(
        {
            "seen": torch.arange(2),
            "text": NonTensorData("one", batch_size=(2,)),
            "history": History.from_chats(chats),
            "next": {"done": torch.zeros(2, 1, dtype=torch.bool)},
        },
        batch_size=(2,),
        names=names,
    )
    given = given.to_lazystack(0) if lazy else given
    made, cloned = compat.copy_of(given.lock_()), given.clone()
    assert type(made) is type(cloned) and made.names == cloned.names and not made.is_locked
    assert str(made) == str(cloned) and (made == cloned).all()
    for key in ("seen", ("next", "done")):
        made[key].fill_(7)
        assert torch.equal(given[key], cloned[key])


def test_a_tensorclass_holds_its_tensors_in_a_tensordict():
    log_probs = LogProbs(full=torch.zeros(2), batch_size=())
    assert type(compat.tensordict_of(log_probs)) is TensorDict
    assert compat.tensordict_of(log_probs).get("full") is log_probs.full
