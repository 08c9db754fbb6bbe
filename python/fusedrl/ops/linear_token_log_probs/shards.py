"""Softmax statistics of each token over one shard of the vocabulary, and their combination."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fusedrl.ops import _dispatch
from fusedrl.ops.linear_token_log_probs import autograd
from fusedrl.ops.linear_token_log_probs.arguments import check_first_class, prepare
from fusedrl.ops.token_log_probs import TokenLogProbs


@dataclass(frozen=True)
class VocabPart:
    """Softmax statistics of every token over the classes of one shard, without a gradient.

    Args:
        statistics: float32 ``[..., 4]`` for each token: ``max``, the largest logit or one close
            enough to it that no exponential overflows; the sum of ``exp((x - max) / temperature)``;
            the same sum weighted by the exponents (for the entropy); and the logit of the target,
            ``-inf`` if it is in another shard.
        temperature: 0-dim tensor, the temperature of the statistics.
        entropy: whether the third statistic was computed.

    Example:
        >>> import torch
        >>> from fusedrl import VocabPart
        >>> hidden, weight, tokens = torch.ones(2, 4), torch.zeros(10, 4), torch.tensor([1, 7])
        >>> parts = [
        ...     VocabPart.of(hidden, weight[first:end], tokens, vocab_offset=first)
        ...     for first, end in ((0, 6), (6, 10))
        ... ]
        >>> VocabPart.combine(parts).log_probs.exp()
        tensor([0.1000, 0.1000])
    """

    statistics: Tensor
    temperature: Tensor
    entropy: bool

    @property
    def max(self) -> Tensor:
        """The largest logit of each token, or one close to it, which ``sum`` is relative to."""
        return self.statistics[..., 0]

    @property
    def sum(self) -> Tensor:
        """The sum of ``exp((x - max) / temperature)``."""
        return self.statistics[..., 1]

    @property
    def target(self) -> Tensor:
        """The logit of the target; ``-inf`` if it is in another shard."""
        return self.statistics[..., 3]

    @staticmethod
    def of(
        hidden: Tensor,
        weight: Tensor,
        tokens: Tensor,
        mask: Tensor | None = None,
        *,
        vocab_offset: int,
        bias: Tensor | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        offsets: Tensor | None = None,
        shift: bool = False,
        temperature: float | Tensor = 1.0,
        entropy: bool = False,
        batch_invariant: bool = False,
        impl: str = "auto",
    ) -> VocabPart:
        """The statistics of a shard whose first class is ``vocab_offset``.

        Arguments and errors are those of :func:`fusedrl.linear_token_log_probs`.
        """
        check_first_class(vocab_offset)
        call = prepare(
            *(hidden, weight, tokens, mask, bias, softcap, scale, offsets, shift, temperature),
            *(entropy, vocab_offset, batch_invariant, impl),
        )
        if call.needs_grad:
            raise ValueError(
                "hidden: expected inputs that require no gradient, as a VocabPart has none, got "
                "one that does; call it under torch.no_grad(), or call "
                "linear_token_log_probs with the vocab_group of the shards"
            )
        return VocabPart(autograd.statistics(call.chosen, call.args), call.temperature, entropy)

    @staticmethod
    def combine(parts: Sequence[VocabPart]) -> TokenLogProbs:
        """Log-probs (and entropy) over all classes from the parts of all shards, in any order.

        Raises ``ValueError`` for no parts, or parts that were computed with different options.
        """
        if len(parts) == 0:
            raise ValueError(
                "parts: expected the part of every shard, got none; call VocabPart.of with each "
                "shard's vocab_offset"
            )
        first = parts[0]
        for i, part in enumerate(parts):
            if part.entropy != first.entropy or part.statistics.shape != first.statistics.shape:
                raise ValueError(
                    f"parts: expected all of shape {tuple(first.statistics.shape)} with "
                    f"entropy={first.entropy}, got {tuple(part.statistics.shape)} with "
                    f"entropy={part.entropy} in part {i}; compute all with the same arguments"
                )
            _check_temperature(i, part.temperature, first.temperature)
        log_probs, entropy, _ = torch.ops.fusedrl.linear_token_log_probs_finish(
            torch.stack([part.statistics for part in parts]), first.temperature, first.entropy
        )
        return TokenLogProbs(log_probs, entropy if first.entropy else None)


def _check_temperature(i: int, temperature: Tensor, first: Tensor) -> None:
    """Refuse a part with another temperature; checked only for values on the CPU."""
    known = all(t.is_cpu and _dispatch.has_values(t) for t in (temperature, first))
    if known and temperature.item() != first.item():
        raise ValueError(
            f"parts: expected temperature {first.item():g} in all, got {temperature.item():g} in "
            f"part {i}; compute all parts with the same temperature"
        )
