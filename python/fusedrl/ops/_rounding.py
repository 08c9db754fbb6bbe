"""Whether float32 products on the CPU may round their factors to bfloat16, as torch is told."""

from __future__ import annotations

import torch
from torch import Tensor


def rounds_grads(hidden: Tensor, like: Tensor) -> Tensor | None:
    """What the gradients of a linear head take as ``rounds_grads``; ``None`` where nothing rounds.

    ``torch.set_float32_matmul_precision("medium")`` allows it. Gradients of logits are float32, and
    only a head in bfloat16 on the CPU would multiply them as anything else. The setting is read by
    an op when it runs: Dynamo neither traces what reads it nor guards on it. In a compiled graph
    that is where ``like`` is made: a gradient from upstream makes it the backward pass.
    """
    if hidden.device.type != "cpu" or hidden.dtype != torch.bfloat16:
        return None
    return torch.ops.fusedrl.rounds_grads(like)


@torch.library.custom_op("fusedrl::rounds_grads", mutates_args=())
def _rounds_grads(like: Tensor) -> Tensor:
    # Set by set_float32_matmul_precision, too, whose getter raises where another backend's was set.
    matmul = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    return torch.tensor(matmul.fp32_precision == "bf16", device="cpu")


@_rounds_grads.register_fake
def _fake(like: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.bool, device="cpu")
