"""What the ranks of a policy run to compute losses, for processes to import."""

from __future__ import annotations

import copy
import inspect
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import shared_models
import torch
import torch.distributed as dist
from objectives.policies import OUTPUTS, STACK, actor_of, batch_of, model_of, rows, tokenizer
from objectives.test_supervised import HISTORY, THEIRS, data_of
from shared_models import DDP, check_gradients, gradients
from tensordict import TensorDict, lazy_stack, set_list_to_stack
from torch import Tensor
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import grpo as torchrl_grpo

import fusedrl
from fusedrl.models import causal_log_probs, ranks


def chats_of(rank: int, ranks: int) -> list[Any]:
    """The rows of a rank: of two ranks, one row and two; of three, one each."""
    return rows()[:1] if rank == 0 else rows()[rank : rank + 1 if ranks == 3 else None]


def batch(rank: int, ranks: int, empty: int) -> Any:
    """The data of a rank, of which the one of number ``empty`` counts no token.

    A collector's mask leaves out all rows of a rank but its first.
    """
    data = batch_of(STACK, chats_of(rank, ranks))
    whole = batch_of(STACK)["advantage"]
    first = 0 if rank == 0 else rank
    data["advantage"] = whole[first : first + len(data["advantage"])]
    for i, row in enumerate(data.unbind(0)):
        row["collector", "mask"] = torch.tensor([[i == 0]])
        if rank == empty:
            row["masks", "all_assistant_mask"].zero_()
    return data


def actor(model: Any, kind: Any = TransformersWrapper) -> Any:
    made = actor_of(model, STACK)
    made.__class__ = kind
    return made


def backward(loss: Any, data: Any) -> Any:
    with set_list_to_stack(True):
        output = loss(data)
    total = torch.zeros(())
    for place, name in enumerate(OUTPUTS):
        if name.startswith("loss_") and getattr(output, name, None) is not None:
            total = total + (1 + place % 3) * getattr(output, name)
    total.backward()
    return output


def means(model: Any, ranks: int) -> Any:
    """The gradients of a model of one process, of which each rank has a part."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= ranks
    return gradients(model)


def like_one_process(
    way: str, name: str, options: dict[str, Any], averages: bool, limit: int | None, empty: int = -1
) -> int:
    """Compare gradients with torchrl's loss in one process; the rows that torch multiplied."""
    torch._dynamo.reset()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = model_of()
    model = shared_models.WAYS[way](copy.deepcopy(whole))
    ours = getattr(fusedrl, name)(
        actor(model),
        masking_strategy="rlhf",
        average_tokens_across_devices=averages,
        max_tokens_per_forward=limit,
        **options,
    )
    theirs = getattr(torchrl_grpo, name)(actor(whole), masking_strategy="rlhf", **options)
    rows_of_head = shared_models.RowsOfHead(len(tokenizer()))
    for empty_rank in (empty, -1):
        model.zero_grad(set_to_none=True)
        whole.zero_grad(set_to_none=True)
        known = rows_of_head.rows
        with rows_of_head:
            output = backward(ours, batch(rank, ranks, empty_rank))
        if averages:
            parts = [batch(other, ranks, empty_rank) for other in range(ranks)]
            expected = backward(
                theirs, lazy_stack([row for part in parts for row in part.unbind(0)])
            )
            value = output.loss_objective.detach().clone()
            dist.all_reduce(value)
            torch.testing.assert_close(value / ranks, expected.loss_objective.detach())
        else:
            for other in range(ranks):
                answer = backward(theirs, batch(other, ranks, empty_rank))
                if other == rank:
                    for field in OUTPUTS:
                        mine, exact = getattr(output, field), getattr(answer, field)
                        if exact is not None:
                            torch.testing.assert_close(
                                mine, exact, rtol=1e-4, atol=1e-5, equal_nan=True
                            )
        check_gradients(gradients(model), means(whole, 1 if averages else ranks), 5e-5)
    return rows_of_head.rows - known  # without the trial of the first call


