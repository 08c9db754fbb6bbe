"""What the ranks of a policy run to compute losses, for processes to import."""

from __future__ import annotations

import copy
from typing import Any

import shared_models
import torch
import torch.distributed as dist
from objectives.policies import OUTPUTS, STACK, actor_of, batch_of, model_of, rows, tokenizer
from objectives.test_supervised import HISTORY, THEIRS, data_of
from shared_models import check_gradients, gradients
from tensordict import lazy_stack, set_list_to_stack
from torchrl.objectives.llm import grpo as torchrl_grpo

import fusedrl


def chats_of(rank: int, ranks: int) -> list[Any]:
    """The rows of a rank: of two ranks, one row and two; of three, one each."""
    return rows()[:1] if rank == 0 else rows()[rank : rank + 1 if ranks == 3 else None]


def batch(rank: int, ranks: int, empty: int) -> Any:
    """The data of a rank, of which the one of number ``empty`` counts no token."""
    data = batch_of(STACK, chats_of(rank, ranks))
    whole = batch_of(STACK)["advantage"]
    first = 0 if rank == 0 else rank
    data["advantage"] = whole[first : first + len(data["advantage"])]
    if rank == empty:
        for row in data.unbind(0):
            row["masks", "all_assistant_mask"].zero_()
    return data


def actor(model: Any) -> Any:
    return actor_of(model, STACK)


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


def errors() -> list[str]:
    """What each rank raises if one has data that a loss refuses; then all go on."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    loss = fusedrl.GRPOLoss(actor(shared_models.sharded(model_of())), masking_strategy="rlhf")
    loss.kl_to_ref_coeff = 0.1

    def misshapen(data: Any) -> None:
        data["advantage"] = data["advantage"].squeeze(-1)

    def without(*keys: str) -> Any:
        def spoil(data: Any) -> None:
            for row in data.unbind(0) if len(keys) > 1 else [data]:
                del row[keys]

        return spoil

    def too_large(data: Any) -> None:
        data.unbind(0)[0]["tokens", "full"][-2] = 10**6

    found = []
    for spoil in (misshapen, without("advantage"), without("log_probs", "full"),
                  without("next", "ref_log_probs", "full"), too_large):  # fmt: skip
        data = copy.deepcopy(batch(rank, ranks, -1))
        if rank == 1:
            spoil(data)
        try:
            backward(loss, data)
            found.append("")
        except (ValueError, KeyError, RuntimeError) as error:
            found.append(f"{type(error).__name__}: {error}")
    backward(loss, batch(rank, ranks, -1))
    return found


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


def penalties(way: str) -> str:
    """Compare RetrieveKL with one process, and what each rank raises if one has bad data."""
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
    spoiled = data()
    if rank == 1:
        del spoiled["tokens"]
    try:
        transform(shared, reference)(spoiled)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
