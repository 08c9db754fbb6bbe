"""linear_exact_kl: what it takes beside its arguments."""

from __future__ import annotations

import sys

import pytest
from programs import python

# 1024 tokens of which 30% are kept; a tensor of logits would have 125 MiB.
MEMORY = """
import sys
from pathlib import Path

import torch
from fusedrl import exact_kl, linear_exact_kl

torch.manual_seed(0)
torch.set_num_threads(1)
direction, materialise = sys.argv[1], sys.argv[2] == "materialise"


def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(x.split()[1]) for x in lines if x.startswith(field))


def run(hidden, weight, ref_hidden, ref_weight, mask):
    if materialise:
        logits, ref_logits = hidden @ weight.T, ref_hidden @ ref_weight.T
        kl = exact_kl(logits, ref_logits, mask, direction=direction).kl
    else:
        kl = linear_exact_kl(hidden, weight, ref_hidden, ref_weight, mask, direction=direction).kl
    kl.sum().backward()
    return kl


def heads(tokens, classes):
    hidden, ref_hidden = torch.randn(2, tokens, 256).unbind()
    weight, ref_weight = torch.randn(2, classes, 256).unbind()
    mask = torch.arange(tokens) % 10 < 3
    return hidden.requires_grad_(), weight.requires_grad_(), ref_hidden, ref_weight, mask


run(*heads(64, 512))
arguments = heads(1024, 32000)
arguments[1].grad = torch.ones_like(arguments[1])
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
run(*arguments)
# The new gradient is added to the one that is there: it is no part of what the op needs.
print(status("VmHWM") - before - arguments[1].nbytes)
"""


def extra_memory(*arguments):
    done = python("-c", MEMORY, *arguments)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("direction", ["reverse", "jensen_shannon"])
def test_memory_is_bounded(direction):
    logits = 1024 * 32000 * 4
    assert extra_memory(direction, "fused") < logits / 10
    assert extra_memory(direction, "materialise") > 2 * logits
