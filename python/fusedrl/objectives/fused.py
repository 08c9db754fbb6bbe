"""Log-probs from hidden states for torchrl's losses, with torchrl's implementation as fallback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from copy import copy
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from fusedrl.compat.torch import children_of, replace_children
from fusedrl.logs import warn_once
from fusedrl.models import causal_log_probs
from fusedrl.models.ranks import OtherRankFallsBack, Step, together
from fusedrl.ops.token_log_probs import TokenLogProbs
from fusedrl.transforms.wrapper_tokens import can_read

not_compiled: Any = torch.compiler.disable  # Any, as its type hides methods


class CannotFuse(Exception):
    """The log-probs need torchrl's implementation; the message is the reason."""


def fits(actor: Any, td: TensorDictBase) -> str | None:
    """The reason why a batch needs torchrl's implementation; ``None`` if it does not."""
    if not can_read(actor):
        return f"its actor is a {type(actor).__name__}, not a TransformersWrapper without batching"
    if td.batch_dims != 1:
        return f"the data has {td.batch_dims} batch dimensions"
    return None


def with_child(module: Any, name: str, child: nn.Module) -> Any:
    """A shallow copy of a module in which one child is replaced."""
    copied = copy(module)
    replace_children(copied, {**children_of(module), name: child})
    return copied


class FusedLoss:
    """A mixin for a torchrl loss, whose formulas then get log-probs from hidden states."""

    actor_network: Any
    # Defaults for a loss that was pickled as torchrl's class.
    max_tokens_per_forward: int | None = None
    share_prefixes: bool = True

    def __init__(
        self,
        *args: Any,
        max_tokens_per_forward: int | None = None,
        share_prefixes: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.max_tokens_per_forward = max_tokens_per_forward
        self.share_prefixes = share_prefixes

    def _collective_call(self) -> AbstractContextManager[Step]:
        """A block in which an error on one rank is raised on all that share the policy."""
        return together(type(self).__name__, getattr(self.actor_network, "model", None))

    def _scored(
        self, tokens: Tensor, lengths: Sequence[int], mask: Tensor | None, entropy: bool = False
    ) -> TokenLogProbs:
        """Log-probs of packed tokens under the policy."""
        return causal_log_probs(
            self.actor_network.model,
            tokens,
            lengths,
            mask,
            max_tokens_per_forward=self.max_tokens_per_forward,
            share_prefixes=self.share_prefixes,
            entropy=entropy,
            model_kwargs=self.actor_network.generate_kwargs,
        )

    def _fused(
        self,
        fused: Callable[[TensorDictBase], Any],
        fallback: Callable[[TensorDictBase], Any],
        td: TensorDictBase,
    ) -> Any:
        """The result of ``fused``, or of ``fallback`` on all ranks if ``fused`` fails on one."""
        with self._collective_call() as step:
            try:
                if (why := fits(self.actor_network, td)) is not None:
                    raise CannotFuse(why)
                return fused(td)
            except CannotFuse as error:
                why = str(error)
                step.largest(apart=True)
            except OtherRankFallsBack:
                why = "another rank falls back to torchrl"
            warn_once(f"{type(self).__name__}: {why}; using torchrl's implementation (full logits)")
            with step.collective():
                return fallback(td)
