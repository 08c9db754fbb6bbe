"""Keeps a model that has parts of two versions from running."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

# CUDA graphs replay `forward` without calling it, so `compute_logits` is replaced too. Models that
# generate no tokens do not have the latter.
_METHODS = ("compute_logits", "forward")


def refuse_to_run(model: nn.Module, version: int) -> None:
    """Make every run of a model fail; vLLM ends an engine whose model fails.

    Args:
        model: vLLM's model.
        version: the version that is being loaded.
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
    """Undo :func:`refuse_to_run`."""
    for method in _METHODS:
        vars(model).pop(method, None)
