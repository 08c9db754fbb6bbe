"""The products of truncated sampling by the compiled CUDA kernels."""

from __future__ import annotations

import torch
from ptx.values import DTYPES

from fusedrl import linear_token_log_probs


def check_log_probs_and_gradients():
    """More entries than warps, long and empty rows, masked NaN; widths that packs divide or not."""
    for dtype in DTYPES:
        for width in (1, 33, 300, 304):
            hidden = torch.randn(2, 9, width).to(dtype)
            weight = (torch.randn(70, width) / width**0.5).to(dtype)
            tokens, mask = torch.randint(70, (2, 9)), torch.rand(2, 9) < 0.7
            allowed = (torch.rand(18, 70) < 0.4).scatter(1, tokens.view(-1, 1), True)
            allowed[::4] = False
            counts = allowed.sum(1)
            support = allowed.nonzero()[:, 1], torch.cat((counts[:1] * 0, counts.cumsum(0)))
            mask &= (counts > 0).view(2, 9)
            hidden[:, :-1][~mask[:, 1:]] = torch.nan
            found, exact = (
                _differentiated(hidden.to(kind), weight.to(kind), tokens, mask, support, impl)
                for kind, impl in ((dtype, "cpu"), (torch.float64, "reference"))
            )
            eps = max(torch.finfo(dtype).eps, 2e-6)
            for x, want, rtol in zip(found, exact, (3e-6, 3e-6, eps, eps), strict=True):
                torch.testing.assert_close(x.double(), want, rtol=rtol, atol=rtol)


def check_bits_of_a_gradient_do_not_depend_on_where_rows_start():
    """Rows of packs, and the same from the next element on."""
    index, begins, ends = torch.randint(9, (20,)), torch.tensor([0, 5, 5]), torch.tensor([5, 5, 20])
    for dtype in DTYPES:
        rows, grads = torch.randn(9, 304).to(dtype), torch.randn(20)
        found = [
            torch.ops.fusedrl.sampled_products_backward(grads, index, begins, ends, matrix)
            for matrix in (rows, torch.zeros(9, 305, dtype=dtype)[:, 1:].copy_(rows))
        ]
        assert torch.equal(*found) and found[0].any(1).tolist() == [True, False, True]


def _differentiated(hidden, weight, tokens, mask, support, impl):
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    options = {"shift": True, "entropy": True, "support": support, "impl": impl}
    options["batch_invariant"] = impl == "cpu"  # without the tiles that so few classes would take
    results = linear_token_log_probs(*leaves, tokens, mask, **options)
    upstream = [torch.linspace(1, 2, 18).view(2, 9).to(x) for x in results]
    return [*results, *torch.autograd.grad(results, leaves, upstream)]
