"""Log-probs of a conversation under a model, written where the KL is computed from."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    MetaData,
    NestedKey,
    TensorDict,
    TensorDictBase,
    set_list_to_stack,
    unravel_key,
)
from torch import Tensor
from torchrl.data import Composite
from torchrl.data.llm import History
from torchrl.envs.llm.transforms import RetrieveLogProb as _RetrieveLogProb
from torchrl.modules.llm.policies import LLMWrapperBase, LogProbs

from fusedrl.transforms import columns
from fusedrl.transforms.scoring import FusedScorer, masks_over


class RetrieveLogProb(_RetrieveLogProb):
    """Score every token of a conversation under ``model`` and keep the assistant's.

    A drop-in for :class:`torchrl.envs.llm.transforms.RetrieveLogProb`. It reads the full
    conversation of the root and writes to ``"next"`` where there is one. Under a
    ``TransformersWrapper`` with padded model inputs the log-probs come from
    :func:`fusedrl.token_log_probs`, in float32; any other wrapper is asked for its own.

    Args:
        model: a wrapper with ``generate=False`` and ``return_log_probs=True``.
        log_probs_full_key: where the log-probs go, in nats, a row ``[T]`` a sample; by default
            ``(model.log_probs_key, "full")``. A wrapper with ``pad_output=True`` gives ``[B, T]``.
        assistant_only: 0 for every token that is not the assistant's; needs
            ``input_mode="history"``.
        tokenizer_kwargs: arguments of ``History.apply_chat_template`` for the assistant mask, such
            as a ``chat_template`` that marks other tokens. The tokens must stay the model's.
        detach: compute without a gradient graph. ``False`` lets gradients reach the model.
        device: where the model is put and computes.
        tokenizer: the tokenizer of the assistant mask; by default the model's.
        padding_side: where the padding of ``[B, T]`` log-probs is.

    Raises:
        ValueError: a model that generates, gives no log-probs, or has another input mode than
            ``assistant_only`` needs; a mask over other tokens than the model's.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data.llm import History
        >>> from torchrl.modules.llm import TransformersWrapper
        >>> from torchrl.modules.llm.policies import ChatHistory
        >>> from fusedrl import RetrieveLogProb
        >>> def log_probs_of(model, tokenizer, chats):
        ...     wrapper = TransformersWrapper(
        ...         model, tokenizer=tokenizer, generate=False, return_log_probs=True
        ...     )
        ...     data = TensorDict(
        ...         history=ChatHistory(full=History.from_chats(chats)), batch_size=(len(chats),)
        ...     )
        ...     return RetrieveLogProb(wrapper)(data).get(("log_probs", "full"), as_list=True)
    """

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
    ) -> None:
        if padding_side not in ("left", "right"):
            raise ValueError(f"padding_side: expected 'left' or 'right', got {padding_side!r}")
        self._masks_itself = tokenizer_kwargs is not None or (
            tokenizer is not None and tokenizer is not getattr(model, "tokenizer", None)
        )
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
        self._own_key = unravel_key((model.log_probs_key, "full"))

    @set_list_to_stack(True)
    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        if tensordict.batch_dims != 1:
            raise ValueError(
                f"tensordict: expected one batch dimension, got batch_size "
                f"{tuple(tensordict.batch_size)}; flatten it with .reshape(-1)"
            )
        device = getattr(self, "_io_device", None)
        original_device = tensordict.device
        if device is not None:
            tensordict, next_tensordict = tensordict.to(device), next_tensordict.to(device)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.detach):
            self._write(next_tensordict, self._score(tensordict))
        if device is not None and original_device is not None:
            next_tensordict = next_tensordict.to(original_device)
        return next_tensordict

    def _score(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The model's answer, its log-probs masked and padded as asked for."""
        marked = self._mark(tensordict) if self.assistant_only and self._masks_itself else None
        if FusedScorer.can_score(self.model):
            scorer = FusedScorer(self.model, assistant_only=self.assistant_only, marked=marked)
            scored = scorer(tensordict.copy())
        else:
            scored = self.model(tensordict.copy())
            if self.assistant_only:
                rows = _column(scored, self._own_key)
                kept = zip(rows, self._assistant_masks(scored, marked), strict=True)
                _replace(scored, self._own_key, [row.masked_fill(~mask, 0) for row, mask in kept])
        if self.model.pad_output and self.padding_side == "right":
            kept = zip(_column(scored, self._own_key), self._attention_masks(scored), strict=True)
            rows = [torch.cat((row[mask], row[~mask])) for row, mask in kept]
            _replace(scored, self._own_key, rows)
        return scored

    def _mark(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        """The conversation as the mask's own tokenizer sees it."""
        history = tensordict.get(self.model.input_key)
        if not isinstance(history, History):
            return None  # the model says what is wrong with it
        template = {
            name: getattr(self.model, name)
            for name in ("chat_template", "chat_template_name")
            if getattr(self.model, name, None) is not None
        }
        tokenizer: Any = self.model.tokenizer if self.tokenizer is None else self.tokenizer
        marked = history.apply_chat_template(
            tokenizer=tokenizer, **{**template, **self.tokenizer_kwargs}
        )
        if not isinstance(marked, TensorDictBase) or "assistant_masks" not in marked:
            raise ValueError(
                f"tokenizer_kwargs: expected arguments that give an assistant mask, "
                f"got {self.tokenizer_kwargs}; keep tokenize, return_dict and "
                "return_assistant_tokens_mask true"
            )
        return marked

    def _attention_masks(self, scored: TensorDictBase) -> list[Tensor]:
        return _column(scored, (self.model.masks_key, "all_attention_mask"))

    def _assistant_masks(
        self, scored: TensorDictBase, marked: TensorDictBase | None
    ) -> list[Tensor]:
        """Masks shaped like the log-probs of a model that gives or implies them."""
        attended = self._attention_masks(scored)
        if marked is not None:
            tokens = _column(scored, (self.model.tokens_key, "full"))
            ids = [row[mask] for row, mask in zip(tokens, attended, strict=True)]
            return [
                torch.zeros_like(mask).masked_scatter(mask, own)
                for mask, own in zip(attended, masks_over(ids, marked), strict=True)
            ]
        masks = _column(scored, (self.model.masks_key, "all_assistant_mask"))
        if masks is not None:
            return masks
        prompts = _column(scored, (self.model.tokens_key, "prompt"))
        if prompts is None:
            raise ValueError(
                f"model: expected an assistant mask under "
                f"{(self.model.masks_key, 'all_assistant_mask')!r}, or a prompt under "
                f"{(self.model.tokens_key, 'prompt')!r} to tell the answer from, got neither; "
                "use a chat template with generation blocks, or assistant_only=False"
            )
        return [
            mask & (mask.cumsum(-1) > prompt.shape[-1])
            for mask, prompt in zip(attended, prompts, strict=True)
        ]

    def _write(self, td: TensorDictBase, scored: TensorDictBase) -> None:
        key, own = self.log_probs_full_key, self._own_key
        if self.model.pad_output and not isinstance(td, LazyStackedTensorDict):
            # Dense, where the model's own answer is a stack of rows of one length.
            dense = torch.stack(_column(scored, own))
            column = TensorDict({key: dense}, batch_size=td.batch_size)
            if key == own:
                log_probs: Any = LogProbs._from_tensordict(column.get(own[0]))
                log_probs.padded = MetaData(True)
                column.set(own[0], log_probs)
            td.update(column, keys_to_update=(key,))
        elif key == own:
            td.update(scored, keys_to_update=(key,))
        else:
            columns.write_rows(td, key, _column(scored, own), self.model.layout or torch.strided)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        columns.declare_tokens(observation_spec, self.log_probs_full_key)
        return observation_spec


def _column(td: TensorDictBase, key: NestedKey) -> Any:
    """The rows of a column, one a sample; ``None`` if there is no such column."""
    column = td.get(key, as_list=True)  # pyright: ignore[reportCallIssue]
    return list(column.unbind(0)) if isinstance(column, Tensor) else column


def _replace(td: TensorDictBase, key: NestedKey, rows: list[Tensor]) -> None:
    td.set(key, torch.nested.as_nested_tensor(rows, layout=torch.strided))
