"""Supervised fine-tuning and distillation, computed from kept tokens without all logits."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import nn
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import DistillationLoss as _DistillationLoss
from torchrl.objectives.llm import DistillationLossOutput
from torchrl.objectives.llm import SFTLoss as _SFTLoss

from fusedrl.compat.torch import children_of, replace_children
from fusedrl.models import causal_log_probs
from fusedrl.models.divergences import Classes, causal_divergences
from fusedrl.models.ranks import Apart, together
from fusedrl.objectives.tokens import CannotFuse, check_readable, log_not_fused
from fusedrl.transforms.columns import column_rows
from fusedrl.transforms.retrieve_log_prob import TokenBatch, marks, masks_over, read, reading_of

_ASSISTANT, _ATTENTION = ("masks", "all_assistant_mask"), ("masks", "all_attention_mask")

_not_compiled: Any = torch.compiler.disable  # its types hide methods


class SFTLoss(_SFTLoss):
    """The loss of supervised fine-tuning over the assistant's tokens of a conversation.

    A drop-in for :class:`torchrl.objectives.llm.SFTLoss`: keys and outputs are torchrl's, and
    torchrl's own formulas compute the values. The log-probs that they need are computed from hidden
    states, in float32, for the tokens that count. An actor that does not read a history, or is no
    ``TransformersWrapper``, runs as in torchrl's class, and that is logged once.

    Args:
        actor_network: the policy, as in torchrl's class, and so are the arguments that are not
            named here. Those that are may also be set on an instance.
        max_tokens_per_forward: largest number of tokens in one forward pass of the model, see
            :func:`fusedrl.models.causal_log_probs`.
        share_prefixes: whether what conversations begin with in common is computed once, see there.

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

    # Of a loss that was pickled as torchrl's class.
    max_tokens_per_forward: int | None = None
    share_prefixes: bool = True

    def __init__(
        self,
        *args: Any,
        max_tokens_per_forward: int | None = None,
        share_prefixes: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.max_tokens_per_forward = max_tokens_per_forward
        self.share_prefixes = share_prefixes

    @_not_compiled
    def forward(self, tensordict: TensorDictBase) -> Any:
        """The losses of a batch, in the form of torchrl's class."""
        return _computed(self, _SFTLoss.forward, tensordict, True)


class DistillationLoss(_DistillationLoss):
    """A divergence between a student and a teacher, over the tokens of a conversation.

    A drop-in for :class:`torchrl.objectives.llm.DistillationLoss`, as :class:`fusedrl.SFTLoss` is
    for its class. By default it is torchrl's estimate from the log-prob that both give each token.
    Two further losses see the rest of the vocabulary. Their gradients are those of the KL in
    ``kl_direction`` at each token, while the estimate's are of the forward KL in either direction.

    Args:
        actor_network: the student, as in torchrl's class, and so are the arguments after it.
        loss_function: ``"k3"``, torchrl's; ``"exact_kl"``, the KL over the whole vocabulary from
            the hidden states of student and teacher (:func:`fusedrl.linear_exact_kl`); or
            ``"top_k_kl"``, the KL to a teacher that is known by some classes of each token and
            has the rest in a bucket (:func:`fusedrl.linear_top_k_kl`).
        teacher_network: for ``"exact_kl"``, a ``TransformersWrapper`` that makes the same tokens.
            It gets no gradient and is no child of the loss: neither its parameters nor its state,
            and it stays on its device.
        max_tokens_per_forward, share_prefixes: see :class:`fusedrl.SFTLoss`.

    For ``"top_k_kl"`` the data has the classes under the key ``teacher_ids`` and their log-probs
    under the key ``teacher_log_prob``, both ``[T, k]`` for each conversation of ``T`` tokens, the
    first of which is not read. A class below 0 is none.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict, set_list_to_stack
        >>> from torchrl.data.llm import History
        >>> from torchrl.modules.llm import TransformersWrapper
        >>> from torchrl.modules.llm.policies import ChatHistory
        >>> from fusedrl import DistillationLoss
        >>> from fusedrl.demo.models import make_model, make_tokenizer  # tiny, not trained
        >>> tokenizer = make_tokenizer(["2 + 2? It is 4."])
        >>> student, teacher = (
        ...     TransformersWrapper(make_model(len(tokenizer)), tokenizer=tokenizer,
        ...         generate=False, return_log_probs=True)
        ...     for _ in range(2)
        ... )
        >>> chat = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
        >>> with set_list_to_stack(True):
        ...     history = ChatHistory(full=History.from_chats([chat]))
        ...     data = TensorDict(history=history, batch_size=(1,)).to_lazystack(0)
        >>> loss = DistillationLoss(student, loss_function="exact_kl", teacher_network=teacher)
        >>> kl = loss(data).loss_distill
        >>> kl.backward()
        >>> bool(kl > 0)
        True
    """

    tensor_keys: Any

    @dataclass
    class _AcceptedKeys(_DistillationLoss.default_keys):
        teacher_ids: NestedKey = ("next", "teacher_ids", "full")

    default_keys = _AcceptedKeys
    # Of a loss that was pickled as torchrl's class.
    max_tokens_per_forward: int | None = None
    share_prefixes: bool = True

    def __init__(
        self,
        *args: Any,
        loss_function: Literal["k3", "exact_kl", "top_k_kl"] = "k3",
        teacher_network: TransformersWrapper | None = None,
        max_tokens_per_forward: int | None = None,
        share_prefixes: bool = True,
        **kwargs: Any,
    ) -> None:
        if loss_function not in ("k3", "exact_kl", "top_k_kl"):
            raise ValueError(
                f"loss_function: expected 'k3', 'exact_kl' or 'top_k_kl', got {loss_function!r}; "
                "'k3' is torchrl's"
            )
        if (teacher_network is not None) != (loss_function == "exact_kl"):
            raise ValueError(
                f"teacher_network: expected one for 'exact_kl' alone, got {teacher_network!r} for "
                f"{loss_function!r}; the teacher of the others is in the data"
            )
        super().__init__(*args, **kwargs)
        self.max_tokens_per_forward = max_tokens_per_forward
        self.share_prefixes = share_prefixes
        self.loss_function = loss_function
        self._teacher = (teacher_network,)  # a tuple, so that it is no child
        keys = self.tensor_keys
        read_keys: Any = {
            "k3": [keys.history, keys.teacher_log_prob],
            "exact_kl": [keys.history],
            "top_k_kl": [keys.history, keys.teacher_log_prob, keys.teacher_ids],
        }
        self.in_keys = read_keys[loss_function]

    @property
    def teacher_network(self) -> TransformersWrapper | None:
        """The teacher of ``"exact_kl"``."""
        return self._teacher[0]

    @_not_compiled
    def forward(self, tensordict: TensorDictBase) -> Any:
        """The loss of a batch, in the form of torchrl's class."""
        if self.loss_function == "k3":
            return _computed(self, _DistillationLoss.forward, tensordict, self.assistant_only)
        models = (getattr(x, "model", None) for x in (self.actor_network, self.teacher_network))
        with together("DistillationLoss", *models):
            return self._divergence(tensordict)

    def _divergence(self, td: TensorDictBase) -> DistillationLossOutput:
        try:
            batch = _read(self, td, self.assistant_only)
            teacher = self._teacher_of(td, batch)
        except CannotFuse as why:
            raise ValueError(
                f"actor_network: expected one whose hidden states can be had, but {why}; use "
                "loss_function='k3' with it"
            ) from None
        mask = torch.ones(len(batch.tokens), dtype=torch.bool) if batch.mask is None else batch.mask
        counts = torch.stack([row.sum() for row in batch.rows(mask)])
        if not bool(counts.all()):
            raise ValueError(
                "tensordict: expected tokens to distill in every conversation, got "
                f"{counts.tolist()}; see its assistant masks"
            )
        values = causal_divergences(
            self.actor_network.model,
            teacher,
            batch.tokens,
            batch.lengths,
            mask,
            direction=self.kl_direction,
            max_tokens_per_forward=self.max_tokens_per_forward,
            share_prefixes=self.share_prefixes,
        )
        each = torch.stack([row.sum() for row in batch.rows(values)])
        if self.normalize_by_seq_length:
            each = each / counts.to(each.device)
        loss = each if self.reduction == "none" else getattr(each, self.reduction)()
        return DistillationLossOutput(loss_distill=loss, kl_to_teacher=each.detach().mean())

    def _teacher_of(self, td: TensorDictBase, batch: TokenBatch) -> Any:
        """The model that teaches, or the classes that the data has of it."""
        teacher = self.teacher_network
        if teacher is not None:
            check_readable(teacher, td)
            theirs = read(reading_of(teacher, False, None, None), td).tokens
            if not torch.equal(theirs, batch.tokens):
                raise ValueError(
                    f"teacher_network: expected a teacher that reads the student's "
                    f"{len(batch.tokens)} tokens, got {len(theirs)} that differ; give both one "
                    "tokenizer and template"
                )
            return teacher.model
        found = []
        for key in (self.tensor_keys.teacher_ids, self.tensor_keys.teacher_log_prob):
            rows: Any = td.get(key, None, as_list=True)  # pyright: ignore[reportCallIssue]
            sizes = [] if rows is None else [tuple(row.shape) for row in rows]
            k = sizes[0][-1] if sizes else 0
            if sizes != [(length, k) for length in batch.lengths]:
                raise ValueError(
                    f"{key}: expected [T, k] for each conversation, whose tokens are "
                    f"{batch.lengths}, got {sizes}; name another key with set_keys()"
                )
            assert rows is not None
            found.append(torch.cat(list(rows)))
        return Classes(*found)


def _computed(
    loss: Any, formulas: Callable[..., Any], tensordict: TensorDictBase, assistant_only: bool
) -> Any:
    """What torchrl's formulas make of a loss whose actor computes no more than they read.

    The actor runs as it is where it cannot be replaced, on all ranks that share its model, and for
    data that torchrl refuses, so that its own error is raised.
    """
    with together(type(loss).__name__, getattr(loss.actor_network, "model", None)) as step:
        why: object = None
        try:
            batch = _read(loss, tensordict, assistant_only)
        except CannotFuse as error:
            why = error
        except (ValueError, TypeError):
            if not step.alone:  # torchrl would say so where others wait
                raise
        else:
            twin = copy(loss)
            scorer = _Scorer(loss, batch)
            replace_children(twin, {**children_of(loss), "actor_network": scorer})
            try:
                return formulas(twin, tensordict)
            except Apart:
                why = "torchrl computes that of another rank"
        if isinstance(why, CannotFuse):
            step.agree(apart=True)
        if why is not None:
            log_not_fused(loss, why)
        with step.collective():
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
        ).log_probs
        rows = batch.rows(values)
        if self.actor.pad_output:
            rows = list(batch.padded(values, "left"))
        column = torch.nested.as_nested_tensor(rows, layout=torch.strided)
        return td.empty().to_lazystack(0).set(self._key, column)
