"""Log-probability of each token from hidden states: the head's logits never exist as a whole."""

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

    With ``x = scale * (hidden @ weight.T + bias)``, ``x = softcap * tanh(x / softcap)`` where a
    softcap is given, and ``z = x / temperature``, it is :math:`z_{y} - \log\sum_v e^{z_v}`.
    Only the kept rows are multiplied. Logits exist a tile at a time, in float32: 512 KiB for each
    thread of the CPU (4 MiB in the backward pass, beside copies of the kept hidden states and of
    the weights of a tile), at most 256 MiB on CUDA (and 512 MiB of gradients in half precision), or
    none (Triton). The backward pass computes them again, but where those of the kept rows take at
    most 256 MiB (``FUSEDRL_STORED_MIB`` in the environment), on a CPU also no more than 64 MiB or
    the head's gradient in float32, and are stored; never with ``batch_invariant`` or under
    ``torch.compile``. Behind a frozen head, without ``entropy``, the
    forward pass already takes all that the gradient needs from the logits. Every gradient is summed
    in float32 and rounded once. On CUDA, a mask, or a shift of packed rows, makes the host wait for
    the number of kept rows.

    In bfloat16 on a CPU with AVX512-BF16, ``torch.set_float32_matmul_precision("medium")`` rounds
    the gradients of logits to bfloat16 before they are multiplied, which is faster.

    Args:
        hidden: ``[N, H]`` packed, ``[B, T, H]`` padded, or jagged ``[B, j, H]``; float32, bfloat16
            or float16 (float64 runs through the reference).
        weight: ``[V, H]`` of the dtype of ``hidden``. A tied one needs nothing special.
        tokens: integer class of each token, ``[N]``, ``[B, T]`` or jagged; values in ``[0, V)``
            wherever they are read.
        mask: bool, shaped like ``tokens``; ``None`` keeps all. A dropped token has log-prob exactly
            0, and neither its hidden state nor its value is read.
        bias: ``[V]`` of the dtype of ``weight``.
        softcap: positive bound of the logits (Gemma 2's ``final_logit_softcapping``).
        scale: positive factor of the logits (Cohere's ``logit_scale``, 1 over Granite's
            ``logits_scaling``).
        offsets: int64 ``[B + 1]``, where each sequence of a packed batch starts and ends.
        shift: token *i* reads row *i - 1* of its own sequence, as causal models predict; the first
            token of every sequence has log-prob 0. Packed hidden states then need ``offsets``.
            Without it token *i* reads row *i*.
        temperature: divisor of the logits, from 1e-30 to 1e30. A 0-dim tensor may change under
            ``torch.compile`` without a recompile. No gradient flows to it.
        entropy: also compute the entropy :math:`-\sum_v p_v \log p_v` of each kept row, with
            gradient.
        vocab_offset: the first class of ``weight`` and ``bias``, where these are a shard of a
            larger vocabulary; ``tokens`` are classes of the whole. A token in no shard gets
            ``-inf``. It needs ``vocab_group``; :class:`VocabPart` is for shards without a group.
        vocab_group: the process group whose ranks hold the other shards. Every rank passes the
            same hidden states, and gets the log-probs over all classes and the whole gradient of
            the hidden states.
        batch_invariant: rows are multiplied in blocks of a fixed size, so that a row's bits do not
            depend on the batch around it; slower where blocks are not full.
        impl: ``"auto"`` takes the device's compiled kernel, or plain torch where there is none;
            ``"cpu"``, ``"cuda"`` and ``"triton"`` insist on a kernel, ``"reference"`` on plain
            torch.

    Returns:
        :class:`TokenLogProbs`, whose float32 tensors are shaped like ``tokens``.

    Raises:
        TypeError: a mask that is not bool, hidden states that are not floating point.
        ValueError: shapes, dtypes, devices, offsets or an ``impl`` that do not fit; a scale, a
            softcap or a temperature out of range.
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
