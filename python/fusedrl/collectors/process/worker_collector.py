"""What makes the collector in a worker process, and functions that the trainer calls there."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor, nn

from fusedrl.collectors.process.options import AsyncOptions
from fusedrl.compat.torch import map_leaves
from fusedrl.weights.follow import Attachment, follow_channel


class Job:
    """A function that makes the collector, which the worker unpacks where it can report errors.

    Tensors that a channel has ``brought`` by then arrive on the meta device.
    """

    def __init__(self, make: Callable[[], Any], brought: Iterable[Tensor] = ()) -> None:
        self._make: Callable[[], Any] | None = make
        self._brought = {id(tensor): tensor for tensor in brought}
        self._data = b""

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the function, while the process is started and locks can be pickled too."""
        file = io.BytesIO()
        _Pickler(file, self._brought).dump(self._make)
        return {"_make": None, "_brought": {}, "_data": file.getvalue()}

    def __call__(self) -> Any:
        """Make the collector; a forked process calls the trainer's own function."""
        make = pickle.loads(self._data) if self._make is None else self._make
        return make()


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO, brought: dict[int, Tensor]) -> None:
        super().__init__(file)
        self._brought = brought

    def reducer_override(self, obj: Any) -> Any:
        if id(obj) in self._brought:
            return _empty, (obj.shape, obj.dtype, isinstance(obj, nn.Parameter))
        return super().reducer_override(obj)  # pyright: ignore[reportAttributeAccessIssue]


def _empty(shape: torch.Size, dtype: torch.dtype, is_parameter: bool) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype, device="meta")
    return nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor


def make_collector(
    options: AsyncOptions, arguments: dict[str, Any], schemes: dict[str, Any]
) -> Any:
    """A collector whose models follow their channels.

    The weights of the policy may lie on the meta device until their scheme brings them.

    Args:
        options: the arguments that the worker got.
        arguments: those for the constructor of the collector.
        schemes: the schemes that bring weights, by the names of their models.
    """
    torch.set_num_threads(options.num_sub_threads)
    if options.init_fn is not None:
        options.init_fn()
    policy = options.policy if options.policy_factory is None else options.policy_factory()
    scheme = schemes.get("policy")
    if scheme is not None:  # the collector calls the policy, which needs its weights by then
        scheme.init_on_receiver(model_id="policy", model=policy)
        scheme.connect()
    collector = options.kind(options.env, policy=policy, **arguments)
    collector.pre_collect_hook = options.pre_collect_hook
    collector.post_collect_hook = options.post_collect_hook
    if schemes:
        collector.register_scheme_receiver(schemes)
    if options.channel is not None:
        follower, _ = follow_channel(options.channel, collector.policy, options.channel_mode)
        Attachment(collector, follower, is_policy=True)
    return collector


# The functions that the trainer calls, with the collector as the first argument.


def set_seed(collector: Any, seed: int, static_seed: bool) -> Any:
    """Seed the environment, torch and numpy, and reset; returns the last seed."""
    last = collector.set_seed(seed, static_seed=static_seed)
    torch.manual_seed(seed)
    np.random.seed(seed)
    collector.reset()
    return last


def state_dict(collector: Any) -> Any:
    """The collector's state, with tensors on the CPU."""
    return map_leaves(lambda x: x.cpu() if isinstance(x, Tensor) else x, collector.state_dict())


def getattr_of(collector: Any, part: str, name: str) -> Any:
    """An attribute of a part of the collector."""
    return getattr(getattr(collector, part), name)


def profile(collector: Any) -> Any:
    """The time profile of the collector, if it measures its time."""
    if not hasattr(collector, "profile"):
        raise RuntimeError(
            f"profile: expected fusedrl.LLMCollector in the worker, got "
            f"{type(collector).__name__}; enable_profile() records what torch does"
        )
    return collector.profile()