def calls_of(way: str) -> dict[str, tuple[Any, Any]]:
    """What ranks call with models that they share, and the data of this one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = shared_models.WAYS[way](model_of())
    teacher = DDP(model_of("llama"), broadcast_buffers=False)
    ours, theirs = actor_of(model, HISTORY), actor_of(teacher, HISTORY)
    scorers = (
        actor_of(each, STACK, log_probs_key=key)
        for each, key in ((model, "log_probs"), (teacher, "ref_log_probs"))
    )
    options: dict[str, Any] = {"tokenizer": tokenizer()}
    tokens = batch(rank, ranks, -1)
    scored = tokens.select("tokens", "masks")
    chats, taught = (
        data_of(name)[rank : rank + 1 if rank + 1 < ranks else None] for name in THEIRS
    )
    return {
        "log-probs": (lambda data: causal_log_probs(model, data, [len(data)]), torch.arange(9)),
        "GRPO": (
            fusedrl.GRPOLoss(
                actor(model),
                masking_strategy="rlhf",
                kl_to_ref_coeff=0.1,
                average_tokens_across_devices=True,
            ),
            tokens,
        ),
        "SFT": (fusedrl.SFTLoss(ours, kl_to_ref_coeff=0.1, **options), chats),
        "k3": (fusedrl.DistillationLoss(ours, **options), taught),
        "exact KL": (
            fusedrl.DistillationLoss(
                ours, loss_function="exact_kl", teacher_network=theirs, **options
            ),
            taught,
        ),
        "RetrieveLogProb": (fusedrl.RetrieveLogProb(actor(model), assistant_only=False), scored),
        "RetrieveKL": (
            fusedrl.RetrieveKL(*scorers, add_to_reward=False, assistant_only=False),
            scored,
        ),
    }


def answer(call: Any, data: Any) -> list[float]:
    """The figures that a call gives for data, which it may write into."""
    with set_list_to_stack(True):
        found = call(copy.deepcopy(data))
    if isinstance(call, fusedrl.RetrieveLogProb):
        return torch.cat(found.get(("log_probs", "full"), as_list=True)).tolist()
    if isinstance(call, fusedrl.RetrieveKL):
        return torch.cat(found.get("kl_penalty", as_list=True)).flatten().tolist()
    values = found.log_probs if isinstance(data, Tensor) else sum(x for _, x in losses_in(found))
    values.sum().backward()
    return values.detach().flatten().tolist()


def losses_in(output: Any) -> list[tuple[str, Tensor]]:
    return [(n, x) for n, x in output.items() if n.startswith("loss_") and x is not None]


def without(*keys: Any) -> Any:
    def spoil(data: Any) -> Any:
        for key in keys:
            for row in data.unbind(0):
                del row[key]
        return data

    return spoil


def longer(*key: str) -> Any:
    def spoil(data: Any) -> Any:
        for row in data.unbind(0):
            row[key] = torch.cat((row[key], row[key][:3]))
        return data

    return spoil


def refused(data: Any) -> Any:
    for row in data.unbind(0):
        row["history"] = TensorDict(full=torch.zeros(1))
    return data


def misshapen(data: Any) -> Any:
    data["advantage"] = data["advantage"].squeeze(-1)
    return data


def too_large(data: Any) -> Any:
    data.unbind(0)[0]["tokens", "full"][-2] = 10**6
    return data


def interrupts(data: Any) -> Any:
    class Interrupting(type(data)):
        def get(self, *_: Any, **__: Any) -> Any:
            raise KeyboardInterrupt

    data.__class__ = Interrupting
    return data


def some(data: Any) -> Any:
    """Two samples, of which one has something under "next"."""
    first, second = (row.copy() for row in data.unbind(0)[:1] * 2)
    first["next"] = first.select("tokens")
    return lazy_stack([first, second])


_REF, _TAUGHT = ("next", "ref_log_probs", "full"), ("next", "teacher_log_probs", "full")
# What one rank's data lacks or has, and what that rank says.
SPOILS: dict[str, list[tuple[Any, str]]] = {
    "log-probs": [(lambda data: data.float(), "ValueError: tokens: expected [9] integers")],
    "GRPO": [
        (misshapen, "ValueError: advantage and log_weight must have the same number"),
        (without("advantage"), "ValueError: Advantage key advantage not in tensordict"),
        (without(("log_probs", "full")), "KeyError: \"Couldn't find the log-prob"),
        (without(_REF), "KeyError: \"Couldn't find the ref log-prob"),
        (longer(*_REF), "ValueError: "),
        (too_large, "ValueError: tokens: expected ids"),
    ],
    "SFT": [
        (without(_REF), "ValueError: Reference log probs not found"),
        (longer(*_REF), "ValueError: Current log probabilities and reference log"),
        (refused, "AttributeError: 'Tensor' object has no attribute 'apply_chat_template'"),
    ],
    "k3": [
        (without(_TAUGHT), "KeyError: "),
        (longer(*_TAUGHT), "ValueError: Student and teacher log-probs have different shapes"),
    ],
    "exact KL": [(without("history"), 'KeyError: \'key "history" not found')],
    "RetrieveLogProb": [
        (lambda data: data[:0], "RuntimeError: items cannot be empty"),
        (some, "ValueError: tensordict: expected a TensorDictBase under 'next' in every sample"),
        (interrupts, "KeyboardInterrupt: "),
    ],
    "RetrieveKL": [
        (lambda data: data[:0], "RuntimeError: items cannot be empty"),
        (without("tokens"), "ValueError: tensordict: expected the input of the model"),
    ],
}


def said(call: Any, *args: Any) -> str:
    """The text of the error of a call."""
    try:
        call(*args)
    except (Exception, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def errors(way: str) -> list[str]:
    """What each rank raises for each of the spoils of the second one's data; then all go on."""
    found = []
    for name, (call, data) in calls_of(way).items():
        right = answer(call, data)
        for spoil, _ in SPOILS[name]:
            given = copy.deepcopy(data)
            given = spoil(given) if dist.get_rank() == 1 else given
            found.append(said(call, given))
            assert answer(call, data) == right, name
    return found


