"""Calls of every op on inputs that are small enough to differentiate twice."""

from __future__ import annotations

import torch

from fusedrl.ops.cases import OPS, all_cases, cases_of

SEQUENCES, LENGTH = 2, 4
SMALL = {"classes": 5, "sequences": SEQUENCES, "length": LENGTH, "width": 3}
EVERY = all_cases(**SMALL)
# What differs in more than a formula.
_TITLES = (
    *("mask shift entropy", "packed mask shift entropy", "mask shift softcap entropy"),
    *("grpo mask shift", "gspo mask shift", "cispo mask shift", "k3", "k3 mask reward"),
    *("reverse mask shift entropy", "jensen_shannon mask shift entropy"),
    *("forward mask shift softcap entropy", "jensen_shannon mask shift softcap entropy"),
)
FEW = {name: case for name, case in EVERY.items() if name.split("V=5 ")[1] in _TITLES}
FIRST = list({name.split(",")[0]: name for name in reversed(FEW)}.values())  # of each op
assert len(FIRST) == len(OPS)


def padded_cases(op):
    """All cases of an op over a padded batch."""
    return [case for case in cases_of(op, **SMALL) if "offsets" not in case.others]


def is_of_tokens(value):
    """Whether an argument has values for each token of a padded batch."""
    return isinstance(value, torch.Tensor) and value.shape[:2] == (SEQUENCES, LENGTH)


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
