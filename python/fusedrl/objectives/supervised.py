"""Supervised fine-tuning and distillation, computed from kept tokens without all logits."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.objectives.llm import DistillationLoss as _DistillationLoss
from torchrl.objectives.llm import SFTLoss as _SFTLoss

from fusedrl.compat.torch import children_of, replace_children
from fusedrl.models import causal_log_probs
from fusedrl.models.ranks import Apart, together
from fusedrl.objectives.tokens import CannotFuse, check_readable, log_not_fused
from fusedrl.transforms.columns import column_rows
from fusedrl.transforms.reading import TokenBatch, marks, masks_over, read, reading_of

_ASSISTANT, _ATTENTION = ("masks", "all_assistant_mask"), ("masks", "all_attention_mask")

_not_compiled: Any = torch.compiler.disable  # its types hide methods


class SFTLoss(_SFTLoss):
    """The loss of supervised fine-tuning over the assistant's tokens of a conversation.

    A drop-in for :class:`torchrl.objectives.llm.SFTLoss`: arguments, keys and outputs are
    torchrl's, and torchrl's own formulas compute the values. The log-probs that they need are
    computed from hidden states, in float32, for the tokens that count. An actor that does not read
    a history, or is no ``TransformersWrapper``, runs as in torchrl's class, and that is logged
    once.

    Attributes:
        max_tokens_per_forward: largest number of tokens in one forward pass of the model, see
            :func:`fusedrl.models.causal_log_probs`. It may be set on an instance.
        share_prefixes: whether what conversations begin with in common is computed once, see there.
            It may be set on an instance.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict, set_list_to_stack
        >>> from torchrl.data.llm import History
        >>> from torchrl.modules.llm import TransformersWrapper
        >>> from torchrl.modules.llm.policies import ChatHistory
        >>> from fusedrl import SFTLoss
        >>> from fusedrl.demo.models import make_model, make_tokenizer  # tiny, not trained
        >>> tokenizer = make_tokenizer(["2 + 2? It is 4."])
        >>> actor = TransformersWrapper(make_model(len(tokenizer)), tokenizer=tokenizer,
        ...     generate=False, return_log_probs=True)
        >>> chats = [
        ...     [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": answer}]
        ...     for answer in ("4", "It is 4.")
        ... ]
        >>> with set_list_to_stack(True):
        ...     history = ChatHistory(full=History.from_chats(chats))
        ...     data = TensorDict(history=history, batch_size=(2,)).to_lazystack(0)
        >>> loss = SFTLoss(actor)(data).loss_sft
        >>> loss.backward()
        >>> loss.shape
        torch.Size([])
    """

    max_tokens_per_forward: int | None = None
    share_prefixes: bool = True

    @_not_compiled
    def forward(self, tensordict: TensorDictBase) -> Any:
        """The losses of a batch, in the form of torchrl's class."""
        return _computed(self, _SFTLoss.forward, tensordict, True)


class DistillationLoss(_DistillationLoss):
    """The k3 estimate of the KL between a student and a teacher whose log-probs the data has.

    A drop-in for :class:`torchrl.objectives.llm.DistillationLoss`, as :class:`fusedrl.SFTLoss` is
    for its class. For a KL over the whole vocabulary instead of an estimate, see
    :func:`fusedrl.linear_exact_kl` and :func:`fusedrl.linear_top_k_kl`.

    Example:
        >>> from fusedrl import DistillationLoss
        >>> from torchrl.objectives.llm import DistillationLoss as Theirs
        >>> issubclass(DistillationLoss, Theirs)
        True
    """

    max_tokens_per_forward: int | None = None
    share_prefixes: bool = True

    @_not_compiled
    def forward(self, tensordict: TensorDictBase) -> Any:
        """The loss of a batch, in the form of torchrl's class."""
        return _computed(self, _DistillationLoss.forward, tensordict, self.assistant_only)


def _computed(
    loss: Any, formulas: Callable[..., Any], tensordict: TensorDictBase, assistant_only: bool
) -> Any:
    """What torchrl's formulas make of a loss whose actor computes no more than they read.

    The actor runs as it is where it cannot be replaced, on all ranks that share its model, and for
    data that torchrl refuses, so that its own error is raised.
    """
    with together(getattr(loss.actor_network, "model", None)) as step:
        why: object = None
        try:
            batch = _read(loss, tensordict, assistant_only)
        except CannotFuse as error:
            why = error
        except (ValueError, TypeError):
            pass
        else:
            twin = copy(loss)
            scorer = _Scorer(loss, batch)
            replace_children(twin, {**children_of(loss), "actor_network": scorer})
            try:
                return formulas(twin, tensordict)
            except Apart:
                why = "torchrl computes that of another rank"
        if not isinstance(why, str):
            step.agree(apart=True)
        if why is not None:
            log_not_fused(loss, why)
        return formulas(loss, tensordict)


def _read(loss: Any, td: TensorDictBase, assistant_only: bool) -> TokenBatch:
    """The tokens that the actor reads, and which of them the loss counts."""
    actor = loss.actor_network
    check_readable(actor, td)
    if actor.input_mode != "history":
        raise CannotFuse(f"its actor reads {actor.input_mode}, not a history")
    batch = read(reading_of(actor, False, None, None), td.select(loss.tensor_keys.history))
    if not assistant_only:
        return batch
    rows = batch.rows(batch.tokens)
    masks, attended = (td.get(key, None, as_list=True) for key in (_ASSISTANT, _ATTENTION))  # pyright: ignore[reportCallIssue]
    if masks is None:
        history = td.get(loss.tensor_keys.history)
        marked = marks(history, loss.tokenizer, {}, loss.tokenizer_kwargs)
        masks = masks_over(rows, marked)
    else:
        masks = [mask.bool() for mask in column_rows(masks)]
        if attended is not None:
            pairs = zip(masks, column_rows(attended), strict=True)
            masks = [mask & shown.bool() for mask, shown in pairs]
    if [mask.shape for mask in masks] != [row.shape for row in rows]:
        raise CannotFuse("its masks are not over the tokens that the actor reads")
    return TokenBatch(batch.reading, batch.tokens, batch.lengths, torch.cat(masks).cpu())


class _Scorer(nn.Module):
    """Takes the place of an actor: the log-probs that a loss counts, and 0 for other tokens."""

    def __init__(self, loss: Any, batch: TokenBatch) -> None:
        super().__init__()
        self.actor = loss.actor_network  # a child, because the loss looks for its device
        self._batch, self._key = batch, loss.tensor_keys.log_probs
        self._options = {
            "max_tokens_per_forward": loss.max_tokens_per_forward,
            "share_prefixes": loss.share_prefixes,
            "model_kwargs": self.actor.generate_kwargs,
        }

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        batch = self._batch
        values = causal_log_probs(
            self.actor.model, batch.tokens, batch.lengths, batch.mask, **self._options
        )
        assert isinstance(values, Tensor)
        rows = batch.rows(values)
        if self.actor.pad_output:
            rows = list(batch.padded(values, "left"))
        column = torch.nested.as_nested_tensor(rows, layout=torch.strided)
        return td.empty().to_lazystack(0).set(self._key, column)
