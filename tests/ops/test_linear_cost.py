"""The linear ops: what they multiply, and the memory that they take beside their arguments."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from programs import python

pytestmark = pytest.mark.heavy
reads_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def run(script: str, *arguments: str) -> str:
    done = python("-c", script, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# Rows of which 30% are kept, the peak of a step, and the bytes of all logits and of the kept ones.
PEAK = """
import sys
from pathlib import Path

import torch
from fusedrl import exact_kl, linear_exact_kl, linear_token_log_probs

torch.set_num_threads(1)
torch.manual_seed(0)
op, rows = sys.argv[1], int(sys.argv[2])
classes, width = 32000, 256
mask, tokens = torch.rand(rows) < 0.3, torch.randint(0, classes, (rows,))
hidden = torch.randn(rows, width, requires_grad=True)
weight = (torch.randn(classes, width) / width**0.5).requires_grad_()
ref_weight = weight.detach().flip(0)

def step(n):
    head = hidden[:n], weight
    ref_head = hidden[:n].detach(), ref_weight
    if op == "log_probs":
        out = linear_token_log_probs(*head, tokens[:n], mask[:n], entropy=True).log_probs
    elif op == "logits":
        out = exact_kl(head[0] @ head[1].T, ref_head[0] @ ref_head[1].T, mask[:n]).kl
    else:
        out = linear_exact_kl(*head, *ref_head, mask[:n], direction=op).kl
    out.sum().backward()

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024

step(8)  # allocates the gradients, to which later ones are added
Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts over
before = status("VmRSS")
step(rows)
extra = status("VmHWM") - before - weight.nbytes
print(extra, rows * classes * 4, int(mask.sum()) * classes * 4)
"""


@reads_proc
def test_memory_of_log_probs_is_bounded():
    """A sixth of what all logits would take; those of few kept rows are stored."""
    extra, logits, kept = map(int, run(PEAK, "log_probs", "2048").split())
    assert kept > 64 << 20
    assert extra <= logits // 6
    extra, logits, kept = map(int, run(PEAK, "log_probs", "1024").split())
    assert kept < 64 << 20
    assert kept * 0.9 < extra <= kept + logits // 6


@reads_proc
def test_memory_of_two_heads_is_bounded():
    extra, logits, _ = map(int, run(PEAK, "jensen_shannon", "2048").split())
    assert extra < logits / 6
    extra, logits, _ = map(int, run(PEAK, "logits", "1024").split())
    assert extra > 2 * logits  # the observation can see logits


PRODUCTS = """
import sys

import torch
from fusedrl import linear_exact_kl, linear_token_log_probs
from fusedrl.ops import _stored

torch.manual_seed(0)
mask, tokens = torch.arange(300) % 7 == 3, torch.randint(0, 9000, (300,))
hidden = torch.randn(300, 24, requires_grad=True)
weight = torch.randn(9000, 24, requires_grad=True)
rows = {"mask": mask, "offsets": torch.tensor([0, 3, 300]), "shift": True}
heads = hidden, weight, hidden.detach(), weight.detach().flip(0)
losses = {
    "log_probs": lambda: linear_token_log_probs(*heads[:2], tokens, **rows).log_probs,
    "frozen": lambda: linear_token_log_probs(hidden, weight.detach(), tokens, **rows).log_probs,
    "reverse": lambda: linear_exact_kl(*heads, **rows).kl,
    "jensen_shannon": lambda: linear_exact_kl(*heads, **rows, direction="jensen_shannon").kl,
}
for name, loss in losses.items():
    for most_bytes in (0, 1 << 24):
        _stored.MOST_BYTES = most_bytes  # of which nothing else allows more
        print("next", name, most_bytes, flush=True)
        with torch.backends.mkl.verbose(torch.backends.mkl.VERBOSE_ON):
            loss().sum().backward()
"""


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="MKL tells what it multiplies")
def test_only_kept_rows_are_multiplied_and_no_more_often_than_they_must():
    """The profiler does not see the products: they bypass the dispatcher."""
    kept = sum(n % 7 == 3 and n not in (0, 3) for n in range(300))
    expected = {"log_probs": (4, 3), "frozen": (2, 2), "reverse": (6, 4)}
    expected["jensen_shannon"] = (8, 4)
    found = run(PRODUCTS).split("next ")[1:]
    assert len(found) == 8
    for part in found:
        name, most_bytes = part.split()[:2]
        sizes = re.findall(r"SGEMM\(\w,\w,(\d+),(\d+),(\d+),", part)
        products = sum(int(m) * int(n) * int(k) for m, n, k in sizes) / (kept * 24 * 9000)
        assert products == expected[name][most_bytes != "0"], (name, most_bytes)
