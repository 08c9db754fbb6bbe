"""Assistant masks of a torchrl ``History``, by the definition that ``fusedrl score`` has, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fusedrl.assistant_tokens import Refused, Renderer, Unknown, assistant_spans, tokens_in

# Arguments of a tokenizer's apply_chat_template that its template does not see.
_NOT_SEEN = frozenset(("max_length", "padding", "truncation", "return_tensors"))
# Those with which the text of the tokens is another one than that of the template.
_UNMASKED = ("continue_final_message", "sanitize_control_tokens")


class MarkingTokenizer:
    """A tokenizer with ``"assistant_masks"`` in what its ``apply_chat_template`` answers.

    ``History.apply_chat_template`` chooses the template for it and hands it the messages, and is
    not asked for masks itself.

    Args:
        tokenizer: a fast tokenizer of transformers.

    Raises:
        ValueError: a tokenizer that does not tell which characters a token spells.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                f"tokenizer: expected a fast tokenizer, which tells the characters of each token, "
                f"got {type(tokenizer).__name__}; load a fast one, or pass assistant_only=False"
            )
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        """What else the tokenizer has."""
        return getattr(self._tokenizer, name)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        return_assistant_tokens_mask: bool = False,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """The tokens of one conversation and their masks; plain text or tokens have none.

        Raises:
            ValueError: the assistant's tokens cannot be told, or arguments that go with no mask.
        """
        template = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "tokenize": tokenize,
            "return_dict": return_dict,
        }
        apply, kwargs = self._tokenizer.apply_chat_template, dict(tokenizer_kwargs or {})
        if not (tokenize and return_dict):
            return apply(conversation, **template, tokenizer_kwargs=kwargs, **options)
        for name in _UNMASKED:
            if options.pop(name, False):
                raise ValueError(
                    f"tokenizer_kwargs: expected {name} not to be set, as it goes with no "
                    "assistant mask; leave it out, or pass assistant_only=False"
                )
        offsets = {"return_offsets_mapping": True}
        answer = apply(conversation, **template, tokenizer_kwargs=kwargs | offsets, **options)
        variables = {name: x for name, x in options.items() if name not in _NOT_SEEN}
        renderer = Renderer(self._tokenizer, chat_template, variables)
        (places,) = answer.pop("offset_mapping")
        answer["assistant_masks"] = _mask(renderer, conversation, places)[None]
        if "attention_mask" in answer:  # padding spells no characters
            answer["assistant_masks"] *= torch.as_tensor(answer["attention_mask"])
        return answer


def _mask(
    renderer: Renderer, conversation: Sequence[Mapping[str, Any]], offsets: Any
) -> torch.Tensor:
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
    return (tokens_in(spans, torch.as_tensor(offsets)) >= 0).long()
