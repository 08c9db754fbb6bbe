"""Losses for supervised fine-tuning and distillation, without materialising all logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import nn
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import DistillationLoss as _DistillationLoss
from torchrl.objectives.llm import DistillationLossOutput
from torchrl.objectives.llm import SFTLoss as _SFTLoss

from fusedrl.models.divergences import Classes, causal_divergences
from fusedrl.models.ranks import together
from fusedrl.objectives.fused import CannotFuse, FusedLoss, fits, not_compiled, with_child
from fusedrl.transforms.columns import column_rows
from fusedrl.transforms.wrapper_tokens import TokenBatch, marks, masks_over, read, reading_of

_ASSISTANT, _ATTENTION = ("masks", "all_assistant_mask"), ("masks", "all_attention_mask")


class _HistoryLoss(FusedLoss):
    """A loss over the tokens of a history, whose formulas read only the actor's log-probs."""

    tokenizer: Any
    tokenizer_kwargs: Any
    tensor_keys: Any

    def _computed(
        self, formulas: Callable[..., Any], td: TensorDictBase, assistant_only: bool
    ) -> Any:
        """The result of torchrl's formulas, with an actor that scores only the counted tokens."""
        actor = self.actor_network

        def log_probs(_: TensorDictBase) -> TensorDictBase:
            with torch.device("cpu"):  # torchrl sets the actor's device as the default
                batch = self._read(td, assistant_only)
            values = self._scored(batch.tokens, batch.lengths, batch.mask).log_probs
            rows = list(batch.padded(values, "left")) if actor.pad_output else batch.rows(values)
            column = torch.nested.as_nested_tensor(rows, layout=torch.strided)
            return td.empty().to_lazystack(0).set(self.tensor_keys.log_probs, column)

        stand_in: Any = nn.Module()
        stand_in.actor = actor  # torchrl computes on the device of its parameters
        stand_in.forward = partial(self._fused, log_probs, actor)
        with self._collective_call():
            return formulas(with_child(self, "actor_network", stand_in), td)

    def _read(self, td: TensorDictBase, assistant_only: bool) -> TokenBatch:
        """The tokens that the actor reads, and the mask of those that the loss counts."""
        actor = self.actor_network
        if actor.input_mode != "history":
            raise CannotFuse(f"its actor reads {actor.input_mode}, not a history")
        batch = read(reading_of(actor, False, None, None), td.select(self.tensor_keys.history))
        if not assistant_only:
            return batch
        rows = batch.rows(batch.tokens)
        masks, attended = (td.get(key, None, as_list=True) for key in (_ASSISTANT, _ATTENTION))  # pyright: ignore[reportCallIssue]
        if masks is None:
            history = td.get(self.tensor_keys.history)
            marked = marks(history, self.tokenizer, {}, self.tokenizer_kwargs)
            masks = masks_over(rows, marked)
        else:
            masks = [mask.bool() for mask in column_rows(masks)]
            if attended is not None:
                pairs = zip(masks, column_rows(attended), strict=True)
                masks = [mask & shown.bool() for mask, shown in pairs]
        if [mask.shape for mask in masks] != [row.shape for row in rows]:
            raise CannotFuse("its masks do not have the shape of the tokens that the actor reads")
        return TokenBatch(batch.reading, batch.tokens, batch.lengths, torch.cat(masks).cpu())


class SFTLoss(_HistoryLoss, _SFTLoss):
    """The loss of supervised fine-tuning over the assistant's tokens of a conversation.

    A drop-in for :class:`torchrl.objectives.llm.SFTLoss`: keys and outputs are torchrl's, and
    torchrl's formulas compute the values. Log-probs are computed from hidden states, in float32,
    only for the counted tokens. For an actor that does not read a history, or is not a
    ``TransformersWrapper``, the loss falls back to torchrl's implementation, and logs this once.

    Args:
        actor_network: the policy. This and all arguments that are not listed are as in torchrl's
            class; the others may also be set on an instance.
        max_tokens_per_forward: largest number of tokens in one forward pass of the model, see
            :func:`fusedrl.models.causal_log_probs`.
        share_prefixes: whether common prefixes of conversations are computed once.

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

    @not_compiled
    def forward(self, tensordict: TensorDictBase) -> Any:
        """The losses of a batch, in the form of torchrl's class."""
        return self._computed(_SFTLoss.forward, tensordict, True)


