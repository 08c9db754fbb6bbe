"""Log-probs of wrappers that have to read and score by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.llm import History

from fusedrl.transforms.columns import column_rows
from fusedrl.transforms.reading import marks, masks_over

if TYPE_CHECKING:
    from fusedrl.transforms.retrieve_log_prob import RetrieveLogProb


def score_by_itself(transform: RetrieveLogProb, td: TensorDictBase) -> list[Tensor]:
    """The log-probs that ``transform.model`` computes, masked and padded as ``transform`` asks."""
    model: Any = transform.model
    # Before the model runs, so that a mask over other tokens is refused first.
    marked = _marked(transform, td) if transform.assistant_only else None
    scored = model(td.copy())
    rows = _column(scored, (model.log_probs_key, "full"))
    assert rows is not None
    if transform.assistant_only:
        masks = _assistant_masks(model, scored, marked)
        rows = [row.masked_fill(~mask, 0) for row, mask in zip(rows, masks, strict=True)]
    if model.pad_output and transform.padding_side == "right":
        attended = _attention_masks(model, scored)
        kept = zip(rows, attended, strict=True)
        rows = [torch.cat((row[mask], row[~mask])) for row, mask in kept]
    return rows


def _marked(transform: RetrieveLogProb, td: TensorDictBase) -> TensorDictBase | None:
    """The conversation, marked by the transform's own tokenizer or template; ``None`` without."""
    model: Any = transform.model
    history = td.get(model.input_key)
    if not transform.marks_itself or not isinstance(history, History):
        return None  # the model itself refuses another input
    template = {
        name: getattr(model, name, None) for name in ("chat_template", "chat_template_name")
    }
    tokenizer = model.tokenizer if transform.tokenizer is None else transform.tokenizer
    return marks(history, tokenizer, template, transform.marker_kwargs or {})


def _assistant_masks(
    model: Any, scored: TensorDictBase, marked: TensorDictBase | None
) -> list[Tensor]:
    """Assistant masks with the shapes of the log-probs; the model's output has or implies them."""
    attended = _attention_masks(model, scored)
    if marked is not None:
        tokens = _column(scored, (model.tokens_key, "full")) or []
        ids = [row[mask] for row, mask in zip(tokens, attended, strict=True)]
        return [
            torch.zeros_like(mask).masked_scatter(mask, own)
            for mask, own in zip(attended, masks_over(ids, marked), strict=True)
        ]
    masks = _column(scored, (model.masks_key, "all_assistant_mask"))
    if masks is not None:
        return masks
    prompts = _column(scored, (model.tokens_key, "prompt"))
    if prompts is None:
        raise ValueError(
            f"model: expected an assistant mask under "
            f"{(model.masks_key, 'all_assistant_mask')!r}, or a prompt under "
            f"{(model.tokens_key, 'prompt')!r} to tell the answer from, got neither; "
            "use a chat template with generation blocks, or assistant_only=False"
        )
    return [
        mask & (mask.cumsum(-1) > prompt.shape[-1])
        for mask, prompt in zip(attended, prompts, strict=True)
    ]


def _attention_masks(model: Any, scored: TensorDictBase) -> list[Tensor]:
    return _column(scored, (model.masks_key, "all_attention_mask")) or []


def _column(td: TensorDictBase, key: Any) -> list[Tensor] | None:
    column = td.get(key, as_list=True)  # pyright: ignore[reportCallIssue]
    return None if column is None else list(column_rows(column))
