"""What the modules of two models compute, and the first operation in which an engine differs.

vLLM's module of a name computes what the module of that name does in transformers. It may be
several of them in one, and returns what is added to the residual beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# An engine adds up in another order than the trainer, so that its error is another sample of what
# rounding does to the trainer's; the largest errors of two samples are not as far apart as this.
FACTOR = 8.0

# The name of a module, and "input" or "output"; the output of "" is the logits.
Key = tuple[str, str]
Values = dict[Key, Tensor]
LOGITS: Key = ("", "output")


class Operation(NamedTuple):
    """How far an operation of the engine is from the trainer's.

    Errors are of a token's vector relative to its norm, the largest of all tokens.

    Args:
        name: the module that computes it, or a part of it.
        kind: such as ``"attention"`` or ``"norm"``.
        error: of the engine, compared with the trainer's weights in a wider dtype.
        allowed: what rounding explains.
        difference: of the engine from the trainer's weights in the engine's dtype.
        token: the first one beyond what is allowed, or that with the largest error.
    """

    name: str
    kind: str
    error: float
    allowed: float
    difference: float
    token: int

    @property
    def is_beyond(self) -> bool:
        """Whether rounding does not explain the error; NaN is never explained."""
        return not self.error <= self.allowed


@torch.no_grad()
def recorded(model: nn.Module, run: Callable[[], Any], *, batched: bool = False) -> Values:
    """What comes into and out of each module while something runs, ``[tokens, features]``.

    Several calls of a module are taken for consecutive tokens; with ``batched`` a value may have a
    dimension of one sequence before that of its tokens.
    """
    calls: dict[Key, list[Tensor]] = {}

    def keep(name: str, side: str, value: Any) -> None:
        value = _first_tensor(value)
        if value is not None and value.dim() > 1 and value.is_floating_point():
            rows = value[0] if batched and value.dim() > 2 and len(value) == 1 else value
            rows = rows.flatten(1).to("cpu", copy=True)  # vLLM overwrites many inputs
            calls.setdefault((name, side), []).append(rows)

    def hooks(name: str, module: nn.Module) -> Iterator[Any]:
        yield module.register_forward_pre_hook(lambda _, args: keep(name, "input", args))
        yield module.register_forward_hook(lambda _, args, value: keep(name, "output", value))

    with ExitStack() as stack:
        for name, module in model.named_modules():
            for hook in hooks(name, module):
                stack.callback(hook.remove)
        run()
    return {key: torch.cat(values) for key, values in calls.items()}


def _first_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Mapping):  # the output of a model of transformers
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        return next((t for t in map(_first_tensor, value) if t is not None), None)
    return value if isinstance(value, Tensor) else None


def compared(
    engine: Values,
    fused: Mapping[str, Sequence[str]],
    model: nn.Module,
    truth: Values,
    rounded: Sequence[Values],
    eps: float,
) -> list[Operation]:
    """The operations that both models have, in the engine's order.

    Args:
        engine: what the engine computed.
        fused: the last names of the trainer's modules that one of the engine's stands for.
        model: the trainer's.
        truth: what it computes in a wider dtype.
        rounded: what it computes in the dtypes of engine and trainer, the engine's first.
        eps: of the coarser one of these dtypes.
    """
    modules, operations, before = dict(model.named_modules()), [], torch.empty(0)
    for key, value in engine.items():
        keys = _counterparts(key, fused)
        is_known = all(k in truth and _is_comparable(k, modules) for k in keys)
        is_repeated = value.dtype == before.dtype and torch.equal(value, before)
        if not is_known or is_repeated:  # the output of a norm is the input of a product
            continue
        before = value
        expected, *runs = (torch.cat([v[k] for k in keys], -1) for v in (truth, *rounded))
        if expected.shape == value.shape:
            kind = _kind(key, modules[keys[0][0]])
            operations.append(_operation(key, kind, value, expected, runs, eps))
    return operations


def _operation(
    key: Key, kind: str, value: Tensor, expected: Tensor, runs: Sequence[Tensor], eps: float
) -> Operation:
    name, side = key
    name = name.rpartition(".")[0] if side == "input" else name or "the head"
    rounding = max(eps, *(_errors(run, expected).max().item() for run in runs))
    if kind == "RoPE":  # angles are products with positions, in float32
        rounding += torch.finfo(torch.float32).eps * len(value)
    errors, allowed = _errors(value, expected), FACTOR * rounding
    beyond = ~(errors <= allowed)
    token = int(beyond.nonzero()[0, 0] if beyond.any() else errors.argmax())
    difference = _errors(value, runs[0]).max().item()
    return Operation(name, kind, errors.max().item(), allowed, difference, token)


def _counterparts(key: Key, fused: Mapping[str, Sequence[str]]) -> list[Key]:
    """What the trainer has of a value of the engine."""
    name, side = key
    path, dot, last = name.rpartition(".")
    keys = [(f"{path}{dot}{part}", side) for part in fused.get(last, [last])]
    return keys[:1] if side == "input" else keys


def _is_comparable(key: Key, modules: Mapping[str, nn.Module]) -> bool:
    """Whether the engine's module of the same name has this value.

    A layer's residual is added in the next layer's norm there, and an activation may include the
    product with its gate.
    """
    name, side = key
    module, is_layer = modules.get(name), name.rpartition(".")[2].isdigit()
    if module is None or is_layer:
        return False
    if side == "input":
        return isinstance(module, nn.Linear)
    return next(module.parameters(), None) is not None or _is_rotary(name)


def _is_rotary(name: str) -> bool:
    return name.endswith("rotary_emb")


def with_cosines(engine: Values, cosines: Sequence[Tensor], trainer: Values) -> Values:
    """Put the cosines by which an engine rotates before what it computed.

    Args:
        engine: what it computed.
        cosines: the engine's, one for each of its tables.
        trainer: what the trainer computed, which has its cosines under the name of their module.
    """
    names = [key for key in trainer if key[1] == "output" and _is_rotary(key[0])]
    return {names[0]: cosines[0], **engine} if len(names) == len(cosines) == 1 else engine


def _errors(value: Tensor, expected: Tensor) -> Tensor:
    value, expected = value.double(), expected.double()
    return (value - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)


def _kind(key: Key, module: nn.Module) -> str:
    name, side = key
    if key == LOGITS:
        return "logits"
    if _is_rotary(name):
        return "RoPE"
    if side == "input":
        return "attention" if "attn" in name or "attention" in name else "activation"
    if isinstance(module, nn.Linear | nn.Embedding):
        return "linear" if isinstance(module, nn.Linear) else "embedding"
    last = name.rpartition(".")[2]
    return "norm" if "norm" in last else last


def first_of(
    operations: Sequence[Operation], differs: Callable[[Operation], bool]
) -> Operation | None:
    """The first operation in which the engine differs, and goes on to do so.

    What differs in one operation alone, and no longer in the next, is a value that the two models
    define differently, such as an embedding before and after it is scaled. A table of RoPE is
    first in the list, long before it counts.
    """
    following = [*operations[1:], *operations[-1:]]
    for operation, after in zip(operations, following, strict=True):
        if differs(operation) and (differs(after) or operation.kind == "RoPE"):
            return operation
    return None
