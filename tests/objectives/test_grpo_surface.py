"""GRPO losses as objects: their classes, arguments, states, copies, errors, and under a patch."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from tensordict import TensorDict
from torchrl.objectives.llm import grpo as torchrl_grpo

import fusedrl

from .policies import (
    NAMES,
    PADDED,
    RLHF,
    STACK,
    actor_of,
    answer_of,
    assert_same,
    batch_of,
    losses_of,
    model_of,
)

OWN: dict[str, Any] = {
    "max_tokens_per_forward": None,
    "share_prefixes": True,
    "average_tokens_across_devices": False,
}


@pytest.mark.parametrize("name", NAMES)
def test_classes(name):
    ours, theirs = getattr(fusedrl, name), getattr(torchrl_grpo, name)
    loss = ours(actor_of(model_of(), STACK))
    assert isinstance(loss, theirs) and isinstance(loss, torchrl_grpo.GRPOLoss)
    assert isinstance(loss, fusedrl.GRPOLoss)
    assert ours.output_type is theirs.output_type
    assert ours.__name__ == theirs.__name__ and ours.__module__ == "fusedrl.objectives.grpo"
    public = {member for member in dir(ours) if not member.startswith("_")}
    assert public == {*dir(theirs), *OWN} - {
        member for member in dir(theirs) if member.startswith("_")
    }


@pytest.mark.parametrize("name", NAMES)
def test_what_we_add_is_set_by_arguments_and_what_nobody_knows_is_refused(name):
    kind = getattr(fusedrl, name)
    given = {
        "max_tokens_per_forward": 50,
        "share_prefixes": False,
        "average_tokens_across_devices": True,
    }
    loss = kind(actor_of(model_of(), STACK), entropy_coeff=0.5, **given)
    assert given == {name: getattr(loss, name) for name in OWN} and loss.entropy_coeff == 0.5
    assert {name: getattr(kind(None), name) for name in OWN} == OWN
    with pytest.raises(TypeError, match="share_prefix: expected a known argument"):
        kind(None, share_prefix=False)
    with pytest.raises(TypeError, match="kwargs: expected a known argument"):
        kind(None, kwargs=1)


def test_state_dicts_are_interchangeable():
    ours, theirs, _ = losses_of("DAPO", model_of(), STACK, clip_epsilon=(0.1, 0.3))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    theirs.load_state_dict(ours.state_dict())
    other = fusedrl.DAPO(actor_of(model_of(), STACK))
    other.load_state_dict(theirs.state_dict())
    assert other.clip_epsilon_high.item() == pytest.approx(0.3)


def test_copies():
    losses = losses_of("GRPOLoss", model_of(), STACK, **RLHF)
    losses[0].max_tokens_per_forward = 50
    answer_of(losses[0], batch_of(STACK))
    losses[0] = pickle.loads(pickle.dumps(copy.deepcopy(losses[0])))
    assert losses[0].max_tokens_per_forward == 50
    assert_same(*(answer_of(loss, batch_of(STACK)) for loss in losses))


def broken(key: Any) -> Any:
    data = batch_of(PADDED)
    del data[key]
    return data


def changed(key: Any, change: Any) -> Any:
    data = batch_of(PADDED)
    data[key] = change(data[key])
    return data


def graph(x: Any) -> Any:
    return x.requires_grad_()


def fewer(x: Any) -> Any:
    return x[:, 1:]


def matrix(x: Any) -> Any:
    return x[..., 0]


def columns(x: Any) -> Any:
    return x.expand(-1, 7, 1)


ERRORS = {
    "an advantage of two dimensions": (lambda: changed("advantage", matrix), {}),
    "advantages of other tokens": (lambda: changed("advantage", columns), {}),
    "no tokens": (lambda: broken(("tokens", "full")), {}),
    "no advantage": (lambda: broken("advantage"), {}),
    "no reference": (lambda: broken(("next", "ref_log_probs", "full")), {}),
    "fewer log-probs": (lambda: changed(("log_probs", "full"), fewer), {}),
    "log-probs with a graph": (lambda: changed(("log_probs", "full"), graph), {}),
    "an unknown strategy": (lambda: batch_of(PADDED), {"masking_strategy": "none"}),
    "ragged tokens of an actor that pads": (lambda: batch_of(STACK), {}),
    "bounds": (lambda: batch_of(PADDED), {"clip_epsilon": (0.2, -1.0)}),
}


@pytest.mark.parametrize("title", ERRORS)
def test_errors_are_those_of_torchrl(title):
    make, options = ERRORS[title]
    messages = []
    for kind in (fusedrl.GRPOLoss, torchrl_grpo.GRPOLoss):
        data: TensorDict = copy.deepcopy(make())
        with pytest.raises(Exception) as caught:  # noqa: PT011
            kind(actor_of(model_of(), PADDED), **RLHF | options)(data)
        messages.append((type(caught.value), str(caught.value)))
    assert messages[0] == messages[1]
