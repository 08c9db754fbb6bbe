"""Run the Triton kernels in Triton's interpreter, on the CPU, against float64.

``TRITON_INTERPRET=1 run.py`` exits with the first failing comparison; names of checks run these.
"""

from __future__ import annotations

import functools
import itertools
import sys

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from fusedrl import VocabPart, linear_token_log_probs
from fusedrl.ops.linear_token_log_probs import triton as kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SMALL = kernels.Config(16, 64, 32, 16, 4, 1)  # many tiles, whose statistics are taken in parts
SPLITS, GROUP = 4, 2  # few, so that a split has several tiles and there are several groups


def dot(self, a, b, sums, *options):
    """A matrix product that adds up every row in the same order, as a GPU does.

    numpy's own does not, and the interpreter takes bfloat16 for integers in it.
    """
    del options
    a, b = (x if x.dtype == tl.float32 else self.create_fp_ext(x, tl.float32) for x in (a, b))
    product = np.einsum("ik,kj->ij", a.data, b.data)
    return interpreter.TensorHandle(product + sums.data, tl.float32)


def exact(hidden, weight, bias, targets, inv_temperature, scale, softcap, entropy):
    x = hidden.double() @ weight.double().T
    if bias is not None:
        x = x + bias.double()
    x = x * scale
    if softcap:
        x = softcap * (x / softcap).tanh()
    row_max = x.max(1).values
    d = (x - row_max[:, None]) * inv_temperature.double()
    dot = (d * d.exp()).nan_to_num().sum(1) if entropy else torch.zeros(len(x)).double()
    there = (targets >= 0) & (targets < len(weight))
    picked = x.gather(1, targets.where(there, 0)[:, None])[:, 0].where(there, 0.0)
    return row_max, d.exp().sum(1), dot, picked


def compare(hidden, weight, bias, targets, temperature=1.0, scale=1.0, softcap=0.0, entropy=True):
    inv_temperature = torch.tensor([1 / temperature])
    args = (hidden, weight, bias, targets, inv_temperature, scale, softcap, entropy)
    mine, want = kernels.partials(*args), exact(*args)
    for got, expected in zip(mine, want, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=2e-5)
    return mine


def problem(rows, classes, depth, dtype, spread=1.0):
    hidden = torch.randn(rows, depth).to(dtype)
    weight = (torch.randn(classes, depth) * spread / depth**0.5).to(dtype)
    return hidden, weight, torch.randn(classes).to(dtype), torch.randint(0, classes, (rows,))


def sizes_and_dtypes():
    """Around tiles and steps; with splits of several tiles and a last one of fewer."""
    sizes = list(itertools.product((1, 17), (1, 129), (1, 32, 75)))
    for dtype in DTYPES:  # of which the kernels make float32 as they load
        for rows, classes, depth in sizes if dtype == torch.float32 else sizes[-1:]:
            compare(*problem(rows, classes, depth, dtype))
    compare(*problem(77, 64 * 2 * SPLITS + 129, 33, torch.bfloat16))


def configs():
    """Every tile of the table as it is, rows and classes one beyond it."""
    half = {*kernels.HALF.values(), kernels.HALF_ELSEWHERE}
    tables = [(torch.bfloat16, config) for config in half] + [(torch.float32, kernels.FLOAT)]
    for dtype, config in tables:
        kernels._config = lambda hidden, config=config: config
        compare(*problem(config.rows + 1, config.classes + 1, config.depth + 1, dtype))
    kernels._config = lambda hidden: SMALL


def options():
    """Bias, softcap, scale, temperature and entropy, each with and without."""
    hidden, weight, bias, targets = problem(5, 150, 40, torch.float32, spread=8.0)
    for has_bias, softcap, scale, temperature, entropy in itertools.product(
        (True, False), (0.0, 4.0), (1.0, -0.3), (1.0, 0.6), (True, False)
    ):
        chosen = bias if has_bias else None
        compare(hidden, weight, chosen, targets, temperature, scale, softcap, entropy)
    compare(hidden.half(), weight.half(), bias, targets)  # a bias of another dtype


