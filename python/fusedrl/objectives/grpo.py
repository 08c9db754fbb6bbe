"""GRPO and its variants: torchrl's formulas above log-probs from hidden states."""

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


# The loss whose forward runs in this context: what else a subclass does with the distribution of
# all logits is torchrl's.
_computing: ContextVar[Any] = ContextVar("_computing", default=None)


class TokenDistribution(Distribution):
    """What torchrl's losses ask of a distribution: which tokens count, and their entropies."""

    def __init__(self, mask: Tensor, entropies: Tensor | None) -> None:
        super().__init__(mask.shape, validate_args=False)
        self.mask, self._entropies = mask, entropies

    def entropy(self) -> Any:
        """Entropies ``[B, T]``, 0 for tokens that do not count."""
        return self._entropies

    def sample_and_log_prob(self, sample_shape: Any = ()) -> tuple[None, Any]:
        """What torchrl estimates entropies from if one is not finite: it gets what they are."""
        return None, -self.entropy().expand(*sample_shape, *self.mask.shape)


class GRPOLoss(FusedLoss, _GRPOLoss):
    """The clipped loss of GRPO over the tokens of a conversation.

    A drop-in for :class:`torchrl.objectives.llm.GRPOLoss`: keys, outputs and metrics are torchrl's,
    and torchrl's own formulas compute the values. The log-probs and entropies that they need come
    from :func:`fusedrl.models.causal_log_probs`: from hidden states, in float32, for the tokens
    that the masking strategy counts.

    The following runs as in torchrl's class, and is logged once: an actor that is not a
    ``TransformersWrapper``, a subclass that reads the distribution of all logits, and tokens that
    the actor does not read.

    As in torchrl, add up ``loss_objective``, ``loss_entropy`` and the other fields that begin with
    ``loss_``, and call ``backward()`` on the sum.

    Args:
        actor_network: the policy, as in torchrl's class, and so are the arguments that are not
            named here. Those that are may also be set on an instance.
        max_tokens_per_forward: largest number of tokens in one forward pass of the model, see
            :func:`fusedrl.models.causal_log_probs`.
        share_prefixes: whether answers to one prompt have it computed once, see there.
        average_tokens_across_devices: for a model that several ranks share (DDP, FSDP), take each
            mean over the tokens (or samples) of all ranks, as one process with all the data would.
            Ranks whose gradients are averaged then count by their tokens: the loss of a rank is
            multiplied by its part of all tokens and by the number of ranks. ``False``, as in
            torchrl's class, takes the mean over each rank's own.

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

    @not_compiled  # compiling around the kernels gains nothing; the model itself may be compiled
    def forward(self, tensordict: TensorDictBase) -> Any:
        """The losses and metrics of a batch, in the form of torchrl's class."""
        token = _computing.set(self)
        try:
            with self._together():
                return super().forward(tensordict)
        finally:
            _computing.reset(token)

    def _get_cur_log_prob(self, tensordict: TensorDictBase) -> Any:
        if _computing.get() is not self:
            return super()._get_cur_log_prob(tensordict)
        return self._fused(self._from_states, super()._get_cur_log_prob, tensordict)

    def _from_states(self, td: TensorDictBase) -> tuple[Tensor, TokenDistribution, bool]:
        """What ``_get_cur_log_prob`` returns: log-probs ``[B, T]`` and their distribution."""
        kind, names = type(self), vars(self)
        own = [
            n
            for n in READERS_OF_LOGITS
            if n in names or getattr(kind, n) is not getattr(GRPOLoss, n)
        ]
        if own:
            raise CannotFuse(f"it has {', '.join(own)} of its own")
        batch = read(self.actor_network, self.masking_strategy, self.tensor_keys.action, td)
        # Nothing predicts a first token: torchrl gives it logits of 0.
        uniform = batch.counted & (batch.attended.cumsum(1) == 1)
        log_of_classes = 0.0
        if bool(uniform.any()):
            if (classes := classes_of(self.actor_network.model)) is None:
                raise CannotFuse("it counts first tokens, and its model tells no number of classes")
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
            return mean * self._part(len(mask))
        ones = torch.ones_like(value)
        counted = self._reduce_loss(
            ones, tensordict, mask=expand_as_right(mask, value), reduction="sum"
        )
        return mean * self._part(int(counted))

    def _kl_to_ref(self, tensordict: TensorDictBase, *args: Any, **kwargs: Any) -> Any:
        loss, kl = super()._kl_to_ref(tensordict, *args, **kwargs)
        if self.average_tokens_across_devices:
            loss = loss * self._part(*kwargs["mask"].shape)  # its mean has places of padding too
        return loss, kl

    def _part(self, count: int, width: int = 1) -> float:
        """What a mean over ``count`` rows of a width counts where torch averages over the ranks."""
        with self._together() as step:
            ranks, total = step.total(1, count)
            total *= step.largest(width)[0]  # one process would pad all rows to the longest
        return count * width * ranks / max(total, 1)


class CISPOLoss(GRPOLoss, _CISPOLoss):
    """The loss of CISPO, which clips the ratio alone; see :class:`fusedrl.GRPOLoss`.

    A drop-in for :class:`torchrl.objectives.llm.CISPOLoss`.

    Example:
        >>> from fusedrl import CISPOLoss, GRPOLoss
        >>> isinstance(CISPOLoss(clip_epsilon=(0.9, 4.0)), GRPOLoss)  # an actor may be set later
        True
    """


class DAPO(GRPOLoss, _DAPO):
    """The loss of DAPO, with different bounds up and down; see :class:`fusedrl.GRPOLoss`.

    A drop-in for :class:`torchrl.objectives.llm.DAPO`.

    Example:
        >>> from fusedrl import DAPO
        >>> loss = DAPO(clip_epsilon=(0.2, 0.28))
        >>> loss.clip_epsilon_high = 0.3  # bounds may be scheduled
        >>> loss.clip_epsilon_high
        tensor(0.3000)
    """
