"""SFTLoss and DistillationLoss: torchrl's values and gradients, from kept tokens alone."""

from __future__ import annotations

import copy
import inspect
import itertools
import logging

import pytest
import torch
from tensordict import TensorDict, set_list_to_stack
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory
from torchrl.objectives.llm import distillation as torchrl_distillation
from torchrl.objectives.llm import sft as torchrl_sft

import fusedrl
from fusedrl.models import log_probs
from fusedrl.objectives import tokens

from .policies import CHATS, actor_of, model_of, tokenizer

HISTORY = ("history", "stack", False)
THEIRS = {
    "SFTLoss": torchrl_sft.SFTLoss,
    "DistillationLoss": torchrl_distillation.DistillationLoss,
}
OTHER = {"SFTLoss": ("next", "ref_log_probs"), "DistillationLoss": ("next", "teacher_log_probs")}
SFT = [
    {"reduction": reduction, "normalize_by_seq_length": normalized, **more}
    for reduction, normalized, more in itertools.product(
        ("mean", "sum", "none"),
        (True, False),
        ({}, {"kl_to_ref_coeff": 0.3}, {"loss_function": "minor_sft", "beta": 0.7}),
    )
]
DISTILLATION = [
    {
        "reduction": reduction,
        "normalize_by_seq_length": normalized,
        "kl_direction": direction,
        "assistant_only": assistant_only,
    }
    for reduction, normalized, direction, assistant_only in itertools.product(
        ("mean", "none"), (True, False), ("reverse", "forward"), (True, False)
    )
]
CASES = [("SFTLoss", options) for options in SFT]
CASES += [("DistillationLoss", options) for options in DISTILLATION]


def data_of(name, assistant_only=True):
    """Conversations with the log-probs of another model, as RetrieveLogProb writes them."""
    with set_list_to_stack(True):
        history = ChatHistory(full=History.from_chats(CHATS))
        data = TensorDict(history=history, batch_size=len(CHATS)).to_lazystack(0)
    other = model_of("llama")
    key = (OTHER[name][1], "full")
    transform = fusedrl.RetrieveLogProb(
        actor_of(other, HISTORY), log_probs_full_key=key, assistant_only=assistant_only
    )
    rows = transform(data.copy()).get(key, as_list=True)
    return data.set(("next", *key), torch.nested.as_nested_tensor(rows, layout=torch.strided))


def outcome(loss, model, data):
    """The outputs of a loss, and the gradients of their sum."""
    torch.manual_seed(0)
    output = loss(data)
    fields = {key: value for key, value in output.items() if value is not None}
    losses = [value for key, value in fields.items() if key.startswith("loss_")]
    torch.stack([loss.sum() for loss in losses if loss.requires_grad]).sum().backward()
    gradients = [weight.grad for weight in model.parameters()]
    model.zero_grad()
    return fields, gradients


@pytest.mark.parametrize(("name", "options"), CASES)
def test_values_and_gradients(name, options):
    data = data_of(name, options.get("assistant_only", True))
    model = model_of()
    found = [
        outcome(kind(actor_of(model, HISTORY), tokenizer=tokenizer(), **options), model, data)
        for kind in (getattr(fusedrl, name), THEIRS[name])
    ]
    (ours, mine), (theirs, reference) = found
    assert ours.keys() == theirs.keys()
    for key in ours:
        torch.testing.assert_close(ours[key], theirs[key], rtol=2e-4, atol=1e-5)
    for one, other in zip(mine, reference, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-4 * float(other.abs().max()) + 1e-9)


@pytest.mark.parametrize("name", THEIRS)
def test_only_counted_rows_are_multiplied_with_the_head(name, monkeypatch):
    rows = []
    theirs = log_probs.linear_token_log_probs
    monkeypatch.setattr(
        log_probs,
        "linear_token_log_probs",
        lambda hidden, *args, **kwargs: rows.append(len(hidden)) or theirs(hidden, *args, **kwargs),
    )
    data = data_of(name)
    rows.clear()
    model = model_of()
    getattr(fusedrl, name)(actor_of(model, HISTORY), tokenizer=tokenizer())(data)
    answer = data.get("history").full.apply_chat_template(
        tokenizer=tokenizer(), return_assistant_tokens_mask=True, add_generation_prompt=False
    )
    counted = sum(int(mask.sum()) for mask in answer.get("assistant_masks", as_list=True))
    assert rows == [counted]


@pytest.mark.parametrize("name", THEIRS)
def test_masks_of_the_data_come_first(name):
    data = data_of(name)
    answer = data.get("history").full.apply_chat_template(
        tokenizer=tokenizer(), return_assistant_tokens_mask=True, add_generation_prompt=False
    )
    masks = [mask.bool() for mask in answer.get("assistant_masks", as_list=True)]
    masks[0][masks[0].nonzero()[-1]] = False
    ragged = {"all_assistant_mask": masks, "all_attention_mask": list(map(torch.ones_like, masks))}
    for key, column in ragged.items():
        data[("masks", key)] = torch.nested.as_nested_tensor(column, layout=torch.strided)
    model = model_of()
    (ours, _), (theirs, _) = (
        outcome(kind(actor_of(model, HISTORY), tokenizer=tokenizer()), model, data)
        for kind in (getattr(fusedrl, name), THEIRS[name])
    )
    for key in ours:
        torch.testing.assert_close(ours[key], theirs[key], rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("name", THEIRS)
def test_another_actor_runs_as_in_torchrl(name, caplog):
    class Actor(torch.nn.Module):
        def __init__(self, actor):
            super().__init__()
            self.actor = actor

        def forward(self, td):
            return self.actor(td)

    tokens._logged.clear()
    data, model = data_of(name), model_of()
    (ours, _), (theirs, _) = (
        outcome(kind(Actor(actor_of(model, HISTORY)), tokenizer=tokenizer()), model, data)
        for kind in (getattr(fusedrl, name), THEIRS[name])
    )
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    (line,) = (x.getMessage() for x in caplog.records if x.levelno == logging.WARNING)
    assert line.startswith(f"{name}: its actor is a Actor")


@pytest.mark.parametrize("name", THEIRS)
def test_the_surface_is_torchrls(name):
    ours, theirs = getattr(fusedrl, name), THEIRS[name]
    assert issubclass(ours, theirs)
    assert inspect.signature(ours) == inspect.signature(theirs)
    loss = ours(actor_of(model_of(), HISTORY))
    copied = copy.deepcopy(loss)
    copied.load_state_dict(loss.state_dict())
    data = data_of(name)
    assert torch.equal(*(next(iter(x(data).values())) for x in (loss, copied)))
    assert type(loss.actor_network).__name__ == "TransformersWrapper"  # the scorer was another's


@pytest.mark.parametrize("name", THEIRS)
def test_what_torchrl_refuses_is_refused_by_its_error(name):
    data = data_of(name)
    del data["next"]
    options = {"kl_to_ref_coeff": 0.1} if name == "SFTLoss" else {}
    messages = []
    for kind in (getattr(fusedrl, name), THEIRS[name]):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            kind(actor_of(model_of(), HISTORY), **options)(data)
        messages.append((type(caught.value), str(caught.value)))
    assert messages[0] == messages[1]
