"""Patch that replaces torchrl's classes with the fused ones in a whole program."""

from __future__ import annotations

from collections.abc import Iterable

import fusedrl
from fusedrl.patching import Replacement, Report, chosen_of, replace

_KL = "torchrl.envs.llm.transforms.kl"

# public name -> the torchrl module that defines it
HOMES = {
    "KLComputation": _KL,
    "RetrieveLogProb": _KL,
    "RetrieveKL": _KL,
    "KLRewardTransform": _KL,
    "RayRetrieveKL": _KL,
    "RayKLRewardTransform": _KL,
    "PolicyVersion": "torchrl.envs.llm.transforms.policy_version",
    "GRPOLoss": "torchrl.objectives.llm.grpo",
    "CISPOLoss": "torchrl.objectives.llm.grpo",
    "DAPO": "torchrl.objectives.llm.grpo",
    "SFTLoss": "torchrl.objectives.llm.sft",
    "DistillationLoss": "torchrl.objectives.llm.distillation",
    "LLMCollector": "torchrl.collectors.llm.base",
    "AsyncCollector": "torchrl.collectors._single_async",
    "RayLLMCollector": "torchrl.collectors.llm.ray_collector",
}

# Names of earlier torchrl releases -> the modules that exported them.
_UPDATERS = ("torchrl.collectors.weight_update", "torchrl.collectors")
FORMER = {
    "LocalWeightUpdaterBase": _UPDATERS,
    "RemoteWeightUpdaterBase": _UPDATERS,
    "VanillaLocalWeightUpdater": _UPDATERS,
    "MultiProcessedRemoteWeightUpdate": _UPDATERS,
    "RayRemoteWeightUpdater": _UPDATERS,
    "aSyncDataCollector": ("torchrl.collectors._single_async", "torchrl.collectors"),
}


def patch_torchrl(names: Iterable[str] | None = None) -> Report:
    """Replace torchrl's classes with the fused ones in all modules of torchrl.

    Afterwards, importing a class from torchrl gives the fused one: in your code, in torchrl, and in
    configurations that name a class by its path. This includes modules of torchrl that are imported
    later. Names that torchrl has removed since an earlier release are restored.

    The patch does not affect names that your modules imported before (listed in ``report.held``),
    existing instances, and existing subclasses of torchrl's classes. A worker process with a new
    interpreter must call this function too. Patching twice is safe: the first report reverts.

    Args:
        names: the classes to replace; by default all.

    Returns:
        A report that lists the replacements. ``revert()`` undoes the patch, also at the end of a
        ``with`` block.

    Raises:
        TypeError: ``names`` is a single string.
        ValueError: a name is unknown; nothing is changed.

    Example:
        >>> import fusedrl, torchrl.envs.llm
        >>> with fusedrl.patch_torchrl(["KLComputation"]) as report:
        ...     torchrl.envs.llm.KLComputation is fusedrl.KLComputation
        True
        >>> torchrl.envs.llm.KLComputation is fusedrl.KLComputation
        False
    """
    known = (*HOMES, *FORMER)
    chosen = chosen_of(names, known)
    # Import all fused classes first, since they are subclasses of torchrl's.
    fused = {name: getattr(fusedrl, name) for name in known}
    return replace(
        "torchrl",
        [
            Replacement(HOMES[name], name, fused[name])
            if name in HOMES
            else Replacement(FORMER[name][0], name, fused[name], add_to=FORMER[name])
            for name in chosen
        ],
    )
