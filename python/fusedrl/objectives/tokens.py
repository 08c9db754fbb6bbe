"""The tokens that a wrapper passes to its model, and the mask of those that a loss counts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn
from torchrl.modules.llm import TransformersWrapper

from fusedrl.compat.torchrl import DISTRIBUTIONS
from fusedrl.objectives.fused import CannotFuse, with_child


class LossBatch(NamedTuple):
    """The padded tokens of a batch, all ``[B, T]``.

    Args:
        ids: int64, the token ids; padding is arbitrary.
        attended: bool, ``True`` for a token and ``False`` for padding.
        counted: bool, the tokens that the masking strategy counts.
    """

    ids: Tensor
    attended: Tensor
    counted: Tensor

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each sequence."""
        return self.attended.sum(1).tolist()

    def packed(self, column: Tensor) -> Tensor:
        """A column ``[B, T]`` without its padding, ``[N]``."""
        return column[self.attended]

    def padded(self, values: Tensor) -> Tensor:
        """Packed values ``[N]`` as ``[B, T]``, with 0 for padding."""
        values = values.to(self.attended.device)
        return values.new_zeros(self.attended.shape).masked_scatter(self.attended, values)


def read(
    wrapper: TransformersWrapper, strategy: str, action: NestedKey, td: TensorDictBase
) -> LossBatch:
    """The tokens of ``td``, read by the wrapper's code.

    Raises:
        CannotFuse: the tokens of the loss are not those that the model reads.
    """
    if strategy not in DISTRIBUTIONS:
        raise CannotFuse(f"masking_strategy={strategy!r} is unknown")
    recorder = _InputRecorder(wrapper.model)
    reader = with_child(wrapper, "model", recorder)
    reader.out_keys = list(wrapper.out_keys)  # the call changes them in place
    reader.pad_model_input = True
    td = td.copy()  # the wrapper may write tokens into it
    counted = getattr(reader, DISTRIBUTIONS[strategy])(td).mask
    if recorder.inputs is None:
        raise CannotFuse("its wrapper does not use its model attribute")
    ids, attended = recorder.inputs
    tokens: Any = td.get(action, as_padded_tensor=True, padding_side="left", padding_value=-100)  # pyright: ignore[reportCallIssue]
    if not ids.shape == attended.shape == counted.shape == tokens.shape:
        raise CannotFuse(f"the tokens under {action!r} and those of the model differ in number")
    attended, counted = attended.bool(), counted.bool()
    if bool((counted & ~attended).any()):
        raise CannotFuse("its mask counts tokens that the attention mask hides")
    if bool((counted & (tokens.to(ids.device) != ids)).any()):
        raise CannotFuse(f"the tokens under {action!r} are not those that the model reads")
    return LossBatch(ids, attended, counted)


class _InputRecorder(nn.Module):
    """Replaces a wrapper's model: records its inputs, and returns logits of one class."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inputs: tuple[Tensor, Tensor] | None = None
        if hasattr(model, "config"):
            self.config = model.config  # the wrapper checks the context length

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> dict[str, Tensor]:
        self.inputs = (input_ids, attention_mask)
        return {"logits": torch.zeros(*input_ids.shape, 1, device=input_ids.device)}
