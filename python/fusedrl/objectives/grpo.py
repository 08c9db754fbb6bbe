"""GRPO and its variants: torchrl's formulas on log-probs from hidden states."""

from __future__ import annotations

import inspect
import math
from contextvars import ContextVar
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import expand_as_right
from torch import Tensor
from torch.distributions import Distribution
from torchrl.objectives.llm import DAPO as _DAPO
from torchrl.objectives.llm import CISPOLoss as _CISPOLoss
from torchrl.objectives.llm import GRPOLoss as _GRPOLoss

from fusedrl.compat.torchrl import READERS_OF_LOGITS
from fusedrl.models.split import classes_of
from fusedrl.objectives.fused import CannotFuse, FusedLoss, not_compiled
from fusedrl.objectives.tokens import read

_KNOWN = {"max_tokens_per_forward", "share_prefixes"} | {
    name
    for name, parameter in inspect.signature(_GRPOLoss.__init__).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
}


# The loss whose forward is running. Outside of it, a subclass that asks for the distribution gets
# torchrl's, of full logits.
_computing: ContextVar[Any] = ContextVar("_computing", default=None)


class TokenDistribution(Distribution):
    """The parts of a distribution that torchrl's losses use: the mask and the entropies."""

    def __init__(self, mask: Tensor, entropies: Tensor | None) -> None:
        super().__init__(mask.shape, validate_args=False)
        self.mask, self._entropies = mask, entropies

    def entropy(self) -> Any:
        """Entropies ``[B, T]``, 0 for tokens that are not counted."""
        return self._entropies

    def sample_and_log_prob(self, sample_shape: Any = ()) -> tuple[None, Any]:
        """Called by torchrl to estimate entropies that are not finite; gives the exact ones."""
        return None, -self.entropy().expand(*sample_shape, *self.mask.shape)


