"""Log-probs of conversations under a model, in the form that ``KLComputation`` reads."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    MetaData,
    NestedKey,
    TensorDict,
    TensorDictBase,
    lazy_stack,
    set_list_to_stack,
    unravel_key,
)
from torchrl.data import Composite
from torchrl.envs.llm.transforms import RetrieveLogProb as _RetrieveLogProb
from torchrl.modules.llm.policies import LLMWrapperBase, LogProbs

from fusedrl.compat.torchrl import computing_device
from fusedrl.models import causal_log_probs
from fusedrl.models.forwards import check_limit
from fusedrl.models.ranks import together
from fusedrl.transforms import columns
from fusedrl.transforms.wrapper_tokens import ATTENTION, TokenBatch, can_read, read, reading_of


class RetrieveLogProb(_RetrieveLogProb):
    """Compute the log-prob of every assistant token of a conversation under ``model``.

    A drop-in for :class:`torchrl.envs.llm.transforms.RetrieveLogProb`. It reads the full
    conversation from the root, and writes to ``"next"`` if there is one and to the root otherwise.
    For a ``TransformersWrapper``, :func:`fusedrl.models.causal_log_probs` computes the log-probs in
    float32: sequences are packed if the model supports it (``pad_model_input`` is ignored), and
    only scored tokens reach the LM head. For any other wrapper, the wrapper computes them.

    Args:
        model: a wrapper with ``generate=False`` and ``return_log_probs=True``.
        log_probs_full_key: key of the log-probs in nats, a row ``[T]`` for each sample, or one
            tensor ``[B, T]`` for a wrapper with ``pad_output=True``; by default
            ``(model.log_probs_key, "full")``.
        assistant_only: set the log-prob of all other tokens to 0; requires
            ``input_mode="history"``.
        tokenizer_kwargs: arguments of ``History.apply_chat_template`` for the assistant mask, such
            as a ``chat_template`` that marks other tokens; its token IDs must equal the model's.
        detach: compute without a gradient graph. ``False`` lets gradients reach the model.
        device: device of the model.
        tokenizer: the tokenizer of the assistant mask; by default the model's.
        padding_side: side of the padding of ``[B, T]`` log-probs.
        max_tokens_per_forward: limit on the tokens of one forward pass; see
            :func:`fusedrl.models.causal_log_probs`.
        share_prefixes: compute common prefixes of chats once; see
            :func:`fusedrl.models.causal_log_probs`.

    Raises:
        ValueError: the wrapper or its input mode is not supported, the assistant mask belongs to
            other tokens, or padding cannot be identified without an attention mask.

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

    # For objects pickled from torchrl's class.
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
        same_tokenizer = tokenizer is None or tokenizer is getattr(model, "tokenizer", None)
        default_mask = same_tokenizer and tokenizer_kwargs is None and padding_side == "left"
        if not (default_mask or can_read(model)):
            raise ValueError(
                "tokenizer, tokenizer_kwargs, padding_side: expected none of them with "
                f"{type(model).__name__}, which computes its log-probs itself, got some; leave "
                "them out"
            )
        # Stored before torchrl adds defaults: only arguments of the caller change the mask.
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

        ``None`` if the wrapper has to compute the log-probs itself.
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
        """Write the log-probs of ``batch``, the tokens of ``tensordict``."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.detach):
            if batch is not None:
                return self._write(next_tensordict, batch)
            with together("RetrieveLogProb", model_of(self)) as step:
                step.largest(apart=True)
                step.largest()  # ranks with another kind of wrapper have raised by now
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
            # Dense, where the wrapper would return a stack of rows of one length.
            made: Any = TensorDict({key: batch.padded(values, self.padding_side)}, td.batch_size)
        else:
            rows = batch.padded(values, self.padding_side) if padded else batch.rows(values)
            made = lazy_stack([TensorDict({key: row}) for row in rows])
        name = wrapper.log_probs_key
        if unravel_key(key) == unravel_key((name, "full")):  # the form that the wrapper writes
            log_probs: Any = LogProbs.from_tensordict(made.get(name))
            log_probs.padded = MetaData(padded)
            made.set(name, log_probs)
        device, of_data = computing_device(self), td.device
        td = td if device is None else td.to(device)
        td = td.update(made, keys_to_update=(key,))
        return td if device is None or of_data is None else td.to(of_data)

    @property
    def columns_read(self) -> list[NestedKey]:
        """The keys read from the root, as far as they exist."""
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
    """The model of the wrapper, which may be sharded over ranks; ``None`` if it has none."""
    return getattr(transform.model, "model", None)
