"""Access to private attributes of torchrl's ``AsyncEnvPool``, and a check of its environments."""

from __future__ import annotations

from concurrent.futures import wait
from typing import Any

from tensordict import TensorDictBase
from torchrl.envs import AsyncEnvPool

# The attributes with a thread pool's running futures, each with that of their number.
_UNDER_WAY = (
    ("_step_and_maybe_reset_futures", "_current_step_reset"),
    ("_reset_futures", "_current_reset"),
)


def check_pool(pool: AsyncEnvPool) -> None:
    """Raise ``ValueError`` for environments of several rows.

    torchrl 0.14.1 looks up the environment of a tensordict in the flattened list of indices, in
    which an environment of several rows has several: it steps some twice and others never.
    """
    sizes = [tuple(size) for size in pool.env_batch_sizes if size.numel() > 1]
    if sizes:
        raise ValueError(
            f"env: expected a pool of environments with one dialog each, got one with batch_size="
            f"{sizes[0]}; make it AsyncEnvPool([make_env] * n) with an environment for each dialog"
        )


def env_indices(carried: TensorDictBase, pool: Any) -> list[int]:
    """The index of the environment of each row."""
    indices = carried.get(pool._env_idx_key).tolist()
    return [_first(index) for index in (indices if isinstance(indices, list) else [indices])]


def _first(nested: Any) -> Any:
    while isinstance(nested, list):
        nested = nested[0]
    return nested


def forget_all(pool: Any) -> bool:
    """Wait for a pool's running steps, and forget their results and errors.

    torchrl's pool of threads keeps a step that has failed, and would raise its error for ever.

    Returns:
        Whether the environments can be reset; those of a pool of processes that failed cannot.
    """
    if not hasattr(pool, "_step_and_maybe_reset_futures"):
        return False
    for futures, count in _UNDER_WAY:
        wait(getattr(pool, futures))
        setattr(pool, futures, [])
        setattr(pool, count, 0)
    pool._busy.clear()
    return True
