"""Tell the fused head what a GRPO or RLOO trainer of TRL is about to do with the log-probs.

TRL computes the loss and all metrics itself, from the log-probs and entropies of the fused head. A
head that knows the loss beforehand computes its gradients together with the log-probs. The options
of the trainer say which loss it is: :func:`planned` wraps its method and makes a plan of them for
the head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fusedrl.compat.torch import is_compiled
from fusedrl.compat.trl import entropy_bonus_applies
from fusedrl.integrations.trl_log import log_once
from fusedrl.ops.linear_policy_loss.autograd import REINFORCE
from fusedrl.ops.linear_policy_loss.losses import PolicyBatch, Surrogate, TermWeights

MOST_MISSES = 3  # so many steps in a row with other gradients than planned, and no more are planned


class NotPlanned(Exception):
    """A loss cannot be planned; the message says why."""


@dataclass
class PlanMisses:
    """How often in a row a trainer's gradients were not the planned ones."""

    misses: int = 0


@dataclass(frozen=True)
class Plan:
    """The loss of a batch of completions as ``linear_policy_loss`` makes it; tensors ``[B, K]``.

    Args:
        tokens: the completions.
        scored: bool, the tokens whose log-probs are asked for.
        kept: bool, the tokens that count in the loss.
        before: how many positions of each sequence predict tokens of the prompt.
        batch: advantages, old log-probs and reference log-probs of the tokens.
        weights: how much each token counts in each term of the loss.
        surrogate: the term of the advantages, and the estimator of the KL.
        level: whether a ratio is that of a token or of a sequence.
        trainer: the name of the trainer's class.
        record: counts how often the plan of this trainer was wrong.
    """

    tokens: Tensor
    scored: Tensor
    kept: Tensor
    before: int
    batch: PolicyBatch
    weights: TermWeights
    surrogate: Surrogate
    level: str
    trainer: str
    record: PlanMisses


_plan: ContextVar[Plan | None] = ContextVar("plan", default=None)
_records: WeakKeyDictionary[Any, PlanMisses] = WeakKeyDictionary()


def take_plan() -> Plan | None:
    """The plan of the loss that is being computed, or ``None``; each plan is taken once."""
    plan = _plan.get()
    _plan.set(None)
    return plan


def log_not_fused(trainer: str, why: str) -> None:
    """Log, once, that a trainer's gradients are not computed together with its log-probs."""
    log_once(f"trl: {trainer}: {why}; its loss is not fused")


@contextmanager
def expecting(plan: Plan | None) -> Iterator[None]:
    """Let the head take this plan inside of the block."""
    token = _plan.set(plan)
    try:
        yield
        if plan is not None and _plan.get() is plan:
            log_not_fused(plan.trainer, "its log-probs were not asked of the fused head")
    finally:
        _plan.reset(token)


def planned(theirs: Callable[..., Tensor], trainer: str) -> Callable[..., Tensor]:
    """Wrap TRL's ``_compute_loss``, so that the head knows the loss when it computes log-probs."""
    plan_of = _PLANS[trainer]

    def compute_planned_loss(self: Any, model: Any, inputs: dict[str, Any]) -> Tensor:
        _warn_of_truncation(self)
        with expecting(_plan_or_none(self, model, inputs, plan_of)):
            return theirs(self, model, inputs)

    compute_planned_loss.__qualname__ = "compute_planned_loss"
    return compute_planned_loss


def _warn_of_truncation(trainer: Any) -> None:
    """Warn, once, of a sampler that leaves out classes which TRL's log-probs count."""
    changed = getattr(trainer.args, "generation_kwargs", None) or {}
    top_p, top_k, min_p = (
        changed.get(name, getattr(trainer, name, None)) for name in ("top_p", "top_k", "min_p")
    )
    if (top_p or 1) < 1 or (top_k or 0) > 0 or (min_p or 0) > 0:
        log_once(
            f"trl: {type(trainer).__name__}: completions are sampled with top_p={top_p}, "
            f"top_k={top_k} and min_p={min_p}, but TRL's log-probs are over all classes: ratios, "
            "KL and gradients are those of another policy; sample with top_p=1, top_k=0 and "
            "min_p=None"
        )


def _plan_or_none(
    trainer: Any, model: Any, inputs: dict[str, Any], plan_of: Callable[..., Plan]
) -> Plan | None:
    if not torch.is_grad_enabled():
        return None
    try:
        _check_surroundings(trainer, model)
        return plan_of(trainer, inputs)
    except NotPlanned as reason:
        why = str(reason)
    # Another TRL, or a subclass with other batches.
    except (AttributeError, KeyError, ImportError) as error:
        why = f"expected it as TRL 1.16 has it, got {type(error).__name__}: {error}"
    log_not_fused(type(trainer).__name__, why)
    return None


def _record_of(trainer: Any) -> PlanMisses:
    return _records.setdefault(trainer, PlanMisses())


def _check_surroundings(trainer: Any, model: Any) -> None:
    """Refuse what lies between trainer and head if it was never tested."""
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise NotPlanned("the model is sharded by FSDP or DeepSpeed")
    if trainer.args.torch_compile or is_compiled(model):
        raise NotPlanned("the model is compiled")
    if _record_of(trainer).misses >= MOST_MISSES:
        raise NotPlanned(f"its gradients were not those of its options, {MOST_MISSES} times")