def softcap_of_small_logits():
    """tanh keeps the digits of a small logit: each has its own row, with one class."""
    hidden = torch.logspace(-12, 3, 400)[:, None] * torch.tensor([1.0, -1.0]).repeat(200)[:, None]
    targets, one = torch.zeros(400, dtype=torch.int64), torch.ones(1)
    mine = kernels.partials(hidden, torch.ones(1, 1), None, targets, one, 1.0, 2.0, False)[3]
    want = 2.0 * (hidden[:, 0].double() / 2.0).tanh()
    torch.testing.assert_close(mine.double(), want, rtol=2e-7, atol=0.0)


def targets_elsewhere():
    """A target outside the classes counts as logit 0, in the padding of the last tile too."""
    hidden, weight, bias, _ = problem(8, 70, 40, torch.float32)
    outside = [-1, 70, 127, 128, 2**31, 2**32 + 3, -(2**32) + 3, -100]
    mine = compare(hidden, weight, bias, torch.tensor(outside))
    assert mine[3].tolist() == [0.0] * 8


def extreme_logits():
    """Tiles of -inf or of masks near -3e38, rows of them, and rows far below 0."""
    hidden, weight, bias, targets = problem(4, 300, 40, torch.float32)
    for fill, part in itertools.product((-torch.inf, -3e38), (slice(64, 128), slice(0, 128))):
        some = bias.clone()
        some[part] = fill
        compare(hidden, weight, some, torch.tensor([200, 210, 299, 250]))
        with_target = compare(hidden, weight, some, torch.tensor([70, 71, 100, 127]))
        assert (with_target[3] < -1e38).all()
    compare(hidden, weight, bias - 100, targets)
    spread = torch.where(torch.arange(300) < 128, -3e38, 3e38)
    compare(hidden, weight, spread, targets)
    row_max, row_sum, dot, target = kernels.partials(
        *(hidden, weight, torch.full((300,), -torch.inf), targets, torch.ones(1), 1.0, 0.0, True)
    )
    assert (row_max == -torch.inf).all() and (target == -torch.inf).all()
    assert (row_sum == 0).all() and (dot == 0).all()


def nan_rows():
    """NaN in a row, or in one class, and +inf make a row NaN, and no other row."""
    hidden, weight, _, targets = problem(4, 200, 40, torch.float32)
    options = (torch.ones(1), 1.0, 0.0, True)
    clean = kernels.partials(hidden, weight, None, targets, *options)
    broken = hidden.clone()
    broken[1, 3], broken[2] = torch.nan, torch.inf
    mine = kernels.partials(broken, weight, None, targets, *options)
    for got, want in zip(mine, clean, strict=True):
        assert torch.equal(got[[0, 3]], want[[0, 3]])
        assert got[1].isnan()
    assert mine[0][2].isnan() and mine[1][2].isnan()
    for value in (torch.nan, torch.inf):
        bias = torch.zeros(200)
        bias[130] = value
        assert kernels.partials(hidden, weight, bias, targets, *options)[1].isnan().all()


def rows_alone():
    """A row's bits are those it has alone, wherever it stands and however rows are apart."""
    for dtype in DTYPES:
        hidden, weight, bias, targets = problem(21, 300, 75, dtype)
        options = (torch.tensor([0.7]), 1.5, 9.0, True)
        batch = kernels.partials(hidden, weight, bias, targets, *options)
        wide = torch.randn(21, 200).to(dtype)
        wide[:, 60:135] = hidden
        apart = torch.randn(300, 131).to(dtype)
        apart[:, :75] = weight
        strided = kernels.partials(wide[:, 60:135], apart[:, :75], bias, targets, *options)
        for got, want in zip(strided, batch, strict=True):
            assert torch.equal(got, want)
        for row in (1, 15, 20):
            one = slice(row, row + 1)
            alone = kernels.partials(hidden[one], weight, bias, targets[one], *options)
            for got, want in zip(alone, batch, strict=True):
                assert torch.equal(got, want[one])


def no_rows():
    hidden, weight, bias, targets = problem(0, 5, 3, torch.float32)
    mine = kernels.partials(hidden, weight, bias, targets, torch.ones(1), 1.0, 0.0, True)
    assert [x.shape for x in mine] == [(0,)] * 4


