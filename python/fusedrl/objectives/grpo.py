"""GRPO and its variants, computed from kept tokens without the logits of all tokens."""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.objectives.llm import DAPO as _DAPO
from torchrl.objectives.llm import CISPOLoss as _CISPOLoss
from torchrl.objectives.llm import GRPOLoss as _GRPOLoss

from fusedrl.models.ranks import Step, together
from fusedrl.objectives.over_ranks import check_data, misshapen_advantage, shares_of, weighed
from fusedrl.objectives.scores import Scores, scores_of

_not_compiled: Any = torch.compiler.disable  # its types hide methods

_THEIRS = frozenset(
    name
    for name, parameter in inspect.signature(_GRPOLoss.__init__).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
)

# The loss whose forward pass runs in this context, and the scores that it uses.
_running: ContextVar[tuple[_GRPOLoss, Scores] | None] = ContextVar("_running", default=None)


class GRPOLoss(_GRPOLoss):
    """The clipped loss of GRPO over the tokens of a conversation.

    A drop-in for :class:`torchrl.objectives.llm.GRPOLoss`: keys, outputs and metrics are torchrl's,
    and torchrl's own formulas compute the values. The log-probs and entropies that they
    need are computed from hidden states, in float32, for the tokens that the masking strategy
    counts. The gradients are computed in the same pass, as in :func:`fusedrl.linear_policy_loss`.
    With ``kl_mask_threshold``, without aggregation, and in subclasses with an objective of their
    own, log-probs come from :func:`fusedrl.models.causal_log_probs`, which needs one more product
    with the head.

    The following cannot be computed from hidden states. It runs as in torchrl's class, and is
    logged once: an actor that is not a ``TransformersWrapper``, a subclass that reads the
    distribution of all logits, and tokens that the actor does not read. There is no second
    derivative.

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

    # Of a loss that was pickled as torchrl's class.
    max_tokens_per_forward: int | None = None
    share_prefixes: bool = True
    average_tokens_across_devices: bool = False

    def __init__(
        self,
        actor_network: Any = None,
        *,
        max_tokens_per_forward: int | None = None,
        share_prefixes: bool = True,
        average_tokens_across_devices: bool = False,
        **theirs: Any,
    ) -> None:
        if unknown := sorted(theirs.keys() - _THEIRS):
            raise TypeError(
                f"{unknown[0]}: expected a known argument, got an unknown one; leave it out"
            )
        super().__init__(actor_network, **theirs)
        self.max_tokens_per_forward = max_tokens_per_forward
        self.share_prefixes = share_prefixes
        self.average_tokens_across_devices = average_tokens_across_devices

    @_not_compiled  # compiling around the kernels gains nothing; the model itself may be compiled
    def forward(self, tensordict: TensorDictBase) -> Any:
        """The losses and metrics of a batch, in the form of torchrl's class."""
        actor = getattr(self, "actor_network", None)
        with together(type(self).__name__, getattr(actor, "model", None)) as step:
            return self._forward(tensordict, step)

    def _forward(self, tensordict: TensorDictBase, step: Step) -> Any:
        if not step.alone:
            check_data(self, tensordict)
        scores = scores_of(self, GRPOLoss, tensordict, step)
        shares = None
        if self.average_tokens_across_devices and not step.alone:
            if scores is None:
                raise ValueError(
                    "average_tokens_across_devices: expected a loss that is computed from hidden "
                    "states, got one that torchrl has to compute; set it to False"
                )
            shares = shares_of(self, scores, step)
        try:
            if scores is None:
                with step.collective():
                    return super().forward(tensordict)
            token = _running.set((self, scores))
            try:
                output = super().forward(tensordict)
            finally:
                _running.reset(token)
        except (ValueError, RuntimeError) as error:
            if (problem := misshapen_advantage(self, tensordict)) is None:
                raise
            # torchrl's own error names neither the key nor a remedy; its type is kept.
            kind = ValueError if isinstance(error, ValueError) else RuntimeError
            raise kind(problem) from error
        output = scores.differentiable(output)
        return output if shares is None else weighed(output, *shares)

    def _get_cur_log_prob(self, tensordict: TensorDictBase) -> Any:
        running = _running.get()
        if running is None or running[0] is not self:
            return super()._get_cur_log_prob(tensordict)
        _, scores = running
        return scores.log_probs, scores.distribution, False


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