class GRPOLoss(FusedLoss, _GRPOLoss):
    """The clipped loss of GRPO over the tokens of a conversation.

    A drop-in for :class:`torchrl.objectives.llm.GRPOLoss`: keys, outputs and metrics are torchrl's,
    and torchrl's formulas compute the values. Log-probs and entropies come from
    :func:`fusedrl.models.causal_log_probs`: from hidden states, in float32, only for the tokens
    that the masking strategy counts.

    The loss falls back to torchrl's implementation, and logs this once, for an actor that is not a
    ``TransformersWrapper``, a subclass that reads the distribution of full logits, and tokens that
    the actor does not read.

    As in torchrl, call ``backward()`` on the sum of ``loss_objective``, ``loss_entropy`` and all
    other fields that begin with ``loss_``.

    Args:
        actor_network: the policy. This and all arguments that are not listed are as in torchrl's
            class; the others may also be set on an instance.
        max_tokens_per_forward: largest number of tokens in one forward pass of the model, see
            :func:`fusedrl.models.causal_log_probs`.
        share_prefixes: whether a prompt with several completions is computed once.
        average_tokens_across_devices: for a model that several ranks share (DDP, FSDP), take each
            mean over the tokens (or samples) of all ranks, as one process with all the data would:
            the loss of a rank is multiplied by its share of the tokens and the number of ranks, as
            gradients are averaged over ranks. ``False``, as in torchrl's class, takes the mean over
            the tokens of each rank.

    Raises:
        TypeError: an unknown argument, which torchrl's class ignores.
        ValueError: ``average_tokens_across_devices`` for a loss that takes no mean.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.modules.llm import TransformersWrapper
        >>> from fusedrl import GRPOLoss
        >>> from fusedrl.demo.models import make_model, make_tokenizer  # tiny, not trained
        >>> tokenizer = make_tokenizer(["2 + 2? It is 4."])
        >>> model = make_model(len(tokenizer))
        >>> actor = TransformersWrapper(model, tokenizer=tokenizer, input_mode="tokens",
        ...     generate=False, return_log_probs=True, pad_output=True)
        >>> tokens = torch.randint(3, 99, (2, 9))
        >>> answer = torch.arange(9).expand(2, 9) > 5
        >>> data = TensorDict(
        ...     tokens=TensorDict(full=tokens, prompt=tokens[:, :6]),
        ...     masks=TensorDict(all_attention_mask=torch.ones(2, 9, dtype=torch.bool)),
        ...     log_probs=TensorDict(full=torch.where(answer, -5.0, torch.nan)),
        ...     advantage=torch.tensor([1.0, -1.0]).view(2, 1, 1),
        ...     batch_size=2,
        ... )
        >>> losses = GRPOLoss(actor, entropy_coeff=0.001)(data)
        >>> (losses.loss_objective + losses.loss_entropy).backward()
        >>> model.lm_head.weight.grad.shape == model.lm_head.weight.shape
        True
    """

    average_tokens_across_devices: bool = False

    def __init__(
        self,
        actor_network: Any = None,
        *,
        average_tokens_across_devices: bool = False,
        **others: Any,
    ) -> None:
        if unknown := sorted(others.keys() - _KNOWN):
            raise TypeError(
                f"{unknown[0]}: expected a known argument, got an unknown one; leave it out"
            )
        super().__init__(actor_network, **others)
        self.average_tokens_across_devices = average_tokens_across_devices

    @not_compiled  # compiling around the kernels is no faster; the model may be compiled
    def forward(self, tensordict: TensorDictBase) -> Any:
        """The losses and metrics of a batch, in the form of torchrl's class."""
        token = _computing.set(self)
        try:
            with self._collective_call():
                return super().forward(tensordict)
        finally:
            _computing.reset(token)

    def _get_cur_log_prob(self, tensordict: TensorDictBase) -> Any:
        if _computing.get() is not self:
            return super()._get_cur_log_prob(tensordict)
        return self._fused(self._from_states, super()._get_cur_log_prob, tensordict)

    def _from_states(self, td: TensorDictBase) -> tuple[Tensor, TokenDistribution, bool]:
        """The result of ``_get_cur_log_prob``: log-probs ``[B, T]`` and their distribution."""
        kind, names = type(self), vars(self)
        overridden = [
            n
            for n in READERS_OF_LOGITS
            if n in names or getattr(kind, n) is not getattr(GRPOLoss, n)
        ]
        if overridden:
            raise CannotFuse(f"it overrides {', '.join(overridden)}")
        batch = read(self.actor_network, self.masking_strategy, self.tensor_keys.action, td)
        # No token predicts the first one; torchrl scores it with logits of 0.
        uniform = batch.counted & (batch.attended.cumsum(1) == 1)
        log_of_classes = 0.0
        if bool(uniform.any()):
            if (classes := classes_of(self.actor_network.model)) is None:
                raise CannotFuse("it counts first tokens, and the vocabulary size is unknown")
            log_of_classes = math.log(classes)
        tokens, counted = batch.packed(batch.ids), batch.packed(batch.counted)
        columns = self._scored(tokens, batch.lengths, counted, entropy=self.entropy_bonus)
        log_probs = torch.where(uniform, -log_of_classes, batch.padded(columns.log_probs))
        entropies = columns.entropy
        if entropies is not None:
            entropies = torch.where(uniform, log_of_classes, batch.padded(entropies))
        return log_probs, TokenDistribution(batch.counted, entropies), False

    def _aggregate_loss_value(
        self, value: Tensor, mask: Tensor, tensordict: TensorDictBase | None = None
    ) -> Tensor:
        mean = super()._aggregate_loss_value(value, mask, tensordict)
        if not self.average_tokens_across_devices:
            return mean
        if "none" in (self.aggregation, self.reduction):
            raise ValueError(
                "average_tokens_across_devices: expected a loss with a mean over tokens, got "
                "aggregation or reduction 'none'; set it to False"
            )
        if self.aggregation == "prompt_mean":
            return mean * self._rank_weight(len(mask))
        ones = torch.ones_like(value)
        counted = self._reduce_loss(
            ones, tensordict, mask=expand_as_right(mask, value), reduction="sum"
        )
        return mean * self._rank_weight(int(counted))

    def _kl_to_ref(self, tensordict: TensorDictBase, *args: Any, **kwargs: Any) -> Any:
        loss, kl = super()._kl_to_ref(tensordict, *args, **kwargs)
        if self.average_tokens_across_devices:
            loss = loss * self._rank_weight(*kwargs["mask"].shape)  # a mean that includes padding
        return loss, kl

    def _rank_weight(self, count: int, width: int = 1) -> float:
        """The factor of this rank's mean over ``count * width`` values in the mean over ranks."""
        with self._collective_call() as step:
            ranks, total = step.total(1, count)
            total *= step.largest(width)[0]  # one process would pad all rows to the longest
        return count * width * ranks / max(total, 1)


class CISPOLoss(GRPOLoss, _CISPOLoss):
    """The loss of CISPO, which clips only the ratio; see :class:`fusedrl.GRPOLoss`.

    A drop-in for :class:`torchrl.objectives.llm.CISPOLoss`.

    Example:
        >>> from fusedrl import CISPOLoss, GRPOLoss
        >>> isinstance(CISPOLoss(clip_epsilon=(0.9, 4.0)), GRPOLoss)  # an actor may be set later
        True
    """


class DAPO(GRPOLoss, _DAPO):
    """The loss of DAPO, with separate lower and upper bounds; see :class:`fusedrl.GRPOLoss`.

    A drop-in for :class:`torchrl.objectives.llm.DAPO`.

    Example:
        >>> from fusedrl import DAPO
        >>> loss = DAPO(clip_epsilon=(0.2, 0.28))
        >>> loss.clip_epsilon_high = 0.3  # bounds may be scheduled
        >>> loss.clip_epsilon_high
        tensor(0.3000)
    """
