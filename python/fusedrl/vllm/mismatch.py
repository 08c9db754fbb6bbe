"""Says why an engine's log-probs are not those of its trainer."""

# vLLM has an environment of its own, which the linters do not see.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import copy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedrl.compat.vllm import rope_cosines, runs_in_this_process
from fusedrl.models.log_probs import causal_log_probs
from fusedrl.ops import Mismatch, importance_weights
from fusedrl.vllm.causes import (
    Cause,
    LogProbs,
    Messages,
    in_packed_row,
    of_operation,
    prompt_tokens,
    sampled,
    sampling,
    settings,
    weights,
)
from fusedrl.vllm.operations import (
    FACTOR,
    LOGITS,
    Operation,
    Values,
    compared,
    first_of,
    recorded,
    with_cosines,
)


class EngineMismatch(NamedTuple):
    """Why an engine and its trainer differ, and what that costs.

    ``print`` shows it in a few lines.

    Args:
        causes: what to change, each a tuple ``(kind, what, remedy)`` of strings; none where
            rounding alone makes them differ.
        operations: all that both have, in the engine's order, with their relative errors.
        first: the first operation that differs by more than rounding, if one does.
        cost: the mismatch of the tokens that the engine sampled, with ratios that are not bounded;
            of no tokens if penalties or biases changed the logits.
        tokens: how many tokens were compared, with those of the prompt.
    """

    causes: list[Cause]
    operations: list[Operation]
    first: Operation | None
    cost: Mismatch
    tokens: int

    def __str__(self) -> str:
        """The first difference, each cause with its remedy in the next line, and the cost."""
        lines = [f"{len(self.operations)} operations compared on {self.tokens} tokens"]
        other = first_of(self.operations, lambda o: o.difference != 0)
        if other is not None:
            lines += [f"first other bits: {other.kind} in {other.name}, {other.difference:.1e}"]
        if self.first is not None:
            name, kind, error, allowed, _, token = self.first
            lines += [
                f"first error beyond rounding: {kind} in {name} at token {token}, {error:.1e}, "
                f"where rounding explains {allowed:.1e}"
            ]
        lines += [f"{kind}: {what}\n    {remedy}" for kind, what, remedy in self.causes]
        if not self.cost.tokens:
            return "\n".join([*lines, "cost: not known, as the sampling changes the logits"])
        ratio, kl, ess, tokens = self.cost.max_ratio, self.cost.k3, self.cost.ess, self.cost.tokens
        cost = f"cost: ratios up to {ratio:.4f}, KL {kl:.1e} nats a token, effective sample size "
        return "\n".join([*lines, f"{cost}{ess:.2f} of {tokens} tokens"])


