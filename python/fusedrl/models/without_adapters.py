"""The base model of a policy with adapters, without a second copy of its weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class WithoutAdapters(nn.Module):
    """A peft model as it was before its adapters: the reference of a LoRA policy.

    It shares every weight with the policy. It computes without a gradient graph, because a backward
    pass would find the adapters enabled again. While it computes, the adapters are disabled for
    every user of the policy, so that no other thread may compute with the policy then.

    Args:
        adapted: a ``peft.PeftModel``.

    Raises:
        TypeError: the model has no adapters that can be disabled.
        RuntimeError: raised by the forward pass while adapters are merged, because peft would
            unmerge them for good.

    Example:
        >>> import torch
        >>> from peft import LoraConfig, get_peft_model
        >>> from fusedrl.demo.models import make_model  # tiny, not trained
        >>> from fusedrl.models import WithoutAdapters
        >>> policy = get_peft_model(make_model(100), LoraConfig(target_modules=["q_proj"]))
        >>> reference = WithoutAdapters(policy)
        >>> reference(torch.arange(4)[None]).logits.shape
        torch.Size([1, 4, 100])
    """

    def __init__(self, adapted: nn.Module) -> None:
        super().__init__()
        if not is_peft_model(adapted):
            raise TypeError(
                f"adapted: expected a peft model with adapters to disable, got "
                f"{type(adapted).__name__}; pass the reference model itself instead"
            )
        # Not a submodule: the parameters are the policy's, to move, to train and to save.
        self.__dict__["adapted"] = adapted
        self.config: Any = adapted.config

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Disable the policy's adapters for a ``with`` block."""
        adapted: Any = self.adapted
        if any(getattr(module, "merged", False) is True for module in adapted.modules()):
            raise RuntimeError(
                "adapted: expected adapters beside the weights, got merged ones; call "
                "unmerge_adapter() first"
            )
        # peft makes adapters trainable when it enables them again, frozen ones too.
        trainable = [(p, p.requires_grad) for p in adapted.parameters()]
        try:
            with adapted.disable_adapter(), torch.no_grad():
                yield
        finally:
            for parameter, flag in trainable:
                parameter.requires_grad_(flag)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the policy's forward pass with its adapters disabled."""
        adapted: Any = self.adapted
        with self.disabled():
            return adapted(*args, **kwargs)


def is_peft_model(model: Any) -> bool:
    """Whether ``model`` is a peft model, whose adapters can be disabled."""
    return hasattr(model, "peft_config") and hasattr(model, "disable_adapter")
