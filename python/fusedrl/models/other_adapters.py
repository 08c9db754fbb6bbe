"""A policy with other adapters, or without any, as a model that shares the policy's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn


class OtherAdapters(nn.Module):
    """A peft model with a different choice of active adapters than the policy."""

    adapted: Any
    _choice: Callable[[], AbstractContextManager[Any]]  # a block in which they are active

    def __init__(self, adapted: nn.Module) -> None:
        super().__init__()
        if not (hasattr(adapted, "peft_config") and hasattr(adapted, "disable_adapter")):
            raise TypeError(
                f"adapted: expected a peft model with adapters to switch, got "
                f"{type(adapted).__name__}; pass the reference model itself instead"
            )
        # Not a submodule, as the parameters belong to the policy.
        self.__dict__["adapted"] = adapted
        self.config: Any = adapted.config

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """Activate these adapters in a ``with`` block, and restore the policy's after it."""
        if any(getattr(module, "merged", False) is True for module in self.adapted.modules()):
            raise RuntimeError(
                "adapted: expected unmerged adapters, got merged ones; call unmerge_adapter() first"
            )
        # peft makes adapters trainable when it activates them, even frozen ones.
        kept = [(p, "requires_grad", p.requires_grad) for p in self.adapted.parameters()]
        kept += [(module, "training", module.training) for module in self.adapted.modules()]
        try:
            with self._choice(), torch.no_grad():
                self.adapted.eval()
                yield
        finally:
            for owner, name, value in kept:
                setattr(owner, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the policy's forward pass with these adapters."""
        with self.chosen():
            return self.adapted(*args, **kwargs)


class WithoutAdapters(OtherAdapters):
    """A peft model without its adapters: the reference of a LoRA policy.

    It shares all weights with the policy. It runs in eval mode and without gradients, as a backward
    pass would run with the policy's adapters. Its forward pass switches the policy itself, so that
    no other thread may use the policy meanwhile. Merged adapters are a ``RuntimeError``, because
    peft would unmerge them permanently.

    Example:
        >>> import torch
        >>> from peft import LoraConfig, get_peft_model
        >>> from fusedrl.demo.models import make_model  # tiny, not trained
        >>> from fusedrl.models import WithoutAdapters
        >>> policy = get_peft_model(make_model(100), LoraConfig(target_modules=["q_proj"]))
        >>> WithoutAdapters(policy)(torch.arange(4)[None]).logits.shape
        torch.Size([1, 4, 100])
    """

    def _choice(self) -> AbstractContextManager[Any]:
        return self.adapted.disable_adapter()


class WithAdapter(OtherAdapters):
    """A peft model with only one of its adapters: the reference of a policy that started from it.

    See :class:`WithoutAdapters`; disabled adapters are a ``RuntimeError``, too.

    Example:
        >>> import torch
        >>> from peft import LoraConfig, get_peft_model
        >>> from fusedrl.demo.models import make_model  # tiny, not trained
        >>> from fusedrl.models import WithAdapter
        >>> policy = get_peft_model(make_model(100), LoraConfig(target_modules=["q_proj"]))
        >>> policy.add_adapter("ref", policy.peft_config["default"])  # or load_adapter(path, "ref")
        >>> WithAdapter(policy, "ref")(torch.arange(4)[None]).logits.shape
        torch.Size([1, 4, 100])
    """

    def __init__(self, adapted: Any, name: str) -> None:
        super().__init__(adapted)
        if name not in adapted.peft_config:
            raise ValueError(
                f"name: expected one of {sorted(adapted.peft_config)}, got {name!r}; load it first"
            )
        self.name = name

    @contextmanager
    def _choice(self) -> Iterator[None]:
        modules = list(self.adapted.modules())
        enabled = getattr(self.adapted, "has_active_enabled_adapter", True)
        if not enabled or any(getattr(x, "disable_adapters", False) is True for x in modules):
            raise RuntimeError("adapted: expected enabled adapters, got disabled ones; enable them")
        found = ((module, getattr(module, "active_adapter", None)) for module in modules)
        active = [(module, names) for module, names in found if isinstance(names, (str, list))]
        try:
            self.adapted.set_adapter(self.name)
            yield
        finally:
            # Outer modules first, because set_adapter also changes the modules inside.
            for module, names in active:
                module.set_adapter(names)