def explain_mismatch(
    model: Any,
    llm: Any,
    prompt: str | Messages,
    tokenizer: Any,
    *,
    sampling_params: Any = None,
    temperature: float = 1.0,
    log_probs: LogProbs | None = None,
    max_tokens: int = 32,
) -> EngineMismatch:
    """Compare an engine and its trainer on a response, operation by operation.

    The engine answers the prompt. What each of its modules computes is compared with the trainer's
    model, and so are the tokens of the prompt, settings, weights, sampling, and packing. An error
    counts as more than rounding if it is more than 8 times as large as the trainer's own in these
    dtypes, measured against the same weights in float32, or in float64 if one of them is float32.

    Args:
        model: the trainer's, of transformers, or a peft model around one, whose adapters are
            merged. It is copied to the dtypes in turn, and stays as it is.
        llm: a ``vllm.LLM`` in this process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``) that was started
            with ``enforce_eager=True``, without which modules are compiled away.
        prompt: messages, or a text, which each side turns into tokens.
        tokenizer: the trainer's.
        sampling_params: those of rollouts; ``None`` takes the engine's defaults, as ``generate()``
            does.
        temperature: that by which the trainer divides its logits.
        log_probs: how the trainer computes log-probs, already at its temperature: given packed
            int64 tokens ``[N]`` and the lengths of their sequences, ``[N]`` with any value for the
            first token of each. ``None`` takes :func:`fusedrl.models.causal_log_probs`.
        max_tokens: number of tokens that the engine samples.

    Returns:
        :class:`EngineMismatch`.

    Raises:
        ValueError: the engine has other processes, compiles its model, or speculates.

    Example:
        >>> from fusedrl.vllm import explain_mismatch
        >>> def report(trained, llm, tokenizer):  # llm = LLM(..., enforce_eager=True)
        ...     found = explain_mismatch(trained, llm, "Is it late?", tokenizer)
        ...     print(found)
        ...     return [cause.kind for cause in found.causes]
    """
    _check_engine(llm)
    params = llm.get_default_sampling_params() if sampling_params is None else sampling_params
    ids, causes = prompt_tokens(llm, prompt, tokenizer)
    [engine] = llm.apply_model(lambda m: m)
    response = sampled(llm, engine, ids, params, max_tokens)
    if log_probs is None:
        log_probs = partial(causal_log_probs, model, temperature=temperature)

    model = _without_adapters(model)
    config = llm.llm_engine.vllm_config
    dtypes = list(dict.fromkeys((config.model_config.dtype, model.dtype)))
    wide = torch.float64 if torch.float32 in dtypes else torch.float32
    truth, *rounded = (_computed(model, response.tokens[:-1], d) for d in (wide, *dtypes))
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    cosines = rope_cosines(engine, len(response.tokens) - 1)
    values = with_cosines(response.values, cosines, truth)
    fused = getattr(engine, "packed_modules_mapping", {})
    operations = compared(values, fused, model, truth, rounded, eps)
    first = first_of(operations, lambda o: o.is_beyond)

    exact, alone = (response.log_probs(v[LOGITS], temperature) for v in (truth, rounded[-1]))
    scale = truth[LOGITS].abs().max().item() / temperature
    rounding = FACTOR * max((exact - alone).abs().max().item(), eps * scale)
    packed, packing = in_packed_row(response, log_probs, alone, rounding)
    causes += [*settings(config, model), *weights(engine, config, model)]
    causes += [*of_operation(first, causes), *packing]
    causes += sampling(params, temperature, config.model_config)
    _, cost = importance_weights(
        packed, response.sampled_log_probs(params), high=None, nan="missing"
    )
    return EngineMismatch(causes, operations, first, cost.total(), len(response.tokens))


def _check_engine(llm: Any) -> None:
    config = llm.llm_engine.vllm_config
    if not runs_in_this_process(llm) or config.parallel_config.world_size > 1:
        raise ValueError(
            "llm: expected an engine that computes in this process, where its modules can be "
            "watched, got one with other processes; start it with VLLM_ENABLE_V1_MULTIPROCESSING=0 "
            "in the environment, on one worker"
        )
    if not config.model_config.enforce_eager or config.speculative_config is not None:
        raise ValueError(
            "llm: expected an engine that calls its modules once for each token, got one that "
            "compiles them or speculates; start it with enforce_eager=True and without "
            "speculative_config"
        )


def _without_adapters(model: Any) -> Any:
    """A model that computes the same, with adapters in its weights."""
    is_peft = hasattr(model, "merge_and_unload")
    return copy.deepcopy(model).merge_and_unload() if is_peft else model


@torch.no_grad()
def _computed(model: Any, tokens: Tensor, dtype: torch.dtype) -> Values:
    """What the trainer's modules compute with its weights in another dtype."""
    model = copy.deepcopy(model).eval()
    for parameter in model.parameters():  # RoPE has buffers whose dtype is not the model's
        parameter.data = parameter.data.to(dtype)
    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # a grouped product has no float64
    ids = tokens[None].to(model.device)
    return recorded(model, lambda: model(input_ids=ids, use_cache=False), batched=True)
