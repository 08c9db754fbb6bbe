"""What torchrl refuses, ours refuses with an error of the same kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from ..dialogs import conversations
from .comparison import GEN, REF, both

ERRORS: dict[str, tuple[str, Callable[..., Any]]] = {
    "samples of other lengths": (
        "KLComputation",
        lambda cls, **_: cls()(lazy_stack([TensorDict({GEN: torch.ones(2), REF: torch.ones(3)})])),
    ),
    "dense columns of other lengths": (
        "KLComputation",
        lambda cls, **_: cls()(TensorDict({GEN: torch.ones(2, 2), REF: torch.ones(2, 3)}, [2])),
    ),
    "an unknown argument": ("KLComputation", lambda cls, **_: cls(nonsense=1.0)),
    "a model that generates": (
        "RetrieveLogProb",
        lambda cls, policy, **_: cls(policy(generate=True)),
    ),
    "a model of text": ("RetrieveLogProb", lambda cls, policy, **_: cls(policy(input_mode="text"))),
    "no conversation": (
        "RetrieveLogProb",
        lambda cls, policy, **_: cls(policy())(TensorDict(batch_size=(2,))),
    ),
    "no policy": ("RetrieveKL", lambda cls, reference, **_: cls(None, reference())),
    "no reference": ("RetrieveKL", lambda cls, policy, **_: cls(policy(), None)),
    "models that pad differently": (
        "RetrieveKL",
        lambda cls, policy, reference: cls(policy(), reference(pad_output=True)),
    ),
    "models of one key": ("RetrieveKL", lambda cls, policy, **_: cls(policy(), policy())),
    "a policy twice": (
        "RetrieveKL",
        lambda cls, policy, reference: cls(policy(), reference(), gen_model_factory=policy),
    ),
    "a collector that is not there": (
        "RetrieveKL",
        lambda cls, reference, **_: cls("from_collector", reference())(conversations()),
    ),
}


@pytest.mark.parametrize(("name", "provoke"), ERRORS.values(), ids=ERRORS)
def test_errors_are_of_the_same_kind(name, provoke, policy, reference):
    kinds = []
    for cls in both(name):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            provoke(cls, policy=policy, reference=reference)
        kinds.append(caught.type)
    assert kinds[0] is kinds[1]
