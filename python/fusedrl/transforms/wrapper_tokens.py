"""Tokenise the input of a torchrl wrapper, and find the tokens of the assistant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from tensordict import NonTensorStack, TensorDictBase
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchrl.data.llm import History
from torchrl.modules.llm import TransformersWrapper

from fusedrl.assistant_tokens import Refused, Renderer, Unknown, assistant_spans, tokens_in
from fusedrl.transforms.columns import Columns, column_rows, is_dense

ATTENTION = ("masks", "all_attention_mask")
# Arguments of apply_chat_template that are not passed to the template.
_RENDERING = "chat_template add_generation_prompt tokenize return_dict"
_TOKENIZING = "max_length padding truncation return_tensors"


@dataclass(frozen=True)
class Reading:
    """How a wrapper obtains tokens. Equal readings give equal tokens and masks.

    Args:
        input_mode: ``"history"``, ``"text"`` or ``"tokens"``.
        input_key: key of the input.
        tokenizer: the wrapper's tokenizer.
        template: the wrapper's arguments for the chat template.
        tokenizer_kwargs: the wrapper's arguments for the tokenizer, for text.
        attention_mask_key: fallback key of the attention mask, after ``ATTENTION``.
        assistant_only: whether only the assistant's tokens are scored.
        marker: another tokenizer, for the assistant mask.
        marker_kwargs: other arguments for the chat template, for the assistant mask.
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
        attended: bool ``[B, T]``, the positions of the tokens in the padded input; ``None`` if the
            input was not padded.
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
    """Whether fusedrl can read and score in place of ``wrapper``.

    Subclasses may behave differently, and batching wrappers combine the calls of several threads.
    """
    return type(wrapper) is TransformersWrapper and not wrapper.batching


