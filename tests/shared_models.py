"""What the ranks of a shared model run, for processes to import."""

from __future__ import annotations

import copy
import logging
import os
import re
import signal
import time
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from models.tiny import VOCAB, definition, model_of
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from watching import Watch

from fusedrl.models import causal_log_probs
from fusedrl.models import ranks as protocol
from fusedrl.models.capabilities import capabilities_of
from fusedrl.models.shared_rows import sharing_prefixes

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def sharded(model: Any, *groups: Any, **options: Any) -> Any:
    """Each layer, each of ``groups`` and the rest gathered by itself."""
    mesh = options.pop("mesh", None) or dist.init_device_mesh("cpu", (dist.get_world_size(),))
    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    for part in (*inner.model.layers, *groups, model):
        fully_shard(part, mesh=mesh, **options)
    return model


def checkpointed(model: Any) -> Any:
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    return sharded(model)


def with_adapters(model: Any) -> Any:
    import peft

    torch.manual_seed(1)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


DDP = DistributedDataParallel
# The ways in which ranks share a model, and what they make of the model before.
WAYS: dict[str, Any] = {
    "ddp": DDP,
    "ddp, adapters": lambda model: DDP(with_adapters(model)),
    "ddp of compiled": lambda model: DDP(torch.compile(model, backend="eager", dynamic=True)),
    "fsdp": sharded,
    "fsdp, head": lambda model: sharded(model, model.lm_head),
    "fsdp, adapters": lambda model: sharded(with_adapters(model)),
    "fsdp, checkpoints": checkpointed,
    "fsdp, bfloat16": lambda model: sharded(model, model.lm_head, mp_policy=BF16),
    "hsdp": lambda model: sharded(
        model, mesh=dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    ),
    # It computes all logits.
    "fsdp1": lambda model: FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), use_orig_params=True
    ),
}


def pair_of(way: str, kind: str = "llama", **options: Any) -> tuple[Any, Any]:
    """A model that ranks share, and the same of one process."""
    whole = model_of(kind, **options)
    model = WAYS[way](copy.deepcopy(whole))
    return model, with_adapters(whole) if "adapters" in way else whole


class RowsOfHead(TorchFunctionMode):
    """Counts the rows that are multiplied with a head of so many classes by torch itself."""

    def __init__(self, classes: int = VOCAB) -> None:
        super().__init__()
        self.classes, self.rows = classes, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear and args[1].shape[0] == self.classes:
            self.rows += args[0].numel() // args[0].shape[-1]
        return func(*args, **(kwargs or {}))


def data_of(seed: int, ranks: int) -> list[tuple[Tensor, list[int], Tensor]]:
    """Tokens, lengths and mask of each rank, some of which keep nothing.

    With an even seed the sequences of one rank share their beginning.
    """
    made = []
    generator = torch.Generator().manual_seed(seed)
    for _ in range(ranks):
        count = int(torch.randint(0 if seed else 1, 5, (), generator=generator))
        lengths = torch.randint(1, 24, (count,), generator=generator).tolist()
        tokens = torch.randint(1, VOCAB, (sum(lengths),), generator=generator)
        if seed % 2 == 0 and len(made) == seed // 2 % ranks:
            start = torch.randint(1, VOCAB, (36,), generator=generator)
            parts = [torch.cat((start, own)) for own in tokens.split(lengths)]
            tokens, lengths = torch.cat([tokens[:0], *parts]), [36 + n for n in lengths]
        kept = torch.rand(len(tokens), generator=generator)
        share = float(torch.rand((), generator=generator))
        share = 0.0 if seed % 3 == 1 and len(made) == seed % ranks else share
        made.append((tokens, lengths, kept < (share if seed else 0.7)))
    return made


def gradients(model: Any) -> dict[str, Tensor]:
    """The whole gradient of each parameter, by its name without those of wrappers."""
    found = {}
    context: Any = nullcontext()
    if isinstance(model, FullyShardedDataParallel):
        context = FullyShardedDataParallel.summon_full_params(model, with_grads=True)
    with context:
        for name, parameter in model.named_parameters():
            grad = parameter.grad
            if grad is not None:
                name = re.sub(r"(_fsdp_wrapped_)?module\.|_orig_mod\.", "", name)
                found[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()
    return found


def check_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor], allowed: float) -> None:
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    # One that is all but 0 has the rounding of others.
    largest = max(float(grad.abs().max()) for grad in theirs.values())
    for name, grad in theirs.items():
        size = grad.abs().max()
        error = (ours[name] - grad).abs().max()
        assert error <= allowed * (size + largest / 10), f"{name}: {error:.3g} of {size:.3g}"
        same = ours[name].clone()
        dist.broadcast(same, 0)
        assert torch.equal(same, ours[name]), f"{name} differs between ranks"


