"""Keeps the vLLM engine of torchrl's policies at a channel; reports each token's version."""

# vLLM is not installed where the linters run.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase, set_list_to_stack
from torch import nn

from fusedrl.channel import WeightHandle, WeightReader
from fusedrl.channel.follow import Follower
from fusedrl.compat.torchrl import VLLM_CALLS, engine_kind
from fusedrl.vllm.engines import engine_of
from fusedrl.vllm.token_versions import PADDING, STARTED_WITH, TOKENS_KEY, token_versions
from fusedrl.vllm.update import Update, run_calls


def wrappers_in(policy: Any) -> list[Any]:
    """The parts of a policy that have a ``vllm.LLM`` as their ``model``, the same for all.

    Raises:
        TypeError: the engine cannot get weights through a channel.
        ValueError: the policy has several engines.
    """
    # Not imported: that takes seconds, and a policy with an engine has imported vLLM.
    engine_class = getattr(sys.modules.get("vllm.entrypoints.llm"), "LLM", ())
    wrappers = []
    for part in policy.modules() if isinstance(policy, nn.Module) else [policy]:
        if engine_kind(part) in ("async_vllm", "ray_actor"):
            raise TypeError(
                "policy: expected a vLLMWrapper of a vllm.LLM for weights from a channel, got "
                f"one of {type(part.model).__name__}, whose engines run in Ray's actors and are "
                "started for NCCL; make the LLM in the process of its collector, with "
                "weight_transfer_config=WeightTransferConfig(backend='fusedrl')"
            )
        if isinstance(getattr(part, "model", None), engine_class):
            wrappers.append(part)
    if any(wrapper.model is not wrappers[0].model for wrapper in wrappers):
        raise ValueError(
            "policy: expected one vLLM engine, whose weights a channel has, got several; use one "
            "collector for each"
        )
    return wrappers


_FOLLOWERS: weakref.WeakSet[EngineFollower] = weakref.WeakSet()


class EngineFollower(Follower):
    """Keeps a policy's ``vllm.LLM`` at the newest version, which changes only between calls.

    Meanwhile torchrl's wrappers report the version of each token if vLLM does (from 0.32 on). The
    weights that the engine started with are version 0. The engine opens the channel itself, by its
    ``handle``; the ``reader`` shows what is published.

    Raises:
        ValueError: the engine was started without the backend, has another follower, or its model
            has other weights than the channel.
    """

    def __init__(self, handle: WeightHandle, reader: WeightReader, policy: Any) -> None:
        from vllm.outputs import CompletionOutput

        super().__init__(reader, policy)
        wrappers = wrappers_in(policy)
        self.engine = wrappers[0].model
        engine = engine_of(self.engine)
        self._update = Update(engine, handle, reader)
        if any(other.engine is self.engine for other in list(_FOLLOWERS)):
            raise ValueError(
                "policy: expected an engine that nothing else updates, got one that "
                "follows a channel already; shut down the other collector first"
            )
        try:
            run_calls(self._update.send())
        except Exception as error:  # another process does not preserve its class
            raise ValueError(
                f"channel: expected one that the policy's engine can read: {error}"
            ) from error
        # It may have a label from another channel, which means nothing in this one.
        run_calls(engine.ask(engine.set_label, STARTED_WITH))
        engine.loaded = None  # so that its version is loaded again, with its number
        has_versions = hasattr(CompletionOutput, "weight_versions")
        of_torchrl = (w for w in wrappers if has_versions and engine_kind(w) and w.generate)
        self._reports = [ReportedVersions(wrapper) for wrapper in of_torchrl]
        _FOLLOWERS.add(self)

    def _switch(self) -> None:
        newest, update = self.reader.version, self._update
        with update.engine.lock:
            # It may have been loaded by an update outside this follower.
            is_loaded = update.engine.loaded == (self.reader.session, newest)
            self.version = newest if is_loaded else run_calls(update.run(newest))

    def close(self, detach: bool = True) -> None:
        """Stop following the channel; the engine keeps its version."""
        while self._reports:
            self._reports.pop().remove()
        _FOLLOWERS.discard(self)


class ReportedVersions:
    """Makes torchrl's ``vLLMWrapper`` report the version of each token that it generates.

    The versions are int64 under ``"token_policy_version"``, in the form of the response's tokens:
    ragged, or padded with -1.
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._call = threading.local()  # the completions of this thread's call
        self._out_keys = list(wrapper.out_keys)
        wrapper.out_keys = [*self._out_keys, TOKENS_KEY]
        calls = (self._generate, self._report, self._report)
        for name, call in zip(VLLM_CALLS, calls, strict=True):
            setattr(wrapper, name, partial(call, getattr(wrapper, name)))

    def _generate(self, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the engine, and keep its completions."""
        requests = generate(*args, **kwargs)
        listed = requests if isinstance(requests, list) else [requests]
        self._call.completions = [made for request in listed for made in request.outputs]
        return requests

    @set_list_to_stack(True)
    def _report(self, made: Callable[..., TensorDictBase], *args: Any, **kwargs: Any) -> Any:
        """Add the versions to the tensordict that the wrapper makes of the completions."""
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
        for name in VLLM_CALLS:
            delattr(self._wrapper, name)
        self._wrapper.out_keys = self._out_keys