class DistillationLoss(_HistoryLoss, _DistillationLoss):
    """A divergence between a student and a teacher, over the tokens of a conversation.

    A drop-in for :class:`torchrl.objectives.llm.DistillationLoss`, like :class:`fusedrl.SFTLoss`.
    By default it is torchrl's k3 estimate from the log-probs of each token. Two more losses use the
    whole vocabulary: they have the gradient of the KL in ``kl_direction`` at each token, while the
    estimate has that of the forward KL for either direction.

    Args:
        actor_network: the student. This and all arguments that are not listed are as in torchrl's
            class.
        loss_function: ``"k3"``, torchrl's; ``"exact_kl"``, the KL over the whole vocabulary from
            the hidden states of student and teacher (:func:`fusedrl.linear_exact_kl`); or
            ``"top_k_kl"``, the KL to a teacher given by a few classes of each token, with the
            remaining probability as one bucket (:func:`fusedrl.linear_top_k_kl`).
        teacher_network: for ``"exact_kl"``, a ``TransformersWrapper`` that reads the same tokens.
            It gets no gradient, stays on its device and is not a submodule of the loss.
        classes: for ``"exact_kl"``, use only this many classes, the first ones, as in
            :func:`fusedrl.exact_kl`: ``len(tokenizer)`` if the heads differ only in padding.
            ``None`` uses all and requires equal numbers of them.
        max_tokens_per_forward, share_prefixes: see :class:`fusedrl.SFTLoss`.

    For ``"top_k_kl"`` the data has the classes under the key ``teacher_ids`` and their log-probs
    under the key ``teacher_log_prob``, both ``[T, k]`` for each conversation of ``T`` tokens; the
    first token's are not read. Negative classes are ignored.

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

    @dataclass
    class _AcceptedKeys(_DistillationLoss.default_keys):
        teacher_ids: NestedKey = ("next", "teacher_ids", "full")

    default_keys = _AcceptedKeys

    def __init__(
        self,
        *args: Any,
        loss_function: Literal["k3", "exact_kl", "top_k_kl"] = "k3",
        teacher_network: TransformersWrapper | None = None,
        classes: int | None = None,
        **kwargs: Any,
    ) -> None:
        if loss_function not in ("k3", "exact_kl", "top_k_kl"):
            raise ValueError(
                f"loss_function: expected 'k3', 'exact_kl' or 'top_k_kl', got {loss_function!r}; "
                "leave it out for 'k3', torchrl's loss"
            )
        if (teacher_network is not None) != (loss_function == "exact_kl"):
            raise ValueError(
                f"teacher_network: expected one only for 'exact_kl', got {teacher_network!r} for "
                f"{loss_function!r}; other losses read the teacher's log-probs from the data"
            )
        if classes is not None and loss_function != "exact_kl":
            raise ValueError(
                f"classes: expected None except for 'exact_kl', got {classes!r} for "
                f"{loss_function!r}; leave it out, as the data has the teacher's log-probs"
            )
        super().__init__(*args, **kwargs)
        self.loss_function = loss_function
        self._teacher = (teacher_network,)  # in a tuple, so that it is not a submodule
        self.classes = classes
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

    @not_compiled
    def forward(self, tensordict: TensorDictBase) -> Any:
        """The loss of a batch, in the form of torchrl's class."""
        if self.loss_function == "k3":
            return self._computed(_DistillationLoss.forward, tensordict, self.assistant_only)
        models = (getattr(x, "model", None) for x in (self.actor_network, self.teacher_network))
        with together("DistillationLoss", *models):
            return self._divergence(tensordict)

    def _divergence(self, td: TensorDictBase) -> DistillationLossOutput:
        try:
            for actor in filter(None, (self.actor_network, self.teacher_network)):
                if (why := fits(actor, td)) is not None:
                    raise CannotFuse(why)
            batch = self._read(td, self.assistant_only)
        except CannotFuse as why:
            raise ValueError(
                f"actor_network: expected one that can be scored from hidden states, but {why}; "
                "use loss_function='k3' with it"
            ) from None
        teacher = self._teacher_of(td, batch)
        mask = torch.ones(len(batch.tokens), dtype=torch.bool) if batch.mask is None else batch.mask
        counts = torch.stack([row.sum() for row in batch.rows(mask)])
        if not bool(counts.all()):
            raise ValueError(
                "tensordict: expected tokens to distill in every conversation, got counts "
                f"{counts.tolist()}; check its assistant masks"
            )
        counted = batch.tokens[mask]
        if self.classes is not None and bool((counted >= self.classes).any()):
            raise ValueError(
                f"classes: expected more than {int(counted.max())}, which is a token to distill, "
                f"got {self.classes}; pass len(tokenizer), which includes added tokens"
            )
        values = causal_divergences(
            self.actor_network.model,
            teacher,
            batch.tokens,
            batch.lengths,
            mask,
            direction=self.kl_direction,
            classes=self.classes,
            max_tokens_per_forward=self.max_tokens_per_forward,
            share_prefixes=self.share_prefixes,
        )
        each = torch.stack([row.sum() for row in batch.rows(values)])
        if self.normalize_by_seq_length:
            each = each / counts.to(each.device)
        loss = each if self.reduction == "none" else getattr(each, self.reduction)()
        return DistillationLossOutput(loss_distill=loss, kl_to_teacher=each.detach().mean())

    def _teacher_of(self, td: TensorDictBase, batch: TokenBatch) -> Any:
        """The teacher model, or the classes and log-probs in the data."""
        teacher = self.teacher_network
        if teacher is not None:
            tokens = read(reading_of(teacher, False, None, None), td).tokens
            if not torch.equal(tokens, batch.tokens):
                raise ValueError(
                    f"teacher_network: expected a teacher that reads the student's "
                    f"{len(batch.tokens)} tokens, got {len(tokens)} that differ; use the same "
                    "tokenizer and template for both"
                )
            return teacher.model
        found = []
        for key in (self.tensor_keys.teacher_ids, self.tensor_keys.teacher_log_prob):
            rows: Any = td.get(key, None, as_list=True)  # pyright: ignore[reportCallIssue]
            sizes = [] if rows is None else [tuple(row.shape) for row in rows]
            k = sizes[0][-1] if sizes else 0
            if sizes != [(length, k) for length in batch.lengths]:
                raise ValueError(
                    f"{key}: expected [T, k] for each conversation, with lengths T of "
                    f"{batch.lengths}, got {sizes}; name another key with set_keys()"
                )
            assert rows is not None
            found.append(torch.cat(list(rows)))
        return Classes(*found)