def _grpo_plan(trainer: Any, inputs: dict[str, Any]) -> Plan:
    if trainer.top_entropy_quantile < 1.0:
        raise NotPlanned("top_entropy_quantile < 1 needs the entropies before the loss")
    if trainer.off_policy_mask_threshold is not None:
        raise NotPlanned("off_policy_mask_threshold needs the log-probs before the loss")
    old = inputs.get("old_per_token_logps")
    corrects = trainer.use_vllm and trainer.vllm_importance_sampling_correction
    factors = inputs["importance_sampling_ratio"] if corrects else None
    even = inputs["advantages"].dim() == 1 and (factors is None or factors.shape[1] == 1)
    surrogate, level = _grpo_surrogate(trainer, on_policy=old is None, even=even)
    scored = inputs["completion_mask"].bool()
    kept = scored & inputs["tool_mask"].bool() if "tool_mask" in inputs else scored
    share = _grpo_share(trainer, inputs, kept)
    objective = share
    if factors is not None:
        objective = torch.where(kept, share * factors, 0)
    weights = TermWeights(
        objective,
        kl=share * trainer.beta if trainer.beta else None,
        entropy=_entropy_weight(trainer, kept),
    )
    reference = inputs["ref_per_token_logps"] if trainer.beta else None
    return _plan_of(trainer, inputs, scored, kept, old, reference, weights, surrogate, level)


def _grpo_surrogate(trainer: Any, on_policy: bool, even: bool) -> tuple[Surrogate, str]:
    """The surrogate of a GRPO trainer, and the level of its ratio.

    On policy every ratio is 1. A ratio of sequences then spreads the gradients of its tokens evenly
    over them, which changes nothing if all tokens have the same weight. And a k3 estimate
    times the ratio has the gradient of k2 there: with ``d = ref - p``, the derivative of
    ``r (e^d - d - 1)`` by ``p`` is ``(e^d - d - 1) + (1 - e^d) = -d``.
    """
    loss, of_sequences = trainer.loss_type, trainer.importance_sampling_level == "sequence"
    clipped = loss in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
    if not clipped and loss != "cispo":
        raise NotPlanned(f"loss_type={loss!r} is none that linear_policy_loss has")
    estimator = "k3"
    if trainer.beta and trainer.args.use_bias_correction_kl:
        if of_sequences or not on_policy:
            raise NotPlanned("use_bias_correction_kl weighs the KL by ratios, which are not all 1")
        estimator = "k2"
    if clipped and of_sequences and on_policy and even:
        return REINFORCE._replace(estimator=estimator), "token"
    level = "geometric" if of_sequences and (clipped or not on_policy) else "token"
    high, most = trainer.epsilon_high, trainer.args.delta
    if loss == "cispo":
        return Surrogate("cispo", 0.0, high, math.inf, estimator), level
    if most is not None and most < 1 + high:
        raise NotPlanned(f"delta={most} is below the upper bound of the ratio")
    most = math.inf if most is None else most
    return Surrogate("clip", 1 - trainer.epsilon_low, 1 + high, most, estimator), level


def _grpo_share(trainer: Any, inputs: dict[str, Any], kept: Tensor) -> Tensor:
    """How much each token counts in the loss."""
    steps, loss = _accumulated_steps(trainer), trainer.loss_type
    if loss == "grpo":
        return _share_of_sequences(kept) / steps
    if loss in ("cispo", "dapo"):
        normalizer = inputs["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
        if trainer.model.training:  # it counts the tokens of all steps of one generation
            normalizer = normalizer * steps / trainer.args.steps_per_generation
    elif loss == "bnpo":
        normalizer = kept.sum().clamp(min=1) * steps
    elif loss == "dr_grpo":
        normalizer = len(kept) * trainer.max_completion_length * steps
    else:  # luspo
        normalizer = len(kept) * steps
    return kept.float() / normalizer


def _entropy_weight(trainer: Any, kept: Tensor) -> Tensor | None:
    """How much each token's entropy counts; the bonus is of the mean entropy in every loss."""
    if not entropy_bonus_applies(trainer):
        return None
    among = kept.sum().clamp(min=1) * _accumulated_steps(trainer)
    return kept.float() / among * -trainer.entropy_coef


def _rloo_plan(trainer: Any, inputs: dict[str, Any]) -> Plan:
    kept = inputs["completion_mask"].bool()
    # The ratio is that of sums over sequences, so that only the sum of the old log-probs counts.
    old = (inputs["old_logps"] / kept.sum(1).clamp(min=1))[:, None] * kept
    low, high = 1 - trainer.epsilon_low, 1 + trainer.epsilon_high
    surrogate = Surrogate("clip", low, high, math.inf, "k3")
    weights = TermWeights(_share_of_sequences(kept))
    return _plan_of(trainer, inputs, kept, kept, old, None, weights, surrogate, "sequence")


def _share_of_sequences(kept: Tensor) -> Tensor:
    return kept.float() / kept.sum(1, keepdim=True).clamp(min=1) / len(kept)


def _accumulated_steps(trainer: Any) -> float:
    return trainer.current_gradient_accumulation_steps if trainer.model.training else 1.0


def _plan_of(
    trainer: Any,
    inputs: dict[str, Any],
    scored: Tensor,
    kept: Tensor,
    old: Tensor | None,
    reference: Tensor | None,
    weights: TermWeights,
    surrogate: Surrogate,
    level: str,
) -> Plan:
    advantages = inputs["advantages"]
    if advantages.dim() == 1:
        advantages = advantages[:, None]
    return Plan(
        tokens=inputs["completion_ids"],
        scored=scored,
        kept=kept,
        before=inputs["prompt_ids"].shape[1] - 1,
        batch=PolicyBatch(advantages.expand(kept.shape), old, reference),
        weights=weights,
        surrogate=surrogate,
        level=level,
        trainer=type(trainer).__name__,
        record=_record_of(trainer),
    )


_PLANS: dict[str, Callable[..., Plan]] = {"GRPOTrainer": _grpo_plan, "RLOOTrainer": _rloo_plan}
