"""Log-probs and entropies for torchrl's losses, computed from hidden states."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor, distributions

from fusedrl.compat.torch import in_forward_mode, is_transformed
from fusedrl.compat.torchrl import READERS_OF_LOGITS
from fusedrl.models import causal_log_probs
from fusedrl.models.as_forward import WithGradientOf
from fusedrl.models.policy_terms import causal_policy_terms
from fusedrl.models.ranks import Apart, Step
from fusedrl.models.split import classes_of
from fusedrl.objectives.loss_terms import LossTerms, loss_terms_of, overridden
from fusedrl.objectives.tokens import CannotFuse, LossBatch, check_readable, log_not_fused, read
from fusedrl.ops.linear_policy_loss.losses import PolicyBatch, TermWeights

# The outputs whose gradients come from the terms of linear_policy_loss, in the order of these.
_OUTPUTS = ("loss_objective", "loss_kl_to_ref", "loss_kl_to_inference", "loss_entropy")


class Scores(NamedTuple):
    """What a loss needs from the policy.

    Args:
        log_probs: those of the tokens, ``[B, T]``, with gradients if ``terms`` is ``None``.
        distribution: the mask and the entropy of each token, in the form of a distribution.
        terms: the terms of :func:`causal_policy_terms`, if gradients were computed together with
            the log-probs.
        counted: bool ``[B, T]``, the tokens that the loss takes its mean over.
    """

    log_probs: Tensor
    distribution: TokenDistribution
    terms: Tensor | None
    counted: Tensor

    def differentiable(self, output: Any) -> Any:
        """Give the output of torchrl's formulas the gradients of the terms."""
        if self.terms is not None and self.terms.requires_grad:
            for name, term in zip(_OUTPUTS, self.terms.unbind(), strict=True):
                value = getattr(output, name, None)  # a caller's output_type may have fewer
                if value is not None:
                    setattr(output, name, WithGradientOf.apply(value, term))
        return output


class TokenDistribution(distributions.Distribution):
    """What torchrl's losses ask of a distribution: a mask, and the entropy of each token."""

    def __init__(self, mask: Tensor, entropies: Tensor | None) -> None:
        super().__init__(mask.shape, validate_args=False)
        self.mask = mask
        self._entropies = entropies

    def entropy(self) -> Tensor:
        """Entropies ``[B, T]``, 0 for tokens that are not counted."""
        assert self._entropies is not None
        return self._entropies


def scores_of(loss: Any, base: type, tensordict: TensorDictBase, step: Step) -> Scores | None:
    """The scores of ``tensordict`` under the actor of ``loss``, which derives from ``base``.

    ``None`` if torchrl's own code has to compute the loss, or refuses the data. The reason for the
    former is logged once. The ranks that share the actor's model do the same.
    """
    try:
        return _scores(loss, base, tensordict, step)
    except CannotFuse as error:
        why = str(error)
        step.agree(apart=True)
    except Apart:
        why = "torchrl computes that of another rank"
    log_not_fused(loss, why)
    return None


def _scores(loss: Any, base: type, tensordict: TensorDictBase, step: Step) -> Scores | None:
    keys = loss.tensor_keys
    td = tensordict.copy()
    if keys.action not in td or td.get(keys.advantage, None, as_padded_tensor=True) is None:  # pyright: ignore[reportCallIssue]
        return None
    _check(loss, base, td)
    batch = read(loss.actor_network, loss.masking_strategy, keys.action, td)
    old: Any = td.get(
        keys.sample_log_prob,
        None,
        as_padded_tensor=True,  # pyright: ignore[reportCallIssue]
        padding_side="left",
        padding_value=0.0,
    )
    if old is None or old.shape != batch.ids.shape or old.requires_grad:
        if not step.alone:  # torchrl would say so behind its forward pass
            raise ValueError(
                f"{keys.sample_log_prob}: expected log-probs {list(batch.ids.shape)} without a "
                f"gradient, got {None if old is None else list(old.shape)}; give the policy's own"
            )
        return None
    mask = batch.counted & torch.isfinite(old.to(batch.counted.device))
    kept = (batch.counted if loss.entropy_bonus else mask) & ~batch.first
    if step.alone and not bool(kept.any()):
        return None
    unpredicted = batch.first & batch.counted
    # Nothing predicts these tokens, and torchrl puts logits of 0 there.
    uniform = math.log(_classes(loss.actor_network.model)) if bool(unpredicted.any()) else 0.0
    terms = loss_terms_of(loss, td, old.to(mask.device), mask)
    columns = _columns(loss, batch, kept, terms)
    # Other ranks do not wait for one that computes it once more.
    if step.alone and loss.entropy_bonus and not bool(columns.entropy.isfinite().all()):
        raise CannotFuse("the policy's logits have no finite entropy")
    log_probs, entropies = (batch.padded(x) for x in (columns.log_probs, columns.entropy))
    if uniform:
        log_probs = torch.where(unpredicted, -uniform, log_probs)
        entropies = torch.where(unpredicted, uniform, entropies)
    distribution = TokenDistribution(batch.counted, entropies)
    return Scores(log_probs, distribution, columns.values, mask)


def _check(loss: Any, base: type, td: TensorDictBase) -> None:
    """Raise ``CannotFuse`` for what only torchrl's own code computes."""
    actor = loss.actor_network
    changed = overridden(loss, base, READERS_OF_LOGITS)
    if changed:
        raise CannotFuse(f"it has {', '.join(changed)} of its own")
    check_readable(actor, td)
    parameters = actor.model.parameters()
    if in_forward_mode() or any(map(is_transformed, parameters)):
        raise CannotFuse("it is differentiated by torch.func or in forward mode")


class _Columns(NamedTuple):
    """Packed log-probs and entropies, and the terms if they were computed."""

    values: Tensor | None
    log_probs: Tensor
    entropy: Tensor


def _columns(loss: Any, batch: LossBatch, kept: Tensor, terms: LossTerms | None) -> _Columns:
    wrapper = loss.actor_network
    model, tokens, mask = wrapper.model, batch.packed(batch.ids), batch.packed(kept)
    options = {
        "max_tokens_per_forward": loss.max_tokens_per_forward,
        "share_prefixes": loss.share_prefixes,
        "entropy": loss.entropy_bonus,
        "model_kwargs": wrapper.generate_kwargs,
    }
    if terms is None:
        values, entropy = causal_log_probs(model, tokens, batch.lengths, mask, **options)
        return _Columns(None, values, torch.zeros_like(values) if entropy is None else entropy)
    of_batch, of_weights = (map(batch.packed, columns) for columns in (terms.batch, terms.weights))
    computed = causal_policy_terms(
        model,
        tokens,
        batch.lengths,
        mask,
        PolicyBatch(*of_batch),
        TermWeights(*of_weights),
        terms.surrogate,
        **options,
    )
    return _Columns(*computed)


def _classes(model: Any) -> int:
    classes = classes_of(model)
    if classes is None:
        raise CannotFuse("its mask counts first tokens, and the model tells no number of classes")
    return classes
