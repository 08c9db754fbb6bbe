"""A model that has parts of two versions answers nothing."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

# What makes tokens of hidden states, and what makes those. CUDA graphs replay the second without
# calling it, never the first, which models that generate no tokens do not have.
_METHODS = ("compute_logits", "forward")


def refuse_to_run(model: nn.Module, version: int) -> None:
    """Have every run of a model fail; vLLM ends an engine whose model fails.

    Args:
        model: of vLLM.
        version: that is loaded meanwhile.
    """

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"model: expected the weights of one version, got a part of version {version} and a "
            "part of another, as loading it failed; update the weights again before the engine "
            "generates"
        )

    for method in _METHODS:
        if hasattr(model, method):
            setattr(model, method, refuse)


def let_run(model: nn.Module) -> None:
    """End what :func:`refuse_to_run` began."""
    for method in _METHODS:
        vars(model).pop(method, None)
