"""linear_exact_kl: the exact KL of two heads, beside making the logits of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from . import bench_exact_kl, peers
from .harness import Case

SHAPES = [(256, 512, 32000), (256, 1024, 151936)]  # rows, hidden size, classes
QUICK = [(256, 256, 8000)]
GPU_SHAPES = [(4096, 2048, 151936), (4096, 4096, 32000)]  # in bfloat16
DIRECTIONS = ("reverse", "jensen_shannon")
GEMMS = "two bare GEMMs"
MEMORY = 1 / 10  # goal: at most this much of the logits of both

Heads = tuple[Tensor, Tensor, Tensor, Tensor]  # hidden, weight, ref_hidden, ref_weight


def both_logits(heads: Heads, direction: str) -> Tensor:
    """Two products, two log_softmaxes in float32 and a sum."""
    hidden, weight, ref_hidden, ref_weight = heads
    logits, ref_logits = F.linear(hidden, weight), F.linear(ref_hidden, ref_weight)
    return bench_exact_kl.plain_torch((logits, ref_logits), direction)


def truth(heads: Heads, direction: str) -> Tensor:
    """The same in float64, some rows at a time."""
    hidden, weight, ref_hidden, ref_weight = heads
    weight, ref_weight = weight.double(), ref_weight.double()
    rows = bench_exact_kl.ROWS
    return torch.cat(
        [
            bench_exact_kl.truth((h.double() @ weight.T, r.double() @ ref_weight.T), direction)
            for h, r in zip(hidden.split(rows), ref_hidden.split(rows), strict=True)
        ]
    )


def make_heads(device: str, shape: tuple[int, int, int], dtype: torch.dtype) -> Heads:
    """Logits of variance 1, and a reference near the policy."""
    rows, hidden, classes = shape
    states = torch.randn(rows, hidden, device=device, dtype=dtype)
    weight = torch.randn(classes, hidden, device=device, dtype=dtype) / hidden**0.5
    return states, weight, states + 0.1 * torch.randn_like(states), weight + 0.1 * weight.roll(1, 0)


def cases(device: str, quick: bool, usable: set[str]) -> Iterator[Case]:
    """Every shape and dtype, in one direction and symmetrically."""
    if device == "cuda":
        settings = [(shape, torch.bfloat16) for shape in (QUICK if quick else GPU_SHAPES)]
    else:
        dtypes = bench_exact_kl.DTYPES
        settings = [(shape, dtype) for shape in (QUICK if quick else SHAPES) for dtype in dtypes]
    for shape, dtype in settings:
        heads = make_heads(device, shape, dtype)
        for direction in DIRECTIONS:
            yield one_case(heads, direction, usable)


def one_case(heads: Heads, direction: str, usable: set[str]) -> Case:
    """One direction; the work is the product of each head."""
    from fusedrl import linear_exact_kl  # pyright: ignore[reportAttributeAccessIssue]

    hidden, weight, _, _ = heads
    on_cpu = weight.device.type == "cpu"
    # As in bench_linear_token_log_probs: on a CPU the products alone are those of float32.
    bare = tuple(x.float() for x in heads) if on_cpu else heads
    logits = bare[0].new_empty(len(hidden), len(weight))

    def bare_products(_: Heads) -> None:
        torch.mm(bare[0], bare[1].T, out=logits)
        torch.mm(bare[2], bare[3].T, out=logits)

    timed_only = {GEMMS: bare_products}
    if peers.LIGER in usable:  # it gives the mean over rows only
        timed_only[peers.LIGER] = lambda heads: peers.liger_linear_mean_kl(*heads, direction)
    contenders: dict[str, Callable] = {
        "logits of both": lambda heads: both_logits(heads, direction),
        "fusedrl": lambda heads: linear_exact_kl(*heads, direction=direction).kl,
    }
    if peers.TRL in usable and peers.has_divergence(peers.TRL):
        contenders[peers.TRL] = lambda heads: peers.trl_linear_kl(*heads, direction)
    dtype = str(weight.dtype).removeprefix("torch.")
    both = 2 * len(hidden) * len(weight)
    return Case(
        op="linear_exact_kl",
        setting=f"{len(hidden)} x {hidden.shape[1]} x {len(weight)} {dtype}, {direction}",
        make_input=lambda: heads,
        contenders=contenders,
        timed_only=timed_only,
        truth=lambda heads: truth(heads, direction),
        work=2.0 * both * hidden.shape[1],
        ceiling=GEMMS,
        most_extra_mib=MEMORY * both * weight.element_size() / 2**20,
    )
