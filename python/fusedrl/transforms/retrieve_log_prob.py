"""Log-probs of conversations under a model, written where ``KLComputation`` reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from tensordict import (
    LazyStackedTensorDict,
    MetaData,
    NestedKey,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    lazy_stack,
    set_list_to_stack,
    unravel_key,
)
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchrl.data import Composite
from torchrl.data.llm import History
from torchrl.envs.llm.transforms import RetrieveLogProb as _RetrieveLogProb
from torchrl.modules.llm import TransformersWrapper
from torchrl.modules.llm.policies import LLMWrapperBase, LogProbs

from fusedrl.assistant_tokens import Refused, Renderer, Unknown, assistant_spans, tokens_in
from fusedrl.compat.torchrl import computing_device
from fusedrl.models import causal_log_probs
from fusedrl.models.forwards import check_limit
from fusedrl.models.ranks import together
from fusedrl.transforms import columns
from fusedrl.transforms.columns import Columns, column_rows, is_dense

ATTENTION = ("masks", "all_attention_mask")
# Arguments of a tokenizer's apply_chat_template that its template is not given.
_RENDERING = "chat_template add_generation_prompt tokenize return_dict"
_TOKENIZING = "max_length padding truncation return_tensors"


class RetrieveLogProb(_RetrieveLogProb):
    """Score every token of a conversation under ``model`` and keep the assistant's.

    A drop-in for :class:`torchrl.envs.llm.transforms.RetrieveLogProb`. It reads the full
    conversation of the root, and writes to ``"next"`` if there is one and to the root otherwise.
    The log-probs of a ``TransformersWrapper`` come from :func:`fusedrl.models.causal_log_probs` and
    are float32. Sequences are packed if the model allows it, whatever ``pad_model_input`` says, and
    only kept tokens reach the head. Any other wrapper computes its own log-probs.

    Args:
        model: a wrapper with ``generate=False`` and ``return_log_probs=True``.
        log_probs_full_key: where the log-probs go, in nats, a row ``[T]`` for each sample; by
            default ``(model.log_probs_key, "full")``. A wrapper with ``pad_output=True`` gives one
            tensor ``[B, T]``.
        assistant_only: give every token that is not the assistant's the log-prob 0; the model must
            have ``input_mode="history"`` then.
        tokenizer_kwargs: arguments of ``History.apply_chat_template`` for the assistant mask, such
            as a ``chat_template`` that marks other tokens. It must give the tokens of the model.
        detach: compute without a gradient graph. ``False`` lets gradients reach the model.
        device: where the model is moved to and computes.
        tokenizer: the tokenizer of the assistant mask; by default the model's.
        padding_side: where the padding of ``[B, T]`` log-probs is.
        max_tokens_per_forward: bounds the tokens of one forward pass of the model; see
            :func:`fusedrl.models.causal_log_probs`.
        share_prefixes: whether what chats begin with in common is computed once, see there.

    Raises:
        ValueError: the model generates, gives no log-probs, or has not the input mode that
            ``assistant_only`` needs; the assistant mask is over other tokens than the model's; the
            wrapper scores by itself, and there is a tokenizer, or padding on the right; or there is
            no attention mask, and rows begin with a padding token that is also another's.

    Example:
        >>> from tensordict import TensorDict, set_list_to_stack
        >>> from torchrl.data.llm import History
        >>> from torchrl.modules.llm import TransformersWrapper
        >>> from torchrl.modules.llm.policies import ChatHistory
        >>> from fusedrl import RetrieveLogProb
        >>> from fusedrl.demo.models import make_model, make_tokenizer  # tiny, not trained
        >>> tokenizer = make_tokenizer(["2 + 2? It is 4."])
        >>> wrapper = TransformersWrapper(make_model(len(tokenizer)), tokenizer=tokenizer,
        ...     generate=False, return_log_probs=True)
        >>> chats = [
        ...     [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": answer}]
        ...     for answer in ("4", "It is 4.")
        ... ]
        >>> with set_list_to_stack(True):
        ...     history = ChatHistory(full=History.from_chats(chats))
        ...     data = TensorDict(history=history, batch_size=(2,))
        ...     data = RetrieveLogProb(wrapper)(data)
        >>> log_probs = data.get(("log_probs", "full"), as_list=True)
        >>> [(len(row), int((row < 0).sum())) for row in log_probs]
        [(25, 1), (28, 4)]
    """

    # Of what torchrl's class has pickled.
    max_tokens_per_forward, share_prefixes, marker_kwargs = None, True, None

    def __init__(
        self,
        model: LLMWrapperBase,
        *,
        log_probs_full_key: NestedKey | None = None,
        assistant_only: bool = True,
        tokenizer_kwargs: dict[str, Any] | None = None,
        detach: bool = True,
        device: torch.device | None = None,
        tokenizer: Any = None,
        padding_side: str = "left",
        max_tokens_per_forward: int | None = None,
        share_prefixes: bool = True,
    ) -> None:
        if padding_side not in ("left", "right"):
            raise ValueError(
                f"padding_side: expected 'left' or 'right', got {padding_side!r}; "
                "leave it out for 'left'"
            )
        check_limit(max_tokens_per_forward)
        own = tokenizer is None or tokenizer is getattr(model, "tokenizer", None)
        as_torchrl = own and tokenizer_kwargs is None and padding_side == "left"
        if not (as_torchrl or can_read(model)):
            raise ValueError(
                "tokenizer, tokenizer_kwargs, padding_side: expected none of them beside a wrapper "
                f"that scores by itself, {type(model).__name__}, got some; leave them out"
            )
        # Kept before torchrl adds its defaults: what the caller gave says who marks the assistant.
        self.marker_kwargs = None if tokenizer_kwargs is None else dict(tokenizer_kwargs)
        super().__init__(
            model,
            log_probs_full_key=log_probs_full_key,
            assistant_only=assistant_only,
            tokenizer_kwargs=None if tokenizer_kwargs is None else dict(tokenizer_kwargs),
            detach=detach,
            device=device,
            tokenizer=tokenizer,
            padding_side=padding_side,
        )
        self.max_tokens_per_forward = max_tokens_per_forward
        self.share_prefixes = share_prefixes

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        with together("RetrieveLogProb", model_of(self)):
            return columns.run(self, self._step, tensordict)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Transform a whole transition, as a replay buffer asks for with ``invert=True``."""
        return self.forward(next_tensordict)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        with together("RetrieveLogProb", model_of(self)):
            if tensordict.batch_dims == 0:
                return columns.step_one(self._step, tensordict, next_tensordict)
            return self.score(tensordict, next_tensordict, self.read(tensordict))

    def read(
        self, tensordict: TensorDictBase, shared: TokenBatch | None = None
    ) -> TokenBatch | None:
        """The tokens of ``tensordict``, or ``shared`` if it was read in the same way.

        ``None`` if the model has to read and score by itself.
        """
        if tensordict.batch_dims != 1:
            raise ValueError(
                f"tensordict: expected one batch dimension or none, got batch_size "
                f"{tuple(tensordict.batch_size)}; flatten it with .reshape(-1)"
            )
        model: Any = self.model
        if not can_read(model):
            return None
        marker = None if self.tokenizer is model.tokenizer else self.tokenizer
        reading = reading_of(model, self.assistant_only, marker, self.marker_kwargs)
        if shared is not None and reading == shared.reading:
            return shared
        with set_list_to_stack(True):
            return read(reading, tensordict)

    @set_list_to_stack(True)
    def score(
        self, tensordict: TensorDictBase, next_tensordict: TensorDictBase, batch: TokenBatch | None
    ) -> TensorDictBase:
        """Write the log-probs of ``batch``, which was read from ``tensordict``."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.detach):
            if batch is not None:
                return self._write(next_tensordict, batch)
            with together("RetrieveLogProb", model_of(self)) as step:
                step.agree(apart=True)
                step.agree()  # ranks that could score otherwise have an error by now
                with step.collective():
                    return super()._step(tensordict, next_tensordict)

    def _write(self, td: TensorDictBase, batch: TokenBatch) -> TensorDictBase:
        wrapper: Any = self.model
        values = causal_log_probs(
            wrapper.model,
            batch.tokens,
            batch.lengths,
            batch.mask,
            max_tokens_per_forward=self.max_tokens_per_forward,
            share_prefixes=self.share_prefixes,
            model_kwargs=wrapper.generate_kwargs,
        ).log_probs
        key, padded = self.log_probs_full_key, wrapper.pad_output
        if padded and not isinstance(td, LazyStackedTensorDict):
            # Dense; the model's own answer would be a stack of rows of one length.
            made: Any = TensorDict({key: batch.padded(values, self.padding_side)}, td.batch_size)
        else:
            rows = batch.padded(values, self.padding_side) if padded else batch.rows(values)
            made = lazy_stack([TensorDict({key: row}) for row in rows])
        name = wrapper.log_probs_key
        if unravel_key(key) == unravel_key((name, "full")):  # as the wrapper writes them
            log_probs: Any = LogProbs.from_tensordict(made.get(name))
            log_probs.padded = MetaData(padded)
            made.set(name, log_probs)
        device, of_data = computing_device(self), td.device
        td = td if device is None else td.to(device)
        td = td.update(made, keys_to_update=(key,))
        return td if device is None or of_data is None else td.to(of_data)

    @property
    def columns_read(self) -> list[NestedKey]:
        """The keys that are read from the root, if they are there."""
        model: Any = self.model
        masks = [ATTENTION, model.attention_mask_key] if model.input_mode == "tokens" else []
        return [*self.in_keys, *masks]

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        return columns.begin(tensordict, tensordict_reset, self.log_probs_full_key)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        columns.declare_tokens(observation_spec, self.log_probs_full_key)
        return observation_spec


def model_of(transform: RetrieveLogProb) -> Any:
    """The model in the wrapper, which ranks may share; ``None`` if the wrapper has none."""
    return getattr(transform.model, "model", None)


# How a wrapper of torchrl makes tokens of its input.


@dataclass(frozen=True)
class Reading:
    """What a wrapper makes tokens from, and how. Equal readings give equal tokens and masks.

    Args:
        input_mode: ``"history"``, ``"text"`` or ``"tokens"``.
        input_key: where the input is.
        tokenizer: the wrapper's tokenizer.
        template: the wrapper's arguments of the chat template.
        tokenizer_kwargs: the wrapper's arguments of the tokenizer, for text.
        attention_mask_key: where the attention mask of tokens may be beside ``ATTENTION``.
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
        raise _wrong_kind(reading, "a History", history)
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
    for i, (row, own) in enumerate(zip(tokens, _list(marked, "input_ids"), strict=True)):
        if row is not own and not torch.equal(row, own.to(row.device)):
            raise ValueError(
                f"tokenizer: sample {i}: expected the model's {row.shape[-1]} tokens, got "
                f"{own.shape[-1]} that differ; the assistant mask must come from the same "
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
        "use another input_mode of the wrapper for other inputs"
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
    """Which tokens of a row are not padding, without a mask: all but the runs of it at its ends.

    The first of a run behind the content is its end, if the padding token also ends sequences.
    """
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    places = torch.arange(len(row), device=row.device)
    content = places[row != pad] if pad is not None else places
    first, stop = (int(content[0]), int(content[-1]) + 1) if len(content) else (0, 0)
    if first > 0 and pad in (eos, tokenizer.bos_token_id):
        raise ValueError(
            f"tokens: expected padding that can be told from the sequences, got the padding token "
            f"{tokenizer.pad_token!r} at the start of rows, and it is also the eos or bos token; "
            f"pass an attention mask under {ATTENTION!r}, or give the tokenizer a padding token "
            "of its own"
        )
    return (first <= places) & (places < stop + int(pad == eos))


def _list(td: Any, key: str) -> list[Tensor]:
    return list(column_rows(td.get(key, as_list=True)))


class MarkingTokenizer:
    """A fast tokenizer whose ``apply_chat_template`` also returns ``"assistant_masks"``.

    ``History.apply_chat_template`` chooses the template and calls it with the messages of each
    conversation. The assistant's tokens are those that ``fusedrl score`` counts.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                f"tokenizer: expected a fast tokenizer, which knows the characters of each token, "
                f"got {type(tokenizer).__name__}; load a fast one, or pass assistant_only=False"
            )
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        """Any other attribute is that of the tokenizer."""
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
        """Render one conversation; tokens in a dictionary get masks, int64 ``[1, T]``.

        Args:
            conversation: the messages, each with ``"role"`` and ``"content"``.
            chat_template: a Jinja template; ``None`` for the tokenizer's own.
            return_assistant_tokens_mask: without effect; the masks are always returned.
            tokenizer_kwargs: arguments of the tokenizer itself.
            **options: what else the tokenizer's ``apply_chat_template`` takes, and the variables
                of the template.

        Raises:
            ValueError: the assistant's tokens cannot be told from the others.
        """
        apply, kwargs = self._tokenizer.apply_chat_template, dict(tokenizer_kwargs or {})
        options["chat_template"] = chat_template
        if not (options.get("tokenize", True) and options.get("return_dict", True)):
            return apply(conversation, tokenizer_kwargs=kwargs, **options)
        kwargs["return_offsets_mapping"] = True
        answer = apply(conversation, tokenizer_kwargs=kwargs, **options)
        others = f"{_RENDERING} {_TOKENIZING}".split()
        variables = {name: x for name, x in options.items() if name not in others}
        renderer = Renderer(self._tokenizer, chat_template, variables)
        try:
            spans = assistant_spans(renderer, conversation)
        except Unknown as error:
            raise ValueError(
                f"history: expected a conversation whose assistant can be told from the rest, got "
                f"{error}; give the wrapper, or tokenizer_kwargs, a chat_template with "
                "{% generation %} markers"
            ) from error
        except Refused as error:
            raise error.__cause__ or error from None
        (places,) = answer.pop("offset_mapping")
        mask = (tokens_in(spans, torch.as_tensor(places)) >= 0).long()[None]
        if "attention_mask" in answer:  # padding has no characters, and is never the assistant's
            mask *= torch.as_tensor(answer["attention_mask"])
        answer["assistant_masks"] = mask
        return answer
