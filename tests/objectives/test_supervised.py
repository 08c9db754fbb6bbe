"""SFTLoss and DistillationLoss: torchrl's values and gradients, from kept tokens alone."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from tensordict import TensorDict, set_list_to_stack
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory
from torchrl.objectives.llm import distillation as torchrl_distillation
from torchrl.objectives.llm import sft as torchrl_sft

import fusedrl
from fusedrl.models import log_probs

from .policies import CHATS, actor_of, model_of, tokenizer

HISTORY = ("history", "stack", False)
THEIRS = {
    "SFTLoss": torchrl_sft.SFTLoss,
    "DistillationLoss": torchrl_distillation.DistillationLoss,
}
OTHER = {"SFTLoss": ("next", "ref_log_probs"), "DistillationLoss": ("next", "teacher_log_probs")}
REDUCTIONS = [
    {"reduction": reduction, "normalize_by_seq_length": normalized}
    for reduction, normalized in (("mean", True), ("sum", False), ("none", True), ("none", False))
]
SFT = [{}, {"kl_to_ref_coeff": 0.3}, {"loss_function": "minor_sft", "beta": 0.7}]
DISTILLATION = [
    {"kl_direction": direction, "assistant_only": assistant_only}
    for direction, assistant_only in (("reverse", True), ("forward", True), ("reverse", False))
]
CASES = [
    (name, {**reduction, **more})
    for name, options in (("SFTLoss", SFT), ("DistillationLoss", DISTILLATION))
    for reduction, more in itertools.product(REDUCTIONS, options)
]


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


def assistant_masks(data):
    answer = data.get("history").full.apply_chat_template(
        tokenizer=tokenizer(), return_assistant_tokens_mask=True, add_generation_prompt=False
    )
    return [mask.bool() for mask in answer.get("assistant_masks", as_list=True)]


@pytest.mark.parametrize("name", THEIRS)
def test_only_counted_rows_are_multiplied_with_the_head(name, monkeypatch):
    rows, theirs, data = [], log_probs.linear_token_log_probs, data_of(name)

    def counting(hidden, *args, **kwargs):
        rows.append(len(hidden))
        return theirs(hidden, *args, **kwargs)

    monkeypatch.setattr(log_probs, "linear_token_log_probs", counting)
    getattr(fusedrl, name)(actor_of(model_of(), HISTORY), tokenizer=tokenizer())(data)
    assert rows == [sum(int(mask.sum()) for mask in assistant_masks(data))]


@pytest.mark.parametrize("name", THEIRS)
def test_masks_of_the_data_come_first(name):
    data = data_of(name)
    masks = assistant_masks(data)
    masks[0][masks[0].nonzero()[-1]] = False
    attended = list(map(torch.ones_like, masks))
    attended[1][masks[1].nonzero()[-1]] = False
    ragged = {"all_assistant_mask": masks, "all_attention_mask": attended}
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
def test_our_arguments_and_a_copy(name):
    kind = getattr(fusedrl, name)
    loss = kind(actor_of(model_of(), HISTORY), max_tokens_per_forward=50, share_prefixes=False)
    assert isinstance(loss, THEIRS[name])
    assert (loss.max_tokens_per_forward, loss.share_prefixes) == (50, False)
    with pytest.raises(TypeError, match="share_prefix"):
        kind(loss.actor_network, share_prefix=False)
    copied = copy.deepcopy(loss)
    copied.load_state_dict(loss.state_dict())
    data = data_of(name)
    assert torch.equal(*(next(iter(x(data).values())) for x in (loss, copied)))


DIVERGENCES = [
    {"loss_function": function, "kl_direction": direction, **more}
    for function, direction in itertools.product(("exact_kl", "top_k_kl"), ("reverse", "forward"))
    for more in (
        {"reduction": "mean", "normalize_by_seq_length": True},
        {"reduction": "none", "normalize_by_seq_length": False, "assistant_only": False},
        {"reduction": "sum", "assistant_only": False},
    )
]
DIVERGENCES += [
    options | {"classes": len(tokenizer())}
    for options in DIVERGENCES
    if options["loss_function"] == "exact_kl" and options["reduction"] == "mean"
]


def all_log_probs(model, data, classes=None):
    """Assistant masks, and log-probs over the classes at each position that predicts a token."""
    answer = data.get("history").full.apply_chat_template(
        tokenizer=tokenizer(), return_assistant_tokens_mask=True, add_generation_prompt=False
    )
    rows = answer.get("input_ids", as_list=True)
    masks = [mask.bool() for mask in answer.get("assistant_masks", as_list=True)]
    return masks, [model(row[None]).logits[0, :-1, :classes].log_softmax(-1) for row in rows]


def with_classes(data, log_probs, k):
    """The data with the likeliest classes of each token, and none for the first."""
    ids, found = [], []
    for row in log_probs:
        values, classes = row.detach().topk(k)
        ids.append(torch.cat((torch.full((1, k), -1), classes)))
        found.append(torch.cat((torch.zeros(1, k), values)))
    for key, rows in (("teacher_ids", ids), ("teacher_log_probs", found)):
        column = torch.nested.as_nested_tensor(rows, layout=torch.strided)
        data = data.set(("next", key, "full"), column)
    return data


def divergence(p, q, direction, k):
    """KL over all classes, or over the teacher's likeliest ones and the rest as one more."""
    if k:
        top = q.topk(k).indices
        p, q = (
            torch.cat((x.gather(-1, top), (1 - x.gather(-1, top).exp().sum(-1, True)).log()), -1)
            for x in (p, q)
        )
    p, q = (p, q) if direction == "reverse" else (q, p)
    return (p.exp() * (p - q)).sum(-1)