def parts_of_a_head(kind: str) -> int:
    """Compare a model whose head is sharded with one process: each rank has the same data."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    whole = model_of(kind, tie_word_embeddings=False)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
    model = parallelize_module(copy.deepcopy(whole), mesh, plan)
    rows = RowsOfHead()
    data = data_of(0, 1)[0]
    capabilities_of(model)
    for entropy in (False, True):
        model.zero_grad(set_to_none=True)
        whole.zero_grad(set_to_none=True)
        with rows:
            ours = causal_log_probs(model, *data, entropy=entropy).log_probs
        expected = definition(whole, *data)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
        for values in (ours, expected):
            (values * torch.linspace(-1, 2, len(values))).sum().backward()
        check_gradients(gradients(model), gradients(whole), 2e-5)
    return rows.rows


def like_one_process(way: str, kind: str, seeds: list[int]) -> int:
    """Compare values and gradients with one process over all data; the rows torch multiplied.

    The ranks differ in how many tokens a forward pass may have.
    """
    torch._dynamo.reset()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, whole = pair_of(way, kind, **({"tie_word_embeddings": True} if kind == "qwen2" else {}))
    rounded, near = (0.1, 0.15) if "bfloat16" in way else (2e-5, 1e-5)
    for _ in range(2):  # the trials, of a model whose weights are spread and gathered
        causal_log_probs(model, *data_of(0, ranks)[rank]).log_probs.sum().backward()
    rows = RowsOfHead()
    for seed in seeds:
        model.zero_grad(set_to_none=True)
        whole.zero_grad(set_to_none=True)
        data = data_of(seed, ranks)
        limit = (None, 20, 1)[(seed + rank) % 3]
        with rows:
            ours = causal_log_probs(
                model, *data[rank], max_tokens_per_forward=limit, entropy=bool(seed % 2)
            ).log_probs
        (ours * torch.linspace(-1, 2, len(ours))).sum().backward()
        total = torch.zeros(())
        for other, one in enumerate(data):
            if len(one[0]):
                expected = definition(whole, *one)
                total = total + (expected * torch.linspace(-1, 2, len(expected))).sum()
                if other == rank:
                    torch.testing.assert_close(ours, expected, rtol=near, atol=near)
        (total / ranks + 0 * definition(whole, torch.ones(2).long(), [2], None).sum()).backward()
        check_gradients(gradients(model), gradients(whole), rounded)
    return rows.rows


def rows_of_one_rank(way: str) -> int:
    """Gradients of padded batches, of which the first rank's rows share something; its tokens."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, whole = pair_of(way)
    ids = torch.randint(1, VOCAB, (ranks, 3, 44), generator=torch.Generator().manual_seed(0))
    ids[0, :, :32] = ids[0, 0, :32]
    embeddings = next(module for module in model.modules() if isinstance(module, nn.Embedding))
    counts: list[int] = []
    watch = Watch(lambda module, args, output: counts.append(args[0].numel()))
    embeddings.register_forward_hook(watch)

    def loss(model: Any, rows: Tensor) -> Tensor:
        mask = torch.ones_like(rows)
        logits = model(input_ids=rows, attention_mask=mask, use_cache=False).logits
        return (logits * torch.linspace(-1, 2, VOCAB)).square().sum()

    for _ in range(2):  # in the first one, the model is tried
        model.zero_grad(set_to_none=True)
        counts.clear()
        with sharing_prefixes(model):
            loss(model, ids[rank]).backward()
    (sum(loss(whole, rows) for rows in ids) / ranks).backward()
    check_gradients(gradients(model), gradients(whole), 2e-5)
    return counts[-1]


def check_sums(model: Any, whole: Any, data: list[Any]) -> None:
    """The gradient of a model is that of one process over the sum of all log-probs."""
    for one in data:
        (definition(whole, *one).sum() / dist.get_world_size()).backward()
    check_gradients(gradients(model), gradients(whole), 2e-5)


