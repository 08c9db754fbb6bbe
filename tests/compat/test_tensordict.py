"""What is relied on of tensordict beyond its public interface, and what runs without it."""

from __future__ import annotations

import pytest
import torch
from tensordict import NonTensorData, TensorDict
from torchrl.data.llm import History
from torchrl.modules.llm.policies import LogProbs

from fusedrl.compat import tensordict as compat


def test_this_release_is_as_known():
    assert list(compat.differences()) == []
    assert compat.is_as_known()


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


@pytest.mark.parametrize(
    ("constant", "changed", "match"),
    [
        ("ENTRIES", "_renamed", "read by their attributes"),
        ("_OF_PLAIN", {"_tensordict"}, "TensorDict: expected the attributes"),
        ("_OF_STACK", set(), "LazyStackedTensorDict: expected the attributes"),
        ("_OF_TENSORCLASS", set(), "NonTensorData: expected the attributes"),
    ],
)
def test_a_change_is_said_in_a_sentence(monkeypatch, constant, changed, match):
    monkeypatch.setattr(compat, constant, changed)
    assert any(match in sentence for sentence in compat.differences())
