"""Assistant masks of a torchrl ``History``, by the definition that ``fusedrl score`` uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fusedrl.assistant_tokens import Refused, Renderer, Unknown, assistant_spans, tokens_in

# Arguments of a tokenizer's apply_chat_template that are not passed on to the template.
_NOT_SEEN = frozenset(("max_length", "padding", "truncation", "return_tensors"))
# With these, the tokens are not those of the text that the template renders.
_UNMASKED = ("continue_final_message", "sanitize_control_tokens")


class MarkingTokenizer:
    """A tokenizer whose ``apply_chat_template`` also returns ``"assistant_masks"``.

    Pass it to ``History.apply_chat_template``, which chooses the template and calls it with the
    messages of each conversation.

    Args:
        tokenizer: a fast tokenizer of transformers.

    Raises:
        ValueError: the tokenizer does not say which characters each token spells.
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
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        return_assistant_tokens_mask: bool = False,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """Render one conversation; the result has masks if it is a dictionary of tokens.

        Args:
            conversation: the messages, each with ``"role"`` and ``"content"``.
            chat_template: a Jinja template; ``None`` for the tokenizer's own.
            add_generation_prompt: whether the header of an assistant's turn follows the messages.
            tokenize: ``False`` for the rendered text, which has no masks.
            return_dict: ``False`` for the token ids alone, which have no masks.
            return_assistant_tokens_mask: without effect; the masks are always returned.
            tokenizer_kwargs: arguments of the tokenizer itself.
            **options: what else the tokenizer's ``apply_chat_template`` takes, and the variables
                of the template.

        Returns:
            What the tokenizer returns, with ``"assistant_masks"``, int64 ``[1, T]``: 1 for the
            tokens of the assistant.

        Raises:
            ValueError: the assistant's tokens cannot be told from the others, or an argument
                makes tokens of another text than the template's.
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
                    f"tokenizer_kwargs: expected {name} not to be set, got it; it goes with no "
                    "assistant mask: leave it out, or pass assistant_only=False"
                )
        offsets = {"return_offsets_mapping": True}
        answer = apply(conversation, **template, tokenizer_kwargs=kwargs | offsets, **options)
        variables = {name: x for name, x in options.items() if name not in _NOT_SEEN}
        renderer = Renderer(self._tokenizer, chat_template, variables)
        (places,) = answer.pop("offset_mapping")
        answer["assistant_masks"] = _mask(renderer, conversation, places)[None]
        if "attention_mask" in answer:  # padding has no characters, and is never the assistant's
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