def errors_anywhere(seed: int, count: int) -> None:
    """Interrupt ranks at random functions of random calls: all raise, and the next is right."""
    shared_models.WAYS["ddp, own buffers"] = lambda m: DDP(m, broadcast_buffers=False)
    calls = calls_of("ddp, own buffers")
    # More than once: DDP and the trials have collectives of their own at first.
    rights = {n: [answer(*call) for _ in range(3)][-1] for n, call in calls.items()}
    together, own = random.Random(seed), random.Random(seed + dist.get_rank())
    for _ in range(count):
        name = together.choice(list(calls))
        failing = [r for r in range(dist.get_world_size()) if together.random() < 0.5] or [0]
        call, data = calls[name]
        with interrupted_at() as places:
            answer(call, data)
        dist.barrier()
        if dist.get_rank() in failing:
            with interrupted_at(own.randrange(len(places))) as places:
                text = said(call, copy.deepcopy(data))
        else:
            text = said(call, copy.deepcopy(data))
        expected = "KeyboardInterrupt", "RuntimeError: model: expected the call to"
        assert text.startswith(expected), (name, text, places[-1:])
        assert answer(call, data) == rights[name], (name, places)


class OwnWrapper(TransformersWrapper):
    """One that scores by itself."""


def wrappers_that_differ() -> str:
    """What a rank says where another one's wrapper scores by itself; then all do so."""
    model, mine = DDP(model_of()), dist.get_rank() == 1
    data = batch(dist.get_rank(), dist.get_world_size(), -1).select("tokens", "masks")
    plain, own = (
        fusedrl.RetrieveLogProb(wrapper, assistant_only=False)
        for wrapper in (actor(model), actor(model, OwnWrapper))
    )
    text = said(own if mine else plain, data)
    own(data)
    return text


@contextmanager
def interrupted_at(number: int = -1) -> Iterator[list[str]]:
    """The functions of ours that are called where ranks make a call together, up to this one."""
    places: list[str] = []

    def trace(frame: Any, event: str, _: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith("fusedrl.") or module in _PROTOCOL or ranks._running.get() is None:
            return
        if frame.f_code.co_flags & inspect.CO_GENERATOR:  # one may end where no error is heard
            return
        places.append(f"{module}.{frame.f_code.co_name}")
        if len(places) == number + 1:
            raise KeyboardInterrupt

    sys.settrace(trace)
    try:
        yield places
    finally:
        sys.settrace(None)


_PROTOCOL = ("fusedrl.models.ranks", "fusedrl.channel.ranks")


def torchrl_computes() -> None:
    """One rank has data of which log-probs cannot come from hidden states: none has."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = model_of()
    model = shared_models.sharded(copy.deepcopy(whole))
    ours = fusedrl.GRPOLoss(actor(model), masking_strategy="rlhf")
    theirs = torchrl_grpo.GRPOLoss(actor(whole), masking_strategy="rlhf")
    for loss in (ours, theirs):
        loss.set_keys(action="others")
    parts = [batch(other, ranks, -1) for other in range(ranks)]
    for other, part in enumerate(parts):
        for row in part.unbind(0):
            row["others"] = row["tokens", "full"] + (other == 1)
    backward(ours, parts[rank])
    for part in parts:
        backward(theirs, part)
    check_gradients(gradients(model), means(whole, ranks), 5e-5)


def supervised(way: str, name: str) -> int:
    """Compare gradients with torchrl's loss in one process; the rows that torch multiplied."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = model_of()
    model = shared_models.WAYS[way](copy.deepcopy(whole))
    ours = getattr(fusedrl, name)(actor_of(model, HISTORY), tokenizer=tokenizer())
    theirs = THEIRS[name](actor_of(whole, HISTORY), tokenizer=tokenizer())
    data = data_of(name)
    parts = [data[other : other + 1 if other + 1 < ranks else None] for other in range(ranks)]
    next(iter(ours(parts[rank]).values()))  # the model is tried
    rows_of_head = shared_models.RowsOfHead(len(tokenizer()))
    with rows_of_head:
        next(iter(ours(parts[rank]).values())).backward()
    for part in parts:
        next(iter(theirs(part).values())).backward()
    check_gradients(gradients(model), means(whole, ranks), 2e-4)
    return rows_of_head.rows


def penalties(way: str) -> None:
    """Compare RetrieveKL with one process."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    policy, reference = model_of(), model_of("llama")
    shared = shared_models.WAYS[way](copy.deepcopy(policy))
    keys = {"log_probs_key": "log_probs"}, {"log_probs_key": "ref_log_probs"}

    def transform(*models: Any) -> Any:
        wrappers = (actor_of(m, STACK, **key) for m, key in zip(models, keys, strict=True))
        return fusedrl.RetrieveKL(*wrappers, add_to_reward=False, assistant_only=False)

    def data() -> Any:
        return batch_of(STACK, chats_of(rank, ranks)).select("tokens", "masks")

    ours = transform(shared, reference)(data()).get("kl_penalty", as_list=True)
    theirs = transform(policy, reference)(data()).get("kl_penalty", as_list=True)
    for mine, exact in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-4, atol=1e-5)
