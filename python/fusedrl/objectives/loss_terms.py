"""The terms of torchrl's GRPO losses, and how much each token counts in each of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torchrl.objectives.llm import CISPOLoss, GRPOLoss

from fusedrl.compat.torchrl import POLICY_OBJECTIVE, WEIGHT_FORMULAS, mean_of
from fusedrl.ops import _dispatch
from fusedrl.ops.linear_policy_loss.losses import PolicyBatch, Surrogate, TermWeights

# The surrogate of each objective that torchrl has.
_OBJECTIVES = {
    getattr(GRPOLoss, POLICY_OBJECTIVE): "clip",
    getattr(CISPOLoss, POLICY_OBJECTIVE): "clipped_ratio",
}


class LossTerms(NamedTuple):
    """The terms of a loss whose gradients can be made while log-probs are computed; ``[B, T]``."""

    batch: PolicyBatch
    weights: TermWeights
    surrogate: Surrogate


def overridden(loss: Any, base: type, names: tuple[str, ...]) -> list[str]:
    """Those of the methods that are not those of ``base``."""
    kind = type(loss)
    return [n for n in names if n in vars(loss) or getattr(kind, n) is not getattr(base, n)]


def loss_terms_of(
    loss: Any, td: TensorDictBase, old_log_probs: Tensor, mask: Tensor
) -> LossTerms | None:
    """What ``loss`` takes of the tokens in ``mask``, ``[B, T]``.

    ``None`` where the weights depend on log-probs (``kl_mask_threshold``), tokens are not summed,
    a subclass has formulas of its own, or nothing is differentiated: then log-probs come first.
    """
    surrogate = _surrogate(loss)
    if surrogate is None or not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return None
    dtype = _dispatch.result_dtype(next(loss.actor_network.model.parameters()))
    advantages = _advantages(loss, td, mask, dtype)
    coefficients = _coefficients(loss)
    share = _share(loss, td, mask, dtype)
    if advantages is None or coefficients is None or share is None:
        return None
    of_ref, of_old, of_entropy = coefficients
    ref_log_probs = None
    if of_ref is not None:
        ref_log_probs = _other_log_probs(loss, td, loss.tensor_keys.ref_log_probs, mask)
        if ref_log_probs is None:
            return None
    if of_old is not None:
        read = _other_log_probs(loss, td, loss.tensor_keys.sample_log_prob, mask)
        # Padded as the reference's, they may stand elsewhere.
        if read is None or not torch.equal(read, torch.where(mask, old_log_probs, 0)):
            return None
    # torchrl takes the mean of a KL over all places, those of padding too.
    each = mask.to(dtype) / mask.numel()
    return LossTerms(
        PolicyBatch(advantages, torch.where(mask, old_log_probs, 0), ref_log_probs),
        TermWeights(
            share,
            kl=None if of_ref is None else each * of_ref,
            old_kl=None if of_old is None else each * of_old,
            entropy=None if of_entropy is None else share * -of_entropy,
        ),
        surrogate,
    )


def _surrogate(loss: Any) -> Surrogate | None:
    """The term of the advantages, where the loss has one of torchrl's."""
    kind = _OBJECTIVES.get(getattr(type(loss), POLICY_OBJECTIVE))
    own = POLICY_OBJECTIVE in vars(loss) or overridden(loss, GRPOLoss, WEIGHT_FORMULAS)
    if kind is None or own or (loss.kl_mask_threshold or 0) > 0:
        return None
    low, high = 1 - float(loss.clip_epsilon_low), 1 + float(loss.clip_epsilon_high)
    if not 0 <= low <= high:
        return None
    return Surrogate(kind, low, high, float("inf"), "k3")


def _coefficients(loss: Any) -> tuple[float | None, float | None, float | None] | None:
    """Those of both KLs and the entropy, ``None`` for a term that the loss does not have."""
    of_ref = loss.kl_to_ref_coeff
    if of_ref is not None and not of_ref > 0:
        of_ref = None
    found = (of_ref, loss.kl_to_inference_coeff, loss.entropy_coeff if loss.entropy_bonus else None)
    if any(isinstance(value, Tensor) and value.requires_grad for value in found):
        return None
    of_ref, of_old, of_entropy = (None if value is None else float(value) for value in found)
    return of_ref, of_old, of_entropy


def _advantages(loss: Any, td: TensorDictBase, mask: Tensor, dtype: torch.dtype) -> Tensor | None:
    value: Any = td.get(loss.tensor_keys.advantage, None, as_padded_tensor=True)  # pyright: ignore[reportCallIssue]
    wanted = (*mask.shape, 1)
    spreads = value.dim() == 3 and all(
        n in (1, m) for n, m in zip(value.shape, wanted, strict=True)
    )
    if value.requires_grad or not spreads:
        return None
    spread = value.to(mask.device, dtype).expand(wanted).squeeze(-1)
    return torch.where(mask, spread, 0)


def _share(loss: Any, td: TensorDictBase, mask: Tensor, dtype: torch.dtype) -> Tensor | None:
    """How much each token counts in the mean, which is what torchrl's mean differentiates to."""
    if "none" in (loss.aggregation, loss.reduction):
        return None
    values = torch.zeros(*mask.shape, 1, device=mask.device, dtype=dtype, requires_grad=True)
    # Hooks of the caller, as a checkpoint has them, would run its whole segment once more.
    with saved_tensors_hooks(_as_it_is, _as_it_is):
        mean = mean_of(loss, values, mask, td)
        if mean.numel() != 1:
            return None
        (share,) = torch.autograd.grad(mean.sum(), values)
    return share.squeeze(-1)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _other_log_probs(loss: Any, td: TensorDictBase, key: Any, mask: Tensor) -> Tensor | None:
    """A column as the KLs read it, 0 outside of the mask; ``None`` for what torchrl refuses."""
    value: Any = td.get(
        key,
        None,
        as_padded_tensor=True,  # pyright: ignore[reportCallIssue]
        padding_side=loss.ref_log_prob_padding_side,
        padding_value=loss.ref_log_prob_padding_value,
    )
    if value is None:
        return None
    value = value.squeeze(-1) if value.dim() == mask.dim() + 1 else value
    if value.shape != mask.shape or value.requires_grad:
        return None
    return torch.where(mask, value.to(mask.device), 0)
