"""Makes the collector in a worker process, and has the functions that the trainer calls there."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fusedrl.collectors.llm_collector import LLMCollector
from fusedrl.collectors.process.worker_job import WorkerJob
from fusedrl.weights.follow import Attachment, follow_channel


def make_collector(job: WorkerJob) -> Any:
    """The collector of a job, whose models follow their channels."""
    if job.init_fn is not None:
        job.init_fn()
    policy = job.policy if job.policy_factory is None else job.policy_factory()
    scheme = job.schemes.get("policy")
    if scheme is not None:  # the collector calls the policy, which needs its weights by then
        scheme.init_on_receiver(model_id="policy", model=policy)
        scheme.connect()
    options = dict(job.options)
    dialogs = isinstance(job.collector_class, type) and issubclass(
        job.collector_class, LLMCollector
    )
    if dialogs and job.channel is not None:
        options |= {"channel": job.channel, "channel_mode": job.channel_mode}
    collector = job.collector_class(job.env, policy=policy, **options)
    for name, hook in job.hooks.items():
        setattr(collector, name, hook)
    if job.schemes:
        collector.register_scheme_receiver(job.schemes)
    if job.channel is not None and not dialogs:
        mode: Any = job.channel_mode
        follower, _ = follow_channel(job.channel, collector.policy, mode)
        Attachment(collector, follower, is_policy=True)
    return collector


# The functions that the trainer calls, with the collector as the first argument.


def uses_buffers(collector: Any) -> bool | None:
    """Whether torchrl's collector gathers frames in one preallocated tensordict."""
    return getattr(collector, "_use_buffers", None)


def set_seed(collector: Any, seed: int, static_seed: bool) -> Any:
    """Seed the environment, torch and numpy, and reset; returns the last seed."""
    last = collector.set_seed(seed, static_seed=static_seed)
    torch.manual_seed(seed)
    np.random.seed(seed)
    collector.reset()
    return last


def state_dict(collector: Any) -> Any:
    """The collector's state, with tensors on the CPU."""
    return tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, collector.state_dict())


def load_state_dict(collector: Any, state: Any, strict: bool) -> None:
    """Restore the collector's state, with the policy's weights if it is ``strict``."""
    collector.load_state_dict(state, strict=strict)


def getattr_policy(collector: Any, name: str) -> Any:
    """An attribute of the policy."""
    return getattr(collector.policy, name)


def getattr_env(collector: Any, name: str) -> Any:
    """An attribute of the environment."""
    return getattr(collector.env, name)


def profile(collector: Any) -> Any:
    """The time profile of the collector.

    Raises:
        RuntimeError: the collector does not measure its time.
    """
    if not hasattr(collector, "profile"):
        raise RuntimeError(
            f"profile: expected fusedrl.LLMCollector in the worker, got "
            f"{type(collector).__name__}; enable_profile() records what torch does"
        )
    return collector.profile()
