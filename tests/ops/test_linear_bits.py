"""The linear ops: a row's bits alone, on any number of threads, and with logits that are stored."""

from __future__ import annotations

import threading
from unittest import mock

import pytest
import torch

from fusedrl import linear_exact_kl, linear_token_log_probs
from fusedrl.ops import _stored
from fusedrl.ops.exact_kl import DIRECTIONS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def log_probs(head, tokens, **options):
    hidden, weight, bias = head[:3]
    out = linear_token_log_probs(hidden, weight, tokens, bias=bias, entropy=True, **options)
    return out.log_probs + out.entropy


def divergence(direction):
    def path(heads, tokens, **options):
        hidden, weight, bias, ref_hidden, ref_weight, ref_bias = heads
        options |= {"bias": bias, "ref_bias": ref_bias, "direction": direction}
        options |= {f"ref_{k}": 2 * options[k] for k in ("scale", "softcap") if k in options}
        return linear_exact_kl(hidden, weight, ref_hidden, ref_weight, **options).kl

    return path


OPS = {"log_probs": log_probs, **{direction: divergence(direction) for direction in DIRECTIONS}}
PATHS = pytest.mark.parametrize("path", [log_probs, OPS["jensen_shannon"]])


def problem(rows, classes, widths, dtype, biased=True):
    """Hidden states, weight and bias of two heads, and tokens."""
    leaves = []
    for width in widths:
        shapes = (rows, width), (classes, width), (classes,)
        hidden, weight, bias = (torch.randn(shape) for shape in shapes)
        leaves += [hidden, weight / width**0.5, bias if biased else None]
    leaves = [None if x is None else x.to(dtype).requires_grad_() for x in leaves]
    return leaves, torch.arange(rows) * 131 % classes


@pytest.mark.parametrize("path", [log_probs, OPS["reverse"]])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [*range(1, 36, 2), 64, 70, 513, 1100])
def test_a_row_alone_and_in_a_batch(path, dtype, width):
    """The depth of a product in one piece and in several, and a scale that rounds."""
    rows = 29  # two full blocks of 14 rows and a row that has one of its own
    leaves, tokens = problem(rows, 300, (width, width), dtype)
    upstream = torch.randn(rows)

    def run(part):
        heads = [x[part] if len(x) == rows else x for x in leaves]
        out = path(heads, tokens[part], scale=0.7, batch_invariant=True)
        return out.detach(), *torch.autograd.grad(out, heads[0], upstream[part])

    whole = run(slice(None))
    for i in range(rows):
        row = slice(i, i + 1)
        assert all(map(torch.equal, run(row), (x[row] for x in whole))), i


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_column_of_weights_with_any_stride(dtype):
    """A width of 1 leaves the stride between columns undefined: it may be that of a row."""
    hidden, weight = torch.randn(3, 16).to(dtype), torch.randn(3000, 16).to(dtype)
    row = torch.randn(1, 3000).to(dtype)

    def run(column):
        ref_hidden = torch.ones(3, 1, dtype=dtype, requires_grad=True)
        out = linear_exact_kl(hidden, weight, ref_hidden, column, batch_invariant=True).kl
        return out.detach(), *torch.autograd.grad(out.sum(), ref_hidden)

    assert row.T.stride() == (1, 3000)
    assert all(map(torch.equal, run(row.T), run(row.view(3000, 1))))


@pytest.fixture(params=DTYPES)
def large(request):
    """Two blocks of rows, several tiles, pairs that end in a half."""
    return problem(530, 9000, (70, 70), request.param)


def on_threads(path, leaves, tokens, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out = path(leaves, tokens)
        grads = torch.autograd.grad(out, leaves, torch.linspace(-1, 1, len(out)), allow_unused=True)
        return [out.detach(), *(grad for grad in grads if grad is not None)]
    finally:
        torch.set_num_threads(before)


@PATHS
def test_bits_do_not_depend_on_the_number_of_threads(path, large):
    one = on_threads(path, *large, 1)
    assert any(grad.any() for grad in one[1:])
    for threads in (2, 3, 5):
        assert all(map(torch.equal, on_threads(path, *large, threads), one)), threads


@pytest.mark.heavy
@PATHS
def test_calls_from_several_threads(path, large):
    want, got = on_threads(path, *large, 2), {}

    def run(caller):
        got[caller] = on_threads(path, *large, 2)

    callers = [threading.Thread(target=run, args=(caller,)) for caller in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(got) == len(callers)
    assert all(all(map(torch.equal, answers, want)) for answers in got.values())


ROWS, CLASSES = 30, 5003
FLOATS = 5008 + 16 * (5008 // 16 % 2 == 0)  # of a row, in an odd number of cache lines


def outcome(op, leaves, tokens, options, most_bytes):
    """Values, gradients, and how many numbers of stored logits the graph holds."""
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with (
        mock.patch.object(_stored, "MOST_BYTES", most_bytes),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        out = op(leaves, tokens, **options)
    stored = sum(x.numel() for x in saved if x.ndim == 1 and x.numel() >= ROWS * CLASSES)
    given = [x for x in leaves if x is not None]
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    grads = [torch.autograd.grad(out, given, torch.linspace(-2, 1, ROWS), **options) for _ in "ab"]
    return out.detach(), *grads, stored


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "scale": 1.7}], ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPS)
def test_stored_logits_are_as_those_multiplied_again(name, dtype, biased, options):
    """And once more from the same graph; all of them are stored or, beyond a bound, none."""
    given = OPS[name], *problem(ROWS, CLASSES, (16, 24), dtype, biased), options
    most = ROWS * FLOATS * (1 if name == "log_probs" else 2)
    values, grads, again, stored = outcome(*given, 4 * most)
    want, want_grads, _, none = outcome(*given, 4 * most - 1)
    assert (stored, none) == (most, 0)
    assert torch.equal(values, want)
    for got, twice, other in zip(grads, again, want_grads, strict=True):
        assert torch.equal(got, twice)
        torch.testing.assert_close(got, other, rtol=1e-5, atol=1e-6)
