"""A policy with other adapters, or with none, without a second copy of its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn


class OtherAdapters(nn.Module):
    """A peft model under another choice of its adapters than the policy's."""

    adapted: Any
    _choice: Callable[[], AbstractContextManager[Any]]  # a block in which the model has them

    def __init__(self, adapted: nn.Module) -> None:
        super().__init__()
        if not (hasattr(adapted, "peft_config") and hasattr(adapted, "disable_adapter")):
            raise TypeError(
                f"adapted: expected a peft model with adapters to switch, got "
                f"{type(adapted).__name__}; pass the reference model itself instead"
            )
        # Not a submodule: the parameters are the policy's, to move, to train and to save.
        self.__dict__["adapted"] = adapted
        self.config: Any = adapted.config

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """Give the policy these adapters for a ``with`` block, and then its own again."""
        if any(getattr(module, "merged", False) is True for module in self.adapted.modules()):
            raise RuntimeError(
                "adapted: expected adapters beside the weights, got merged ones; call "
                "unmerge_adapter() first"
            )
        # peft makes adapters trainable when it switches to them, frozen ones too.
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
    """A peft model as it was before its adapters: the reference of a LoRA policy.

    It shares every weight with the policy. It computes in eval mode, and without a gradient graph,
    because a backward pass would find the policy's adapters again. The policy is switched for all
    its users meanwhile, so that no other thread may compute with it then. Merged adapters are a
    ``RuntimeError`` of the forward pass, because peft would unmerge them for good.

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
    """A peft model with one of its adapters alone: the reference of a policy that began with it.

    All else is as for :class:`WithoutAdapters`; disabled adapters are a ``RuntimeError``, too.

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
            # From the outside in, because each sets those inside of it, too.
            for module, names in active:
                module.set_adapter(names)