def accumulates(way: str) -> None:
    """Gradients of a batch without a reduction, and of another one with it, as one process has."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, whole = pair_of(way)
    first, second = data_of(0, ranks), data_of(2, ranks)
    if way == "fsdp":
        model.set_requires_gradient_sync(False)
    with model.no_sync() if way == "ddp" else nullcontext():
        causal_log_probs(model, *first[rank]).log_probs.sum().backward()
    if way == "fsdp":
        model.set_requires_gradient_sync(True)
    causal_log_probs(model, *second[rank]).log_probs.sum().backward()
    check_sums(model, whole, [*first, *second])


def said(*args: Any, **options: Any) -> str:
    """The text of the error of causal_log_probs."""
    try:
        causal_log_probs(*args, **options)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def reentrant_checkpoints() -> str:
    """Gradients of more tokens than a pass takes by default; torch's error of several passes."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = model_of("llama")
    model = copy.deepcopy(whole).train()
    model.gradient_checkpointing_enable({"preserve_rng_state": True})  # torch's default is such
    model.enable_input_require_grads()
    model = DDP(model)
    tokens = torch.randint(1, VOCAB, (ranks, 600), generator=torch.Generator().manual_seed(0))
    data = [(row, [50] * 12, None) for row in tokens]
    for _ in range(2):  # the first one is tried
        model.zero_grad()
        causal_log_probs(model, *data[rank]).log_probs.sum().backward()
    check_sums(model, whole, data)
    try:
        causal_log_probs(model, *data[rank], max_tokens_per_forward=100).log_probs.sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def call_of_one_rank() -> tuple[list[str], list[str]]:
    """What each rank says where one makes a call more, and what it logs."""
    model, _ = pair_of("ddp")
    data = data_of(0, dist.get_world_size())[dist.get_rank()]
    records, found = [], []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("fusedrl").addHandler(handler)
    protocol.SILENCE, silence = timedelta(milliseconds=1), protocol.SILENCE
    if dist.get_rank() == 0:
        with torch.no_grad():
            found.append(said(model, *data))
    else:
        time.sleep(0.5)
        found.append(said(model, *data))
    protocol.SILENCE = silence
    found.append(said(model, *data))
    logging.getLogger("fusedrl").removeHandler(handler)
    return found, records


def fails_at_head(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("no room for the logits")


def errors_within(way: str, place: str) -> list[str]:
    """What each rank raises if one fails within its forward pass; then gradients are right."""
    import fusedrl.models.log_probs as module

    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, whole = pair_of(way)
    failing = []

    def fails_in_layer(*_: Any) -> Any:
        if failing:
            raise torch.OutOfMemoryError("no room for a layer")

    getattr(model, "module", model).model.layers[1].register_forward_pre_hook(Watch(fails_in_layer))
    data = data_of(0, ranks)
    causal_log_probs(model, *data[rank])
    found, plain = [], module.linear_token_log_probs
    for wrong in range(ranks):
        tokens, *rest = data[rank]
        if rank == wrong and place == "tokens":
            tokens = tokens.index_fill(0, torch.tensor(0), VOCAB)
        elif rank == wrong and place == "head":
            module.linear_token_log_probs = fails_at_head
        elif rank == wrong:
            failing.append(True)
        try:
            causal_log_probs(model, tokens, *rest)
            found.append("")
        except (ValueError, RuntimeError) as error:
            found.append(f"{type(error).__name__}: {error}")
        finally:
            module.linear_token_log_probs = plain
            failing.clear()
    causal_log_probs(model, *data[rank]).log_probs.sum().backward()
    check_sums(model, whole, data)
    return found


def meets_a_dead_rank() -> str:
    """The error of a rank whose partner has been killed."""
    model, data = sharded(model_of("llama")), data_of(0, 2)[dist.get_rank()]
    causal_log_probs(model, *data)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        causal_log_probs(model, *data)
    except RuntimeError as error:
        return str(error)
    return ""


def differs_on_one_rank(way: str) -> list[bool]:
    """Whether each rank takes a model apart of which one finds that it may not, and later may."""
    import fusedrl.models.capabilities as module

    plain, found = module.compare_parts, []
    rank, ranks = dist.get_rank(), dist.get_world_size()
    (model, whole), data = pair_of(way), data_of(0, ranks)[rank]

    def check() -> None:
        ours = causal_log_probs(model, *data).log_probs
        torch.testing.assert_close(ours, definition(whole, *data), rtol=1e-5, atol=1e-5)
        found.append(module.capabilities_of(model).parts is not None)

    if rank == 1:
        module.compare_parts = lambda *args: plain(*args)._replace(
            why="it is told so", splits=False
        )
    try:
        check()
        check()
    finally:
        module.compare_parts = plain
    model.train()  # another state, of which no rank knows anything
    check()
    inner = getattr(model, "module", model)
    for watched in (inner.model.layers[0], inner.lm_head):
        hook = watched.register_forward_hook(lambda *_: None) if rank == 1 else None
        check()
        if hook is not None:
            hook.remove()
        check()
    return found
