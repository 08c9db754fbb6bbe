"""The log-probs of our losses, and torchrl's own code where they cannot be had from states."""

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
from fusedrl.models.ranks import Apart, Step, together
from fusedrl.ops.token_log_probs import TokenLogProbs
from fusedrl.transforms.wrapper_tokens import can_read

not_compiled: Any = torch.compiler.disable  # its types hide methods


class CannotFuse(Exception):
    """Only torchrl's own code computes the log-probs; the message says why."""


def fits(actor: Any, td: TensorDictBase) -> str | None:
    """Why only torchrl's own code reads a batch for an actor; ``None`` if ours reads it too."""
    if not can_read(actor):
        return f"its actor is a {type(actor).__name__}, not a TransformersWrapper without batching"
    if td.batch_dims != 1:
        return f"the data has {td.batch_dims} batch dimensions"
    return None


def with_child(module: Any, name: str, child: nn.Module) -> Any:
    """A shallow copy of a module with another child."""
    twin = copy(module)
    replace_children(twin, {**children_of(module), name: child})
    return twin


class FusedLoss:
    """A base before a loss of torchrl's, whose formulas get log-probs from hidden states."""

    actor_network: Any
    # Of a loss that was pickled as torchrl's class.
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

    def _together(self) -> AbstractContextManager[Step]:
        """A block whose errors are those of all ranks that share the policy."""
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
        ours: Callable[[TensorDictBase], Any],
        theirs: Callable[[TensorDictBase], Any],
        td: TensorDictBase,
    ) -> Any:
        """What ``ours`` makes of data, or ``theirs``, on all ranks, if that of one cannot."""
        with self._together() as step:
            try:
                if (why := fits(self.actor_network, td)) is not None:
                    raise CannotFuse(why)
                return ours(td)
            except CannotFuse as error:
                why = str(error)
                step.largest(apart=True)
            except Apart:
                why = "torchrl computes that of another rank"
            warn_once(f"{type(self).__name__}: {why}; torchrl computes it from all logits")
            with step.collective():
                return theirs(td)
