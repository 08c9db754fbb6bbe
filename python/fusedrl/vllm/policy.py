"""Finds the vLLM engine in torchrl's policies, and lets them report the version of each token."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase, set_list_to_stack
from torch import nn

from fusedrl.compat.torchrl import VLLM_CALLS, engine_kind
from fusedrl.vllm.token_versions import PADDING, TOKENS_KEY, token_versions


def wrappers_in(policy: Any) -> list[Any]:
    """The parts of a policy that have a ``vllm.LLM`` as their ``model``; all have the same one.

    Raises:
        TypeError: an engine that cannot be given weights through a channel.
        ValueError: the policy has several engines.
    """
    wrappers = list(_with_engines(policy))
    if any(wrapper.model is not wrappers[0].model for wrapper in wrappers):
        raise ValueError(
            "policy: expected one vLLM engine, whose weights a channel has, got several; give each "
            "a collector of its own"
        )
    return wrappers


def _with_engines(policy: Any) -> Iterator[Any]:
    # Importing vLLM takes seconds, and without an import the policy cannot have an engine.
    engine_class = getattr(sys.modules.get("vllm.entrypoints.llm"), "LLM", None)
    for part in policy.modules() if isinstance(policy, nn.Module) else [policy]:
        if engine_kind(part) in ("async_vllm", "ray_actor"):
            raise TypeError(
                "policy: expected a vLLMWrapper of a vllm.LLM for weights out of a channel, got "
                f"one of {type(part.model).__name__}, whose engines run in Ray's actors and are "
                "started for NCCL; make the LLM in the process of its collector, with "
                "weight_transfer_config=WeightTransferConfig(backend='fusedrl'), and an "
                "AsyncCollector for each process"
            )
        if engine_class is not None and isinstance(getattr(part, "model", None), engine_class):
            yield part


class ReportedVersions:
    """Lets a ``vLLMWrapper`` report the version of each token that it generates.

    The versions come under ``"token_policy_version"`` as int64, in the form of the tokens of the
    response: ragged, or padded with -1. If the engine has no room for a prompt, the whole batch is
    refused before the engine gets any of it.

    Args:
        wrapper: a generating wrapper of torchrl, which is changed until :meth:`remove`.
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._call = threading.local()  # the completions of this thread's call
        self._out_keys = list(wrapper.out_keys)
        wrapper.out_keys = [*self._out_keys, TOKENS_KEY]
        self._replaced = list(VLLM_CALLS)
        calls = (self._generate, self._report, self._report)
        for name, call in zip(VLLM_CALLS, calls, strict=True):
            setattr(wrapper, name, partial(call, getattr(wrapper, name)))

    def _generate(self, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The wrapper's call of its engine."""
        tokens = kwargs.get("prompt_token_ids")
        if tokens:
            check_lengths(tokens, self._wrapper.model)
        requests = generate(*args, **kwargs)
        self._call.completions = [
            completion for request in _listed(requests) for completion in request.outputs
        ]
        return requests

    @set_list_to_stack(True)
    def _report(self, made: Callable[..., TensorDictBase], *args: Any, **kwargs: Any) -> Any:
        """What the wrapper makes of the engine's answers, with their versions added."""
        out = made(*args, **kwargs)
        versions = [token_versions(completion) for completion in self._call.completions]
        del self._call.completions
        rows: Any = versions
        if self._wrapper.pad_output:
            rows = torch.nn.utils.rnn.pad_sequence(versions, True, PADDING)
        with out.view(-1) as flat:
            flat.set(TOKENS_KEY, rows)
        return out

    def remove(self) -> None:
        """Restore the wrapper."""
        for name in self._replaced:
            delattr(self._wrapper, name)
        self._wrapper.out_keys = self._out_keys
        self._replaced = []


def check_lengths(prompts: Sequence[int] | Sequence[Sequence[int]], engine: Any) -> None:
    """Raise ``ValueError`` unless an engine has room for prompts, and for a token of an answer."""
    rows: Any = [prompts] if isinstance(prompts[0], int) else prompts
    limit = engine.model_config.max_model_len
    if long := [str(len(prompt)) for prompt in rows if len(prompt) >= limit]:
        raise ValueError(
            f"prompt: expected fewer than {limit} tokens, which is the engine's max_model_len, got "
            f"{', '.join(long)}; end dialogs before that, with a StepCounter or another transform "
            "that truncates them, or start the engine with a greater max_model_len"
        )


def _listed(requests: Any) -> list[Any]:
    return requests if isinstance(requests, list) else [requests]
