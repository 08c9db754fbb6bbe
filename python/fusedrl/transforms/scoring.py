"""Log-probs of a torchrl ``TransformersWrapper`` through the fused op."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchrl.data.llm import History
from torchrl.modules.llm import TransformersWrapper
from torchrl.modules.llm.policies import ChatHistory

from fusedrl.ops.token_log_probs import token_log_probs


class FusedScorer(TransformersWrapper):
    """A view of a wrapper that shares all its state and scores tokens with the fused op.

    Made for one call, so that the wrapper itself is never changed, not even for a moment that
    another thread could see. Log-probs are float32 whatever the model's dtype, and tokens that are
    padding, first in their sequence, or outside the assistant mask never have their logits read.

    Args:
        wrapper: the wrapper whose model, tokenizer and settings are used.
        assistant_only: drop the tokens that the chat template does not mark as the assistant's.
        marked: the conversation as another tokenizer or template marks it (``input_ids`` and
            ``assistant_masks``), instead of the wrapper's own.
    """

    def __init__(
        self,
        wrapper: TransformersWrapper,
        *,
        assistant_only: bool,
        marked: TensorDictBase | None = None,
    ) -> None:
        self.__dict__.update(wrapper.__dict__)
        self._assistant_only = assistant_only
        self._marked = marked
        self._assistant_mask: Tensor | None = None

    @staticmethod
    def can_score(wrapper: Any) -> TypeGuard[TransformersWrapper]:
        """Whether ``wrapper`` computes its log-probs in the way that this class replaces.

        Not so for subclasses, which may score differently, for wrappers that batch the calls of
        several threads, and for packed model inputs, whose sequence boundaries are lost there.
        """
        return (
            type(wrapper) is TransformersWrapper
            and wrapper.pad_model_input
            and not wrapper.batching
        )

    def _from_transformers_logprobs_history(
        self, td: TensorDictBase, cfg: Any, out: TensorDictBase, logits_only: bool = False
    ) -> TensorDictBase:
        history = td.get(self.input_key)
        if not isinstance(history, History):  # torchrl says what is wrong with it
            return super()._from_transformers_logprobs_history(td, cfg, out, logits_only)
        # The template is applied for the tokens only; the rendered text is not asked for here.
        tokenizer: Any = self.tokenizer
        tokens = history.apply_chat_template(
            tokenizer=tokenizer,
            chat_template=self.chat_template,
            chat_template_name=self.chat_template_name,
            add_generation_prompt=False,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=self._assistant_only and self._marked is None,
        )
        assert isinstance(tokens, TensorDictBase)
        out = self._logprobs_from_history_tokens(tokens, cfg, out, logits_only=logits_only)
        key: Any = self.history_key
        return out.set(key, ChatHistory(full=history))

    def _logprobs_from_history_tokens(
        self, response_tokens: TensorDictBase, cfg: Any, out: TensorDictBase, **kwargs: Any
    ) -> TensorDictBase:
        if self._assistant_only:
            marked = response_tokens if self._marked is None else self._marked
            tokens = response_tokens.get("input_ids", as_list=True)  # pyright: ignore[reportCallIssue]
            masks = masks_over(tokens, marked)
            self._assistant_mask = pad_sequence(masks, batch_first=True, padding_side="left")
        return super()._logprobs_from_history_tokens(response_tokens, cfg, out, **kwargs)

    def _compute_log_probs_from_model_output(
        self,
        model_output: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        pad_val: Any,
        logits_only: bool = False,
    ) -> tuple[Tensor, Tensor]:
        logits = model_output["logits"]
        attended = attention_mask.bool()
        # A token is scored from the logits of the token before it, which must be attended too.
        kept = attended.clone()
        kept[:, 1:] &= attended[:, :-1]
        if self._assistant_mask is not None:
            kept &= self._assistant_mask.to(kept.device)
        log_probs = token_log_probs(logits, input_ids, kept, shift=True)
        assert isinstance(log_probs, torch.Tensor)
        return log_probs, logits


def masks_over(tokens: list[Tensor], marked: TensorDictBase) -> list[Tensor]:
    """The assistant masks of ``marked``, whose tokens must be ``tokens``, one row a sample."""
    ids = marked.get("input_ids", as_list=True)  # pyright: ignore[reportCallIssue]
    masks = marked.get("assistant_masks", as_list=True)  # pyright: ignore[reportCallIssue]
    for i, (row, own) in enumerate(zip(tokens, ids, strict=True)):
        if row is not own and not torch.equal(row, own.to(row.device)):
            raise ValueError(
                f"tokenizer: sample {i}: expected the model's {row.shape[-1]} tokens, got "
                f"{own.shape[-1]} that differ; the assistant mask must come from the same "
                "vocabulary and the same rendered text"
            )
    return [mask.bool() for mask in masks]
