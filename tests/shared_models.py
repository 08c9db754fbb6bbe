"""What the ranks of a shared model run, for processes to import."""

from __future__ import annotations

import copy
import os
import re
import signal
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from models.tiny import VOCAB, definition, model_of
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from fusedrl.models import causal_log_probs
from fusedrl.models.capabilities import capabilities_of
from fusedrl.models.shared_rows import sharing_prefixes

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
ROUNDED = MixedPrecisionPolicy(output_dtype=torch.bfloat16)


def sharded(model: Any, *groups: Any, **options: Any) -> Any:
    """Each layer, each of ``groups`` and the rest gathered by itself."""
    mesh = options.pop("mesh", None) or dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*inner(model).model.layers, *groups, model):
        fully_shard(part, mesh=mesh, **options)
    return model


def inner(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "peft_config") else model


def with_adapters(model: Any) -> Any:
    import peft

    torch.manual_seed(1)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


def checkpointed(model: Any) -> Any:
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    return model


def prepared(model: Any) -> Any:
    import accelerate

    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # the group exists
    return accelerate.Accelerator(cpu=True).prepare(model)


def hybrid(model: Any) -> Any:
    """Two ranks that have the same shards, or all ranks a shard each where their number is odd."""
    names, ranks = ("replicate", "shard"), dist.get_world_size()
    shape = (1, ranks) if ranks % 2 else (2, ranks // 2)
    return sharded(model, mesh=dist.init_device_mesh("cpu", shape, mesh_dim_names=names))


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="eager", dynamic=True)


DDP = DistributedDataParallel
# The ways in which ranks share a model, and what they make of the model before.
WAYS: dict[str, Any] = {
    "ddp": DDP,
    "ddp, unused": lambda model: DDP(model, find_unused_parameters=True),
    "ddp, adapters": lambda model: DDP(with_adapters(model)),
    "ddp of compiled": lambda model: DDP(compiled(model)),
    "compiled of ddp": lambda model: compiled(DDP(model)),
    "accelerate": prepared,
    "fsdp": sharded,
    "fsdp, head": lambda model: sharded(model, model.lm_head),
    "fsdp, adapters": lambda model: sharded(with_adapters(model)),
    "fsdp, checkpoints": lambda model: sharded(checkpointed(model)),
    "fsdp, offloaded": lambda model: sharded(
        model, offload_policy=CPUOffloadPolicy(pin_memory=False)
    ),
    "fsdp, rounded outputs": lambda model: fully_shard(model, mp_policy=ROUNDED),
    "fsdp, bfloat16": lambda model: sharded(model, model.lm_head, mp_policy=BF16),
    "hsdp": hybrid,
    "fsdp of compiled layers": lambda model: sharded(layers_compiled(model)),
    "compiled of fsdp": lambda model: compiled(sharded(model)),
    # It computes all logits.
    "fsdp1": lambda model: FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), use_orig_params=True
    ),
}


def layers_compiled(model: Any) -> Any:
    for layer in model.model.layers:
        layer.compile(backend="eager", dynamic=True)
    return model


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
            tokens = torch.cat(
                [tokens[:0], *(torch.cat((start, x)) for x in tokens.split(lengths))]
            )
            lengths = [36 + length for length in lengths]
        kept = torch.rand(len(tokens), generator=generator)
        share = float(torch.rand((), generator=generator))
        if seed % 3 == 1 and len(made) == seed % ranks:
            share = 0.0
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
        assert error <= allowed * (size + largest / 10), (
            f"{name}: {error:.3g} of {size:.3g}, {largest:.3g}"
        )
        same = ours[name].clone()
        dist.broadcast(same, 0)
        assert torch.equal(same, ours[name]), f"{name} differs between ranks"


def parallel(model: Any, layout: Any = None) -> Any:
    """Head and embeddings of which each rank has a part of the vocabulary."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"lm_head": ColwiseParallel(output_layouts=layout or Replicate())}
    return parallelize_module(model, mesh, plan)


def parts_of_a_head(kind: str) -> int:
    """Compare a model whose head is sharded with one process: each rank has the same data."""
    whole = model_of(kind, tie_word_embeddings=False)
    model = parallel(copy.deepcopy(whole))
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
    whole = model_of(kind, **({"tie_word_embeddings": True} if kind == "qwen2" else {}))
    model = WAYS[way](copy.deepcopy(whole))
    whole = with_adapters(whole) if "adapters" in way else whole
    # In one of them only the gradients that enter it are of bfloat16.
    rounded = 0.1 if "bfloat16" in way else 0.02 if "rounded" in way else 2e-5
    near = 0.15 if "bfloat16" in way else 1e-5
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
    whole = model_of("llama")
    model = WAYS[way](copy.deepcopy(whole))
    whole = with_adapters(whole) if "adapters" in way else whole
    ids = torch.randint(1, VOCAB, (ranks, 3, 44), generator=torch.Generator().manual_seed(0))
    ids[0, :, :32] = ids[0, 0, :32]
    embeddings = next(module for module in model.modules() if isinstance(module, nn.Embedding))
    counts: list[int] = []
    embeddings.register_forward_hook(lambda module, args, output: counts.append(args[0].numel()))

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


def accumulates(way: str) -> None:
    """Gradients of a batch without a reduction, and of another one with it, as one process has."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = model_of("llama")
    model = WAYS[way](copy.deepcopy(whole))
    first, second = data_of(0, ranks), data_of(2, ranks)
    if way == "fsdp":
        model.set_requires_gradient_sync(False)
    with model.no_sync() if way == "ddp" else nullcontext():
        causal_log_probs(model, *first[rank]).log_probs.sum().backward()
    if way == "fsdp":
        model.set_requires_gradient_sync(True)
    causal_log_probs(model, *second[rank]).log_probs.sum().backward()
    for one in (*first, *second):
        (definition(whole, *one).sum() / ranks).backward()
    check_gradients(gradients(model), gradients(whole), 2e-5)


