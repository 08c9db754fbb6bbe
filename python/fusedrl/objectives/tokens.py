"""The tokens that a wrapper would give its model, and which of them a loss counts."""

from __future__ import annotations

import logging
from copy import copy
from typing import Any, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn
from torchrl.modules.llm import TransformersWrapper

from fusedrl.compat.torch import children_of, replace_children
from fusedrl.compat.torchrl import DISTRIBUTIONS
from fusedrl.transforms.retrieve_log_prob import can_read

logger = logging.getLogger("fusedrl")

_logged: set[tuple[type, str]] = set()


class CannotFuse(Exception):
    """A loss has to be computed by torchrl's own code; the message says why."""


def log_not_fused(loss: Any, why: object) -> None:
    """Log, once for each class of losses, that torchrl's own code computes it."""
    if (type(loss), str(why)) not in _logged:
        _logged.add((type(loss), str(why)))
        logger.warning("%s: %s; torchrl computes it from all logits", type(loss).__name__, why)


def check_readable(actor: Any, td: TensorDictBase) -> None:
    """Raise ``CannotFuse`` for an actor or a batch that only torchrl's own code reads."""
    if not can_read(actor):
        raise CannotFuse(
            f"its actor is a {type(actor).__name__}, not a TransformersWrapper without batching"
        )
    if td.batch_dims != 1:
        raise CannotFuse(f"the data has {td.batch_dims} batch dimensions")


class LossBatch(NamedTuple):
    """The padded tokens of a batch, all ``[B, T]``.

    Args:
        ids: int64, the token ids; padding has any value.
        attended: bool, ``True`` for a token and ``False`` for padding.
        counted: bool, the tokens that the masking strategy counts.
        first: bool, the first token of each sequence, which nothing predicts.
    """

    ids: Tensor
    attended: Tensor
    counted: Tensor
    first: Tensor

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return self.attended.sum(1).tolist()

    def packed(self, column: Any) -> Any:
        """A column ``[B, T]`` without its padding, ``[N]``; ``None`` for ``None``."""
        return None if column is None else column[self.attended]

    def padded(self, values: Tensor) -> Tensor:
        """Packed values ``[N]`` as ``[B, T]``, with 0 for padding."""
        values = values.to(self.attended.device)
        return values.new_zeros(self.attended.shape).masked_scatter(self.attended, values)


def read(
    wrapper: TransformersWrapper, strategy: str, action: NestedKey, td: TensorDictBase
) -> LossBatch:
    """The tokens of ``td``, read by the wrapper's own code.

    That code may write tokens into ``td``.

    Raises:
        CannotFuse: the tokens of the loss are not those that the model gets.
    """
    if strategy not in DISTRIBUTIONS:
        raise CannotFuse(f"masking_strategy={strategy!r} is not known")
    listener = _Listener(wrapper.model)
    counted = getattr(_with_model(wrapper, listener), DISTRIBUTIONS[strategy])(td).mask
    if listener.seen is None:
        raise CannotFuse("its wrapper calls the model in a way of its own")
    ids, attended = listener.seen
    tokens: Any = td.get(action, as_padded_tensor=True, padding_side="left", padding_value=-100)  # pyright: ignore[reportCallIssue]
    if not ids.shape == attended.shape == counted.shape == tokens.shape:
        raise CannotFuse(f"the tokens under {action!r} are not as many as the model reads")
    attended, counted = attended.bool(), counted.bool()
    if bool((counted & ~attended).any()):
        raise CannotFuse("its mask counts tokens that the attention mask hides")
    if bool((counted & (tokens.to(ids.device) != ids)).any()):
        raise CannotFuse(f"the tokens under {action!r} are not those that the model reads")
    first = attended & (attended.cumsum(1) == 1)
    return LossBatch(ids, attended, counted, first)


class _Listener(nn.Module):
    """Takes the place of a wrapper's model: keeps its inputs, and returns logits of one class."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.seen: tuple[Tensor, Tensor] | None = None
        if hasattr(model, "config"):
            self.config = model.config  # a wrapper refuses what is longer than the context

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> dict[str, Tensor]:
        self.seen = (input_ids, attention_mask)
        return {"logits": torch.zeros(*input_ids.shape, 1, device=input_ids.device)}


def _with_model(wrapper: TransformersWrapper, model: nn.Module) -> Any:
    """A copy of a wrapper with another model, whose inputs it pads."""
    twin: Any = copy(wrapper)
    # A copy shares these with the wrapper, and changes them while it reads.
    replace_children(twin, {**children_of(wrapper), "model": model})
    twin.out_keys = list(wrapper.out_keys)
    twin.pad_model_input = True
    return twin
