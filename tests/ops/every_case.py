"""Every op on inputs that are small enough to differentiate twice."""

from __future__ import annotations

import torch

from fusedrl.ops.cases import all_cases

EVERY = all_cases(classes=5, sequences=2, length=4, width=3)
FIRST = list({name.split(",")[0]: name for name in reversed(EVERY)}.values())  # of each op


def leaves_of(case, dtype=torch.float32, device="cpu", requires_grad=True):
    """Inputs of a case that can be differentiated."""
    return {
        name: x.detach().to(device, dtype).requires_grad_(requires_grad)
        for name, x in case.inputs.items()
    }


def gradients(results, leaves, **options):
    """Gradients with respect to all leaves, with upstream gradients that differ."""
    upstream = [torch.linspace(1, 2, x.numel()).view_as(x).to(x) for x in results]
    return torch.autograd.grad(results, list(leaves.values()), upstream, **options)
