"""Other packages' ways to the same answers: which of them run here, and one function each."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

TORCHRL = "torchrl"
TRANSFORMERS = "transformers"
TRL = "TRL"
VLLM = "vLLM"
LINEAR_CE = "F.linear_cross_entropy"
LIGER = "Liger"
CCE = "cut-cross-entropy"

# Name -> the module that it needs. The last two are asked for with --peers.
MODULES = {
    TORCHRL: "torchrl",
    TRANSFORMERS: "transformers",
    TRL: "trl",
    VLLM: "vllm",
    LINEAR_CE: "torch",
    LIGER: "liger_kernel",
    CCE: "cut_cross_entropy",
}
THIRD_PARTY = (LIGER, CCE)


def absent(device: str, third_party: bool) -> dict[str, str]:
    """The peers that do not run on ``device``, and why."""
    reasons = {name: _why_absent(name, device, third_party) for name in MODULES}
    return {name: why for name, why in reasons.items() if why is not None}


def _why_absent(name: str, device: str, third_party: bool) -> str | None:
    module = MODULES[name]
    if not is_installed(name):
        return f"{module} is not installed"
    if name == LINEAR_CE and not hasattr(F, "linear_cross_entropy"):
        return f"torch {torch.__version__} does not have it"
    if name in THIRD_PARTY and device != "cuda":
        return f"its Triton kernels need a CUDA device, and this run is on {device}"
    if name in THIRD_PARTY and not third_party:
        return "not selected: add --peers"
    return None


def is_installed(name: str) -> bool:
    """Whether a peer's module is there: parts of Liger run on a CPU."""
    return importlib.util.find_spec(MODULES[name]) is not None


def chosen(functions: dict[str, Callable], usable: set[str]) -> dict[str, Callable]:
    """Those of ``functions`` whose name is usable, or begins with a usable name and a comma."""
    return {name: run for name, run in functions.items() if name.split(",")[0] in usable}


def _linear_ce(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    return -F.linear_cross_entropy(hidden, weight, tokens, reduction="none")


def _linear_ce_sum(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()  # in chunks
    return -F.linear_cross_entropy(hidden, weight, tokens, reduction="sum", options=options)


def _liger(hidden: Tensor, weight: Tensor, tokens: Tensor, reduction: str = "none") -> Tensor:
    from liger_kernel.transformers.functional import (  # pyright: ignore[reportMissingImports]
        liger_fused_linear_cross_entropy,
    )

    return -liger_fused_linear_cross_entropy(hidden, weight, tokens, reduction=reduction)


def _liger_sum(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    return _liger(hidden, weight, tokens, "sum")


def _cce(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    return -_cce_loss(hidden, weight, tokens, reduction="none")


def _cce_sum(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    return -_cce_loss(hidden, weight, tokens, reduction="sum")


def _cce_sum_exact(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    return -_cce_loss(hidden, weight, tokens, reduction="sum", filter_eps=None)


def _cce_loss(hidden: Tensor, weight: Tensor, tokens: Tensor, **options: object) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy  # pyright: ignore[reportMissingImports]

    return linear_cross_entropy(hidden, weight, tokens, **options)


# (hidden [N, H], weight [V, H], tokens [N]) -> log-probs [N].
LINEAR_LOG_PROBS: dict[str, Callable] = {LINEAR_CE: _linear_ce, LIGER: _liger, CCE: _cce}

# The same -> the sum of the log-probs, to differentiate: each in the form that is its fastest. By
# default cut-cross-entropy leaves out of its gradient what it deems too small to count.
LINEAR_LOG_PROB_SUM: dict[str, Callable] = {
    LINEAR_CE: _linear_ce_sum,
    LIGER: _liger_sum,
    CCE: _cce_sum,
    f"{CCE}, unfiltered": _cce_sum_exact,
}

# Liger's names for the directions: a beta between KL(ref || policy) at 0 and its reverse at 1.
LIGER_BETA = {"forward": 0.0, "jensen_shannon": 0.5, "reverse": 1.0}


def liger_mean_kl(logits: Tensor, ref_logits: Tensor, direction: str) -> Tensor:
    """Mean over rows of the exact KL [N, V], from two log_softmaxes that it does not fuse."""
    from liger_kernel.transformers.functional import (  # pyright: ignore[reportMissingImports]
        liger_jsd,
    )

    log_probs = torch.log_softmax(logits.float(), -1)
    ref_log_probs = torch.log_softmax(ref_logits.float(), -1)
    return liger_jsd(log_probs, ref_log_probs, beta=LIGER_BETA[direction])


def trl_linear_kl(
    hidden: Tensor, weight: Tensor, ref_hidden: Tensor, ref_weight: Tensor, direction: str
) -> Tensor:
    """The exact KL of two heads [N] by TRL's function, in plain torch on a CPU."""
    from trl.kernels.chunked_divergence import (  # pyright: ignore[reportMissingImports]
        ChunkedDivergenceFunction,
    )

    beta = LIGER_BETA[direction]  # theirs has the same meaning
    sides = hidden, weight, None, ref_hidden, ref_weight, None
    divergence, _ = ChunkedDivergenceFunction.apply(*sides, beta)
    return divergence


def has_divergence(name: str) -> bool:
    """Whether the peer's version has a divergence of two heads, which TRL has from 1.16 on."""
    module = f"{MODULES[name]}.kernels.chunked_divergence"
    return is_installed(name) and importlib.util.find_spec(module) is not None


def liger_linear_mean_kl(
    hidden: Tensor, weight: Tensor, ref_hidden: Tensor, ref_weight: Tensor, direction: str
) -> Tensor:
    """Mean over rows of the exact KL of two heads; it computes the gradient at the same time."""
    from liger_kernel.transformers.functional import (  # pyright: ignore[reportMissingImports]
        liger_fused_linear_jsd,
    )

    return liger_fused_linear_jsd(
        hidden, weight, ref_hidden, ref_weight, jsd_beta=LIGER_BETA[direction]
    )
