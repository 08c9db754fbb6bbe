"""The setting of torch that lets float32 products on the CPU round their factors to bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor


def rounds_grads(hidden: Tensor, like: Tensor) -> Tensor | None:
    """The ``rounds_grads`` argument of a linear head's ops; ``None`` if nothing is ever rounded.

    ``torch.set_float32_matmul_precision("medium")`` allows rounding. Gradients of logits are
    float32, and only a bfloat16 head on the CPU may round them. An op reads the setting at run
    time, because Dynamo neither traces the read nor guards on it. Its argument ``like`` decides
    when: an upstream gradient defers the read to the backward pass of a compiled graph.
    """
    if hidden.device.type != "cpu" or hidden.dtype != torch.bfloat16:
        return None
    return torch.ops.fusedrl.rounds_grads(like)


@torch.library.custom_op("fusedrl::rounds_grads", mutates_args=())
def _rounds_grads(like: Tensor) -> Tensor:
    # set_float32_matmul_precision sets this too, but its getter may raise if backends differ.
    matmul = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    return torch.tensor(matmul.fp32_precision == "bf16", device="cpu")


@_rounds_grads.register_fake
def _fake(like: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.bool, device="cpu")