def through_the_op(hidden, weight, bias, tokens, **options):
    """Log-probs, entropy and gradients of the public function, beside those of float64."""
    upstream = torch.randn(2, *tokens.shape)
    results = []
    for impl, dtype in (("triton", hidden.dtype), ("reference", torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight, bias)]
        out = linear_token_log_probs(
            *(*leaves[:2], tokens), bias=leaves[2], entropy=True, impl=impl, **options
        )
        grads = torch.autograd.grad(tuple(out), leaves, [up.to(out[0]) for up in upstream])
        results.append((out, grads))
    (mine, grads), (exact, exact_grads) = results
    for got, want in zip(mine, exact, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5)
        assert torch.equal(got == 0, want == 0)
    rounding = {"rtol": 2e-5, "atol": 2e-5} if hidden.dtype == torch.float32 else {}
    for got, want in zip(grads, exact_grads, strict=True):
        torch.testing.assert_close(got, want.to(got.dtype), **rounding)


def public_function():
    """Packed and padded, shifted and masked, with NaN where no kept token reads."""
    cases = itertools.product((False, True), [(14,), (2, 7)])
    for dtype, (shift, shape) in zip(itertools.cycle(DTYPES), cases, strict=False):
        hidden, weight, bias, tokens = problem(14, 150, 24, dtype)
        hidden, tokens = hidden.view(*shape, 24), tokens.view(shape)
        offsets = torch.tensor([0, 3, 3, 14]) if len(shape) == 1 else None
        options = {"offsets": offsets, "shift": shift, "temperature": 0.7}
        through_the_op(hidden, weight, bias, tokens, softcap=4.0, scale=1.5, **options)
        mask = torch.arange(14).view(shape) % 3 != 0
        rows = mask.flatten().roll(-1).view(shape) if shift else mask
        hidden[~rows] = torch.nan
        tokens = tokens.masked_fill(~mask, -100)
        through_the_op(hidden, weight, bias, tokens, mask=mask, **options)
    through_the_op(*problem(4, 70, 24, torch.float32), mask=torch.zeros(4, dtype=torch.bool))
    through_the_op(*problem(0, 70, 24, torch.float32))


def shards():
    """Parts combine to the whole; a token in no part has no probability."""
    hidden, weight, bias, tokens = problem(9, 200, 24, torch.float32)
    mask, options = torch.arange(9) != 4, {"entropy": True, "temperature": 0.6, "impl": "triton"}
    whole = linear_token_log_probs(hidden, weight, tokens, mask, bias=bias, **options)
    tokens[0] = 200
    parts = [
        VocabPart.of(
            *(hidden, weight[first:end], tokens, mask),
            bias=bias[first:end],
            vocab_offset=first,
            **options,
        )
        for first, end in ((130, 200), (0, 129), (129, 130))
    ]
    assert all((part.target == -torch.inf).sum() >= 1 for part in parts)
    mine = VocabPart.combine(parts)
    assert mine.log_probs[0] == -torch.inf
    for got, want in zip(mine, whole, strict=True):
        torch.testing.assert_close(got[1:], want[1:], rtol=2e-6, atol=2e-6)


def wrong_tokens():
    """A token outside the vocabulary is refused unless it is dropped."""
    hidden, weight, bias, tokens = problem(3, 70, 24, torch.float32)
    tokens[1] = 70
    options = {"bias": bias, "impl": "triton"}
    with pytest.raises(RuntimeError, match="tokens: expected values in"):
        linear_token_log_probs(hidden, weight, tokens, **options)
    keep = tokens < 70
    assert linear_token_log_probs(hidden, weight, tokens, keep, **options).log_probs[1] == 0


def main() -> None:
    torch.manual_seed(0)
    np.seterr(all="ignore")  # infinities are among the cases
    interpreter.InterpreterBuilder.create_dot = dot
    # Once a function: to look for what is to be patched takes longer than what it computes.
    interpreter._patch_lang = functools.cache(interpreter._patch_lang)
    interpreter._LangPatchScope.restore = lambda self: None
    kernels._config = lambda hidden: SMALL
    kernels.MAX_SPLITS, kernels.GROUP = SPLITS, GROUP
    checks = (
        sizes_and_dtypes,
        configs,
        options,
        softcap_of_small_logits,
        targets_elsewhere,
        extreme_logits,
        nan_rows,
        rows_alone,
        no_rows,
        public_function,
        shards,
        wrong_tokens,
    )
    for check in [x for x in checks if x.__name__ in sys.argv] or checks:
        check()
        print(f"{check.__name__}: passed", flush=True)


if __name__ == "__main__":
    main()
