"""linear_token_log_probs: what it multiplies and allocates, and bits that are a row's own."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from programs import python

from fusedrl import linear_token_log_probs
from fusedrl.ops import _stored

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def run(script: str) -> str:
    done = python("-c", script)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


PEAK = """
import resource
from pathlib import Path

import torch
from fusedrl import linear_token_log_probs

torch.set_num_threads(1)
torch.manual_seed(0)
rows, classes, width = {rows}, 32000, 512
mask, tokens = torch.rand(rows) < 0.3, torch.randint(0, classes, (rows,))
hidden = torch.randn(rows, width).to(torch.{dtype}).requires_grad_()
weight = (torch.randn(classes, width) / width**0.5).to(torch.{dtype}).requires_grad_()

def step(rows, impl):
    out = linear_token_log_probs(
        hidden[:rows], weight, tokens[:rows], mask[:rows], entropy=True, impl=impl
    )
    out.log_probs.sum().backward()

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024

def peak(impl):
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts over
    before = status("VmRSS")
    step(rows, impl)
    return status("VmHWM") - before

step(8, "cpu")  # allocates the gradients, to which later ones are added
reference = peak("reference") if {rows} < 2000 else 0
print(peak("cpu"), reference, rows * classes * 4, int(mask.sum()) * classes * 4, weight.nbytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_is_bounded(dtype):
    """Beside the weight's gradient, a tenth of what the logits would take."""
    extra, _, logits, kept, weight = map(int, run(PEAK.format(dtype=dtype, rows=2048)).split())
    assert kept > _stored.MOST_BYTES
    assert extra - weight <= logits // 10


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_few_kept_logits_are_stored(dtype):
    """Those of the kept rows, until the backward pass has read them."""
    script = PEAK.format(dtype=dtype, rows=1024)
    extra, reference, logits, kept, weight = map(int, run(script).split())
    assert reference - weight > logits // 2  # the observation can see logits
    assert kept < _stored.MOST_BYTES
    assert kept * 0.9 < extra - weight <= kept + logits // 10


PRODUCTS = """
import torch
from fusedrl import linear_token_log_probs
from fusedrl.ops import _stored

_stored.MOST_BYTES = {stored_bytes}

torch.manual_seed(0)
mask, tokens = torch.arange(300) % 7 == 3, torch.randint(0, 9000, (300,))
hidden = torch.randn(300, 24, requires_grad=True)
weight = torch.randn(9000, 24, requires_grad=True)
with torch.backends.mkl.verbose(torch.backends.mkl.VERBOSE_ON):
    out = linear_token_log_probs(
        hidden, weight, tokens, mask, offsets=torch.tensor([0, 3, 300]), shift=True
    )
    out.log_probs.sum().backward()
"""


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="MKL tells what it multiplies")
@pytest.mark.parametrize("stored_bytes", [0, 1 << 21])
def test_only_kept_rows_are_multiplied(stored_bytes):
    """The profiler does not see the products: they bypass the dispatcher."""
    kept = sum(n % 7 == 3 and n not in (0, 3) for n in range(300))
    output = run(PRODUCTS.format(stored_bytes=stored_bytes))
    products = re.findall(r"SGEMM\(\w,\w,(\d+),(\d+),(\d+),", output)
    sizes = sorted(sorted(map(int, product)) for product in products)
    # The logits, again where none are stored, and both gradients, of every tile of classes.
    tiles = ([1024] * 8 + [808]) * (3 if stored_bytes else 4)
    assert sizes == sorted(sorted((kept, classes, 24)) for classes in tiles)


def outcome(hidden, weight, bias, tokens, upstream, **options):
    """Log-probs, entropy, and the gradient of the hidden states."""
    hidden = hidden.detach().requires_grad_()
    out = linear_token_log_probs(
        hidden, weight, tokens, bias=bias, entropy=True, batch_invariant=True, **options
    )
    (grad,) = torch.autograd.grad(tuple(out), hidden, list(upstream))
    return [*(x.detach() for x in out), grad]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("classes", "width"), [(5000, 40), (4097, 7), (4103, 64), (5, 24)])
def test_bits_of_a_row_are_its_own(dtype, classes, width):
    """Alone, in any batch, at any position and on one or two threads."""
    count = 150  # two blocks and a part
    hidden, weight = torch.randn(count, width).to(dtype), torch.randn(classes, width).to(dtype)
    bias, tokens = torch.randn(classes).to(dtype), torch.randint(0, classes, (count,))
    upstream, head = torch.randn(2, count), (weight, bias)
    whole = outcome(hidden, *head, tokens, upstream)
    order = torch.randperm(count)
    selections = [order, order[:64], order[:65], torch.arange(3, 90), *order[:5].split(1)]
    for chosen in selections:
        part = outcome(hidden[chosen], *head, tokens[chosen], upstream[:, chosen])
        for got, want in zip(part, whole, strict=True):
            assert torch.equal(got, want[chosen])
    mask = torch.rand(count) < 0.5
    for got, want in zip(outcome(hidden, *head, tokens, upstream, mask=mask), whole, strict=True):
        assert torch.equal(got[mask], want[mask])
        assert not got[~mask].any()
    threads = torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            again = outcome(hidden, *head, tokens, upstream)
            assert all(map(torch.equal, again, whole))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 64, 130])
def test_fixed_blocks_agree_with_the_reference(dtype, rows):
    hidden, weight = torch.randn(rows, 24).to(dtype), (torch.randn(1500, 24) * 0.5).to(dtype)
    tokens, upstream = torch.randint(0, 1500, (rows,)), torch.randn(2, rows)
    mask = torch.rand(rows) < 0.9
    found = []
    for kind, impl in ((dtype, "cpu"), (torch.float64, "reference")):
        leaves = [x.to(kind).detach().requires_grad_() for x in (hidden, weight)]
        out = linear_token_log_probs(
            *(*leaves, tokens, mask), entropy=True, batch_invariant=impl == "cpu", impl=impl
        )
        grads = torch.autograd.grad(tuple(out), leaves, [up.to(out[0]) for up in upstream])
        found.append([*out, *grads])
    for got, exact in zip(*found, strict=True):
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if got.dtype == torch.float32 else {}
        torch.testing.assert_close(got, exact.to(got.dtype), **tolerance)