@pytest.mark.parametrize("options", DIVERGENCES, ids=str)
def test_divergences_from_a_teacher(options):
    """Against all logits, in float64."""
    options = dict(options)
    k = 5 if options["loss_function"] == "top_k_kl" else 0
    data = data_of("DistillationLoss").select("history")
    classes = options.get("classes")
    padding = 8 if classes else 0
    student = model_of(vocab_size=len(tokenizer()) + padding)
    teacher = model_of("llama", vocab_size=len(tokenizer()) + 2 * padding)
    exact, exact_teacher = (copy.deepcopy(x).double() for x in (student, teacher))
    if k:
        data = with_classes(data, all_log_probs(teacher, data)[1], k)
    else:
        options["teacher_network"] = actor_of(teacher, HISTORY)
    loss = fusedrl.DistillationLoss(actor_of(student, HISTORY), **options)
    ours, gradients = outcome(loss, student, data)
    masks, log_probs = all_log_probs(exact, data, classes)
    with torch.no_grad():
        _, theirs = all_log_probs(exact_teacher, data, classes)
    each = []
    for mask, p, q in zip(masks, log_probs, theirs, strict=True):
        counted = mask if options.get("assistant_only", True) else torch.ones_like(mask)
        total = (divergence(p, q, options["kl_direction"], k) * counted[1:]).sum()
        each.append(total / (counted.sum() if options.get("normalize_by_seq_length", True) else 1))
    each = torch.stack(each)
    reduction = options["reduction"]
    truth = each if reduction == "none" else getattr(each, reduction)()
    truth.sum().backward()
    torch.testing.assert_close(ours["loss_distill"].double(), truth, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours["kl_to_teacher"].double(), each.mean(), rtol=1e-5, atol=1e-6)
    for one, weight in zip(gradients, exact.parameters(), strict=True):
        most = 1e-4 * float(weight.grad.abs().max()) + 1e-9
        torch.testing.assert_close(one.double(), weight.grad, rtol=0, atol=most)
    assert all(weight.grad is None for weight in teacher.parameters())
    assert {id(x) for x in loss.parameters()} == {id(x) for x in student.parameters()}


def test_a_teacher_of_another_tokenizer_or_width_of_data_is_refused():
    data = data_of("DistillationLoss").select("history")
    student = actor_of(model_of(), HISTORY)
    other = actor_of(model_of("llama"), HISTORY, chat_template_name="qwen")
    loss = fusedrl.DistillationLoss(student, loss_function="exact_kl", teacher_network=other)
    with pytest.raises(ValueError, match="teacher_network: expected a teacher that reads"):
        loss(data)
    loss = fusedrl.DistillationLoss(student, loss_function="top_k_kl")
    with pytest.raises(ValueError, match=r"teacher_ids.*got \[\]; name another key"):
        loss(data)
    for options in ({"loss_function": "exact_kl"}, {"teacher_network": other}):
        with pytest.raises(ValueError, match="teacher_network: expected one only for 'exact_kl'"):
            fusedrl.DistillationLoss(student, **options)
    for function in ("k3", "top_k_kl"):
        with pytest.raises(
            ValueError, match="classes: expected None except for 'exact_kl', got 300"
        ):
            fusedrl.DistillationLoss(student, loss_function=function, classes=300)
    other = actor_of(model_of(vocab_size=len(tokenizer()) + 8), HISTORY)
    for classes, why in (
        (None, "ref_weight: .* pass classes="),
        (99, r"classes: expected more than \d+, .* got 99; pass len\(tokenizer\)"),
        (len(tokenizer()) + 8, "classes: expected an integer from 1 to"),
    ):
        options = {"loss_function": "exact_kl", "teacher_network": other, "classes": classes}
        with pytest.raises(ValueError, match=why):
            fusedrl.DistillationLoss(student, **options)(data)
    with pytest.raises(ValueError, match="loss_function: expected 'k3'"):
        fusedrl.DistillationLoss(student, loss_function="k2")