def said(model: Any, *data: Any) -> str:
    """The text of the error of a call of ours, or none."""
    try:
        causal_log_probs(model, *data)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def errors(way: str) -> list[str]:
    """What each rank raises if one has tokens that are refused; then all go on."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = WAYS[way](model_of("llama"))
    found = []
    tokens, lengths, mask = data_of(0, ranks)[rank]
    for wrong in range(ranks):
        own = tokens.clone()
        if rank == wrong:
            own[0] = VOCAB
        found.append(said(model, own, lengths, mask))
    causal_log_probs(model, tokens, lengths, mask).log_probs.sum().backward()
    return found


def fails_at_head(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("no room for the logits")


def errors_within(way: str, place: str) -> list[str]:
    """What each rank raises if one fails within its forward pass; then gradients are right."""
    import fusedrl.models.log_probs as module

    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = model_of("llama")
    model = WAYS[way](copy.deepcopy(whole))
    failing = []

    def fails_in_layer(*_: Any) -> Any:
        if failing:
            raise torch.OutOfMemoryError("no room for a layer")

    inner(getattr(model, "module", model)).model.layers[1].register_forward_pre_hook(fails_in_layer)
    data = data_of(0, ranks)
    causal_log_probs(model, *data[rank])
    found, plain = [], module.linear_token_log_probs
    for wrong in range(ranks):
        if rank == wrong and place == "head":
            module.linear_token_log_probs = fails_at_head
        elif rank == wrong:
            failing.append(True)
        try:
            found.append(said(model, *data[rank]))
        finally:
            module.linear_token_log_probs = plain
            failing.clear()
    causal_log_probs(model, *data[rank]).log_probs.sum().backward()
    for one in data:
        (definition(whole, *one).sum() / ranks).backward()
    check_gradients(gradients(model), gradients(whole), 2e-5)
    return found


def meets_a_dead_rank() -> str:
    """The error of a rank whose partner has been killed."""
    model = sharded(model_of("llama"))
    tokens, lengths, mask = data_of(0, 2)[dist.get_rank()]
    causal_log_probs(model, tokens, lengths, mask)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        causal_log_probs(model, tokens, lengths, mask)
    except RuntimeError as error:
        return str(error)
    return ""


def tries_again() -> list[int]:
    """How often each rank tries a model, of which one rank has forgotten what it knew."""
    import fusedrl.models.capabilities as module

    tries, plain = [], module.compare_parts
    module.compare_parts = lambda *args: tries.append(1) or plain(*args)
    try:
        model = sharded(model_of("llama"))
        found = []
        for _ in range(3):
            causal_log_probs(model, *data_of(0, dist.get_world_size())[dist.get_rank()])
            found.append(len(tries))
            if dist.get_rank() == 1 and len(found) == 1:
                module._verdicts.pop(model)
    finally:
        module.compare_parts = plain
    return found


def differs_on_one_rank() -> list[bool]:
    """Whether each rank takes a model apart of which one finds that it may not, then and later."""
    import fusedrl.models.capabilities as module

    plain, found = module.compare_parts, []
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = sharded(model_of("llama"))
    if rank == 1:
        module.compare_parts = lambda *args: plain(*args)._replace(agrees=False)
    try:
        for _ in range(2):
            ours = causal_log_probs(model, *data_of(0, ranks)[rank]).log_probs
            expected = definition(model_of("llama"), *data_of(0, ranks)[rank])
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
            known = module.known_capabilities(model)
            assert known is not None
            found.append(known.parts is not None)
    finally:
        module.compare_parts = plain
    return found


def by_itself() -> list[str]:
    """What is logged where a rank calls the module inside of DDP's."""
    import logging

    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("fusedrl").addHandler(handler)
    model = DDP(model_of("llama"))
    tokens, lengths, mask = data_of(0, 2)[dist.get_rank()]
    with torch.no_grad():
        causal_log_probs(model.module, tokens, lengths, mask)
    assert not records
    for _ in range(2):
        causal_log_probs(model.module, tokens, lengths, mask).log_probs.sum().backward()
    logging.getLogger("fusedrl").removeHandler(handler)
    return records