def reading_of(
    wrapper: TransformersWrapper, assistant_only: bool, marker: Any, marker_kwargs: Any
) -> Reading:
    """The reading of ``wrapper``, with an optional other source of the assistant mask."""
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
        ValueError: the input is missing, the assistant mask belongs to other tokens, or padding
            cannot be identified without an attention mask.
        TypeError: the input does not match the input mode.
    """
    # as_list would split the History, which applies the template as a whole.
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
        raise _wrong_kind(reading, "a History", history)
    other_marker = reading.marker is not None or reading.marker_kwargs is not None
    masked = reading.assistant_only and not other_marker
    answer = _apply_template(history, reading.tokenizer, reading.template, masked)
    rows = _list(answer, "input_ids")
    mask = None
    if reading.assistant_only:
        marked = answer
        if other_marker:
            tokenizer = reading.tokenizer if reading.marker is None else reading.marker
            marked = marks(history, tokenizer, reading.template, reading.marker_kwargs or {})
        mask = torch.cat(masks_over(rows, marked))
    return TokenBatch(reading, torch.cat(rows), [len(row) for row in rows], mask)


def marks(
    history: History, tokenizer: Any, template: Mapping[str, Any], kwargs: Mapping[str, Any]
) -> TensorDictBase:
    """Tokens and assistant masks by another tokenizer or template."""
    options = {**template, **kwargs}
    masked = options.pop("return_assistant_tokens_mask", True)
    marked = _apply_template(history, tokenizer, options, masked)
    if not isinstance(marked, TensorDictBase) or "assistant_masks" not in marked:
        raise ValueError(
            f"tokenizer_kwargs: expected arguments that return an assistant mask, got "
            f"{dict(kwargs)}; leave tokenize, return_dict and return_assistant_tokens_mask true"
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
    """The assistant masks of ``marked``, one row for each sample; checks its token IDs."""
    for i, (row, other) in enumerate(zip(tokens, _list(marked, "input_ids"), strict=True)):
        if row is not other and not torch.equal(row, other.to(row.device)):
            raise ValueError(
                f"tokenizer: sample {i}: expected the model's {row.shape[-1]} tokens, got "
                f"{other.shape[-1]} that differ; the assistant mask must come from the same "
                "vocabulary and the same rendered text"
            )
    return [mask.bool() for mask in _list(marked, "assistant_masks")]


def _read_text(reading: Reading, texts: Any) -> TokenBatch:
    texts = texts.tolist() if isinstance(texts, NonTensorStack) else texts
    texts = [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise _wrong_kind(reading, "strings", texts)
    answer = reading.tokenizer(texts, **reading.tokenizer_kwargs)
    ids, attended = answer["input_ids"], answer["attention_mask"].bool()
    return TokenBatch(reading, ids[attended], attended.sum(1).tolist(), None, attended)


def _wrong_kind(reading: Reading, expected: str, got: Any) -> TypeError:
    return TypeError(
        f"tensordict: expected {expected} under {reading.input_key!r}, got {type(got).__name__}; "
        "set the input_mode of the wrapper to match"
    )


def _read_tokens(reading: Reading, td: TensorDictBase, column: Any) -> TokenBatch:
    rows = column_rows(column)
    masks = None
    for key in (ATTENTION, reading.attention_mask_key):
        masks = Columns(td).get(key) if masks is None else masks
    if masks is not None:
        attended = [mask.bool() for mask in column_rows(masks)]
    elif reading.tokenizer is None or len({len(row) for row in rows}) > 1:  # not padded
        attended = [torch.ones_like(row, dtype=torch.bool) for row in rows]
    else:
        attended = [_without_padding(row, reading.tokenizer) for row in rows]
    packed = [row[mask] for row, mask in zip(rows, attended, strict=True)]
    lengths = [len(row) for row in packed]
    layout = torch.stack(attended) if is_dense(column) else None
    return TokenBatch(reading, torch.cat(packed), lengths, None, layout)


def _without_padding(row: Tensor, tokenizer: Any) -> Tensor:
    """Mask of a row without its leading and trailing padding tokens.

    If the padding token is also the EOS token, the first trailing one ends the sequence.
    """
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    places = torch.arange(len(row), device=row.device)
    content = places[row != pad] if pad is not None else places
    first, stop = (int(content[0]), int(content[-1]) + 1) if len(content) else (0, 0)
    if first > 0 and pad in (eos, tokenizer.bos_token_id):
        raise ValueError(
            f"tokens: expected unambiguous padding, got the padding token {tokenizer.pad_token!r}, "
            "which is also the eos or bos token, at the start of a row; pass an attention mask "
            f"under {ATTENTION!r}, or set a separate padding token"
        )
    return (first <= places) & (places < stop + int(pad == eos))


def _list(td: Any, key: str) -> list[Tensor]:
    return list(column_rows(td.get(key, as_list=True)))


class MarkingTokenizer:
    """A fast tokenizer whose ``apply_chat_template`` also returns ``"assistant_masks"``.

    ``History.apply_chat_template`` chooses the template and calls this for each conversation. The
    mask selects the same tokens as ``fusedrl score``.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                f"tokenizer: expected a fast tokenizer, which maps tokens to characters, got "
                f"{type(tokenizer).__name__}; load a fast one, or pass assistant_only=False"
            )
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        """Forward other attributes to the tokenizer."""
        return getattr(self._tokenizer, name)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        return_assistant_tokens_mask: bool = False,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """Render one conversation; a dictionary result also gets masks, int64 ``[1, T]``.

        Args:
            conversation: the messages, each with ``"role"`` and ``"content"``.
            chat_template: a Jinja template; ``None`` for the tokenizer's template.
            return_assistant_tokens_mask: ignored; masks are always returned.
            tokenizer_kwargs: arguments of the tokenizer.
            **options: further arguments of ``apply_chat_template`` and variables of the template.

        Raises:
            ValueError: the tokens of the assistant cannot be determined.
        """
        apply, kwargs = self._tokenizer.apply_chat_template, dict(tokenizer_kwargs or {})
        options["chat_template"] = chat_template
        if not (options.get("tokenize", True) and options.get("return_dict", True)):
            return apply(conversation, tokenizer_kwargs=kwargs, **options)
        kwargs["return_offsets_mapping"] = True
        answer = apply(conversation, tokenizer_kwargs=kwargs, **options)
        reserved = f"{_RENDERING} {_TOKENIZING}".split()
        variables = {name: x for name, x in options.items() if name not in reserved}
        renderer = Renderer(self._tokenizer, chat_template, variables)
        try:
            spans = assistant_spans(renderer, conversation)
        except Unknown as error:
            raise ValueError(
                f"history: expected a chat template that identifies the assistant's tokens, got "
                f"{error}; pass a chat_template with {{% generation %}} markers to the wrapper or "
                "in tokenizer_kwargs"
            ) from error
        except Refused as error:
            raise error.__cause__ or error from None
        (places,) = answer.pop("offset_mapping")
        mask = (tokens_in(spans, torch.as_tensor(places)) >= 0).long()[None]
        if "attention_mask" in answer:  # padding has empty offsets
            mask *= torch.as_tensor(answer["attention_mask"])
        answer["assistant_masks"] = mask
        return answer
