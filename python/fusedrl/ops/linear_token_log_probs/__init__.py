"""Log-prob of each token from hidden states, without materialising the head's logits."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from fusedrl.ops.linear_token_log_probs import autograd, reference
from fusedrl.ops.linear_token_log_probs.arguments import check_shard, prepare
from fusedrl.ops.linear_token_log_probs.shards import VocabPart
from fusedrl.ops.token_log_probs import TokenLogProbs

__all__ = ["VocabPart", "linear_token_log_probs"]


def linear_token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    mask: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    offsets: Tensor | None = None,
    shift: bool = False,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    vocab_offset: int | None = None,
    vocab_group: ProcessGroup | None = None,
    batch_invariant: bool = False,
    impl: str = "auto",
) -> TokenLogProbs:
    r"""Log-probability of each token under a softmax over a linear head's logits.

    With ``x = scale * (hidden @ weight.T + bias)``, ``x = softcap * tanh(x / softcap)`` if a
    softcap is given, and ``z = x / temperature``, it is :math:`z_{y} - \log\sum_v e^{z_v}`. Only
    kept rows are multiplied, and logits exist one float32 tile at a time: at most 512 KiB per CPU
    thread (4 MiB in the backward pass), 256 MiB on CUDA (plus 512 MiB of half-precision gradients).

    The backward pass recomputes the logits. Up to 256 MiB of them (environment variable
    ``FUSEDRL_STORED_MIB``) are stored instead, except with ``batch_invariant`` or under
    ``torch.compile``. Gradients are summed in float32 and rounded once. On CUDA, a mask, or a shift
    of packed rows, makes the host wait for the number of kept rows.

    In bfloat16 on a CPU with AVX512-BF16, ``torch.set_float32_matmul_precision("medium")`` rounds
    the gradients of logits to bfloat16 before the matrix products, which is faster.

    Args:
        hidden: ``[N, H]`` packed, ``[B, T, H]`` padded, or jagged ``[B, j, H]``; float32, bfloat16
            or float16 (float64 runs through the reference).
        weight: ``[V, H]`` of the dtype of ``hidden``; may be tied to the embeddings.
        tokens: integer class of each token, ``[N]``, ``[B, T]`` or jagged; in ``[0, V)`` for kept
            tokens.
        mask: bool, shaped like ``tokens``; ``None`` keeps all. A dropped token has log-prob exactly
            0, and neither its hidden state nor its class is read.
        bias: ``[V]`` of the dtype of ``weight``.
        softcap: positive bound of the logits (Gemma 2's ``final_logit_softcapping``).
        scale: positive factor of the logits (Cohere's ``logit_scale``, the inverse of Granite's
            ``logits_scaling``).
        offsets: int64 ``[B + 1]``, where each sequence of a packed batch starts and ends.
        shift: token *i* reads row *i - 1* of its sequence, as causal models predict, instead of row
            *i*; the first token of every sequence has log-prob 0. Packed hidden states then need
            ``offsets``.
        temperature: divisor of the logits, from 1e-30 to 1e30. A 0-dim tensor may change under
            ``torch.compile`` without a recompile. No gradient flows to it.
        entropy: also compute the entropy :math:`-\sum_v p_v \log p_v` of each kept row, with
            gradient.
        vocab_offset: the first class of ``weight`` and ``bias``, if these are a shard of the
            vocabulary; ``tokens`` are classes of the whole. A token in no shard gets ``-inf``.
            Requires ``vocab_group``; :class:`VocabPart` combines shards without a group.
        vocab_group: the process group whose ranks hold the other shards. Every rank passes the
            same hidden states, and gets the log-probs over all classes and the full gradient of
            the hidden states.
        batch_invariant: multiply rows in blocks of a fixed size, so that the result of a row is
            bitwise independent of the rest of the batch; slower if blocks are not full.
        impl: ``"auto"`` uses the device's compiled kernel, or falls back to plain torch; ``"cpu"``,
            ``"cuda"`` and ``"triton"`` require a kernel, ``"reference"`` uses plain torch.

    Returns:
        :class:`TokenLogProbs`, whose float32 tensors are shaped like ``tokens``.

    Raises:
        TypeError, ValueError: an argument of the wrong kind or value, or that does not fit the
            others.
        RuntimeError: a kept token outside ``[0, V)``; on CUDA, a device-side assert.

    Example:
        >>> import torch
        >>> from fusedrl import linear_token_log_probs, token_log_probs
        >>> _ = torch.manual_seed(0)
        >>> hidden, weight = torch.randn(2, 5, 8), torch.randn(100, 8)
        >>> tokens = torch.randint(0, 100, (2, 5))
        >>> from_states = linear_token_log_probs(hidden, weight, tokens, shift=True)
        >>> from_logits = token_log_probs(hidden @ weight.T, tokens, shift=True)
        >>> torch.allclose(from_states.log_probs, from_logits.log_probs, atol=1e-5)
        True
    """
    check_shard(vocab_offset, vocab_group)
    call = prepare(
        *(hidden, weight, tokens, mask, bias, softcap, scale, offsets, shift, temperature),
        *(entropy, vocab_offset, batch_invariant, impl),
    )
    if call.chosen == "reference":
        log_probs, row_entropy = reference.linear_token_log_probs(*call.of_reference)
    else:
        log_probs, row_entropy = autograd.run(call, vocab_group)
    return TokenLogProbs(
        call.batch.result(log_probs), call.batch.result(row_entropy) if entropy else None
    )
