"""Conversations, texts and tokens of a tensordict, read as a torchrl wrapper reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, TypeGuard

import torch
from tensordict import NonTensorStack, TensorDictBase
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchrl.data.llm import History
from torchrl.modules.llm import TransformersWrapper

from fusedrl.transforms.assistant_masks import MarkingTokenizer
from fusedrl.transforms.columns import Columns, column_rows, is_dense
from fusedrl.transforms.rollout_columns import ATTENTION


@dataclass(frozen=True)
class Reading:
    """What a wrapper makes tokens from, and how. Equal readings give equal tokens and masks.

    Args:
        input_mode: ``"history"``, ``"text"`` or ``"tokens"``.
        input_key: where the input is.
        tokenizer: the wrapper's tokenizer.
        template: the wrapper's arguments of the chat template.
        tokenizer_kwargs: the wrapper's arguments of the tokenizer, for text.
        attention_mask_key: a second key under which the attention mask of tokens may be, after
            ``("masks", "all_attention_mask")``.
        assistant_only: whether only the assistant's tokens are kept.
        marker: another tokenizer, which marks the assistant's tokens.
        marker_kwargs: other arguments of the chat template, which mark them.
    """

    input_mode: str
    input_key: Any
    tokenizer: Any
    template: Mapping[str, Any]
    tokenizer_kwargs: Mapping[str, Any]
    attention_mask_key: Any
    assistant_only: bool
    marker: Any = None
    marker_kwargs: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class TokenBatch:
    """The tokens of a batch, packed.

    Args:
        reading: how they were read.
        tokens: token ids ``[N]``.
        lengths: tokens of each sample.
        mask: bool ``[N]``, the tokens to score; ``None`` for all.
        attended: bool ``[B, T]``, the places of the tokens in the padded batch that they came from;
            ``None`` if they came without padding.
    """

    reading: Reading
    tokens: Tensor
    lengths: list[int]
    mask: Tensor | None
    attended: Tensor | None = field(default=None, repr=False)

    def rows(self, values: Tensor) -> list[Tensor]:
        """Packed values as one row for each sample; the rows are views of one buffer."""
        return list(values.split(self.lengths))

    def padded(self, values: Tensor, side: str) -> Tensor:
        """Packed values as ``[B, T]``, 0 where there is no token."""
        if self.attended is not None and side == "left":
            attended = self.attended.to(values.device)
            return values.new_zeros(attended.shape).masked_scatter(attended, values)
        dense = pad_sequence(self.rows(values), batch_first=True, padding_side=side)
        width = dense.shape[1] if self.attended is None else self.attended.shape[1]
        return torch.nn.functional.pad(dense, (0, width - dense.shape[1]))


def can_read(wrapper: Any) -> TypeGuard[TransformersWrapper]:
    """Whether this module and ``models`` can read and score in place of ``wrapper``.

    They cannot for subclasses, which may do it differently, nor for wrappers that batch the calls
    of several threads.
    """
    return type(wrapper) is TransformersWrapper and not wrapper.batching


def reading_of(
    wrapper: TransformersWrapper, assistant_only: bool, marker: Any, marker_kwargs: Any
) -> Reading:
    """How ``wrapper`` reads; ``marker`` and ``marker_kwargs`` say who marks the kept tokens."""
    return Reading(
        wrapper.input_mode,
        wrapper.input_key,
        wrapper.tokenizer,
        {"chat_template": wrapper.chat_template, "chat_template_name": wrapper.chat_template_name},
        wrapper.tokenizer_kwargs,
        wrapper.attention_mask_key,
        assistant_only,
        marker,
        marker_kwargs,
    )


def read(reading: Reading, td: TensorDictBase) -> TokenBatch:
    """The tokens of ``td``.

    Raises:
        ValueError: there is no input, the marking tokenizer makes other tokens than the model's,
            or it is unclear which tokens are padding because there is no mask.
        TypeError: the input is not of the kind that the input mode names.
    """
    # A history is read as one object, because only that can apply a template.
    as_list = {} if reading.input_mode == "history" else {"as_list": True}
    column = td.get(reading.input_key, **as_list)
    if column is None:
        raise ValueError(
            f"tensordict: expected the input of the model under {reading.input_key!r}, found "
            f"{sorted(map(str, td.keys(True)))}; set input_key of the wrapper to where it is"
        )
    if reading.input_mode == "history":
        return _read_history(reading, column)
    if reading.input_mode == "text":
        return _read_text(reading, column)
    return _read_tokens(reading, td, column)


def _read_history(reading: Reading, history: Any) -> TokenBatch:
    if not isinstance(history, History):
        raise TypeError(
            f"tensordict: expected a History under {reading.input_key!r}, got "
            f"{type(history).__name__}; use another input_mode of the wrapper for other inputs"
        )
    marks_itself = reading.marker is not None or reading.marker_kwargs is not None
    masked = reading.assistant_only and not marks_itself
    answer = _apply_template(history, reading.tokenizer, reading.template, masked)
    rows = _list(answer, "input_ids")
    mask = None
    if reading.assistant_only:
        marked = answer
        if marks_itself:
            tokenizer = reading.tokenizer if reading.marker is None else reading.marker
            marked = marks(history, tokenizer, reading.template, reading.marker_kwargs or {})
        mask = torch.cat(masks_over(rows, marked))
    return TokenBatch(reading, torch.cat(rows), [len(row) for row in rows], mask)


def marks(
    history: History, tokenizer: Any, template: Mapping[str, Any], kwargs: Mapping[str, Any]
) -> TensorDictBase:
    """Tokens and assistant masks as another tokenizer or template gives them."""
    options = {**template, **kwargs}
    masked = options.pop("return_assistant_tokens_mask", True)
    marked = _apply_template(history, tokenizer, options, masked)
    if not isinstance(marked, TensorDictBase) or "assistant_masks" not in marked:
        raise ValueError(
            f"tokenizer_kwargs: expected arguments that give an assistant mask, got "
            f"{dict(kwargs)}; keep tokenize, return_dict and return_assistant_tokens_mask true"
        )
    return marked


def _apply_template(
    history: History, tokenizer: Any, options: Mapping[str, Any], masked: bool
) -> Any:
    given: dict[str, Any] = {"add_generation_prompt": False, "tokenize": True, "return_dict": True}
    given |= {name: value for name, value in options.items() if value is not None}
    marker: Any = MarkingTokenizer(tokenizer) if masked else tokenizer
    return history.apply_chat_template(tokenizer=marker, **given)


def masks_over(tokens: Sequence[Tensor], marked: TensorDictBase) -> list[Tensor]:
    """The assistant masks of ``marked``, whose tokens must be ``tokens``, one row a sample."""
    masks = _list(marked, "assistant_masks")
    for i, (row, own) in enumerate(zip(tokens, _list(marked, "input_ids"), strict=True)):
        if row is not own and not torch.equal(row, own.to(row.device)):
            raise ValueError(
                f"tokenizer: sample {i}: expected the model's {row.shape[-1]} tokens, got "
                f"{own.shape[-1]} that differ; the assistant mask must come from the same "
                "vocabulary and the same rendered text"
            )
    return [mask.bool() for mask in masks]


def _read_text(reading: Reading, texts: Any) -> TokenBatch:
    if isinstance(texts, NonTensorStack):
        texts = texts.tolist()
    texts = [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise TypeError(
            f"tensordict: expected strings under {reading.input_key!r}, got "
            f"{type(texts).__name__}; use another input_mode of the wrapper for other inputs"
        )
    answer = reading.tokenizer(texts, **reading.tokenizer_kwargs)
    ids, attended = answer["input_ids"], answer["attention_mask"].bool()
    return TokenBatch(reading, ids[attended], attended.sum(1).tolist(), None, attended)


def _read_tokens(reading: Reading, td: TensorDictBase, column: Any) -> TokenBatch:
    rows = column_rows(column)
    masks = None
    for key in (ATTENTION, reading.attention_mask_key):
        masks = Columns(td).get(key) if masks is None else masks
    if masks is not None:
        attended = [mask.bool() for mask in column_rows(masks)]
        for i, (row, mask) in enumerate(zip(rows, attended, strict=True)):
            if row.shape != mask.shape:
                raise ValueError(
                    f"masks: sample {i}: expected an attention mask of the tokens' shape "
                    f"{tuple(row.shape)}, got {tuple(mask.shape)}; let the tokenizer that made the "
                    "tokens make the mask"
                )
    elif reading.tokenizer is None or len({len(row) for row in rows}) > 1:  # not padded
        attended = [torch.ones_like(row, dtype=torch.bool) for row in rows]
    else:
        attended = _told_by_padding(rows, reading.tokenizer)
    packed = [row[mask] for row, mask in zip(rows, attended, strict=True)]
    lengths = [len(row) for row in packed]
    layout = torch.stack(attended) if is_dense(column) and attended else None
    return TokenBatch(reading, torch.cat(packed), lengths, None, layout)


def _told_by_padding(rows: Sequence[Tensor], tokenizer: Any) -> list[Tensor]:
    """Which tokens are not padding, without a mask: all but a run of padding at one end of a row.

    If the padding token also ends sequences, the first one of a run on the right is the end of the
    sequence, and the only token of a row that has nothing else.

    Raises:
        ValueError: a padding token at the start of a row may be padding or a part of the sequence.
    """
    pad = tokenizer.pad_token_id
    if pad is None:
        return [torch.ones_like(row, dtype=torch.bool) for row in rows]
    ends = int(pad == tokenizer.eos_token_id)
    spans = [_Span.of(row != pad) for row in rows]
    left = any(span.first > 0 for span in spans)
    if left and ends and any(span.behind > 1 for span in spans):
        _refuse_padding(tokenizer, "at both ends of rows, and it is also the eos token")
    if left and pad == tokenizer.bos_token_id and _begins(tokenizer):
        _refuse_padding(tokenizer, "at the start of rows, and it is also the bos token")
    attended = []
    for row, span in zip(rows, spans, strict=True):
        first, stop = span.first, span.stop + ends
        if span.empty and left:
            first, stop = len(row) - ends, len(row)
        places = torch.arange(len(row), device=row.device)
        attended.append((first <= places) & (places < stop))
    return attended


class _Span(NamedTuple):
    """Where the content of a row starts and stops, and how many places follow it."""

    first: int
    stop: int
    behind: int

    @classmethod
    def of(cls, content: Tensor) -> _Span:
        places = content.nonzero()
        if len(places) == 0:
            return cls(0, 0, 0)
        stop = int(places[-1]) + 1
        return cls(int(places[0]), stop, len(content) - stop)

    @property
    def empty(self) -> bool:
        return self.stop == 0


def _begins(tokenizer: Any) -> bool:
    """Whether a tokenizer begins a text with its bos token."""
    return tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]


def _refuse_padding(tokenizer: Any, where: str) -> NoReturn:
    raise ValueError(
        f"tokens: expected padding that can be told from the sequences, got the padding token "
        f"{tokenizer.pad_token!r} {where}; pass an attention mask under {ATTENTION!r}, or give the "
        "tokenizer a padding token of its own"
    )


def _list(td: Any, key: str) -> list[Tensor]:
    return list(column_rows(td.get(key, as_list=True)))
