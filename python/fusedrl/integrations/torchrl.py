"""The patch that replaces torchrl's classes by the fused ones in a whole program."""

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

# Names that torchrl had in an earlier release -> the modules that exported them.
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
    """Put the fused classes in the place of torchrl's own, wherever torchrl's modules hold them.

    From then on, code that takes a class from torchrl gets the fused one. This holds for your code,
    for torchrl's own, and for a configuration that names a class by its path. It also holds for
    modules of torchrl that are imported later. Names that torchrl had in an earlier release are
    added again.

    The patch does not reach names that your modules imported before (``report.held`` lists them),
    instances that exist already, and classes that derive from torchrl's. A worker process that
    starts a new interpreter has to patch by itself. Patching twice is safe: a name is replaced
    once, and only the report that replaced it puts it back.

    Args:
        names: the classes to replace; by default all that are known.

    Returns:
        A report of what was replaced, and where. It can be printed and iterated, and ``revert()``
        undoes the patch. As a context manager it reverts at the end of the block.

    Raises:
        TypeError: ``names`` is a single string.
        ValueError: a name is unknown. Nothing is changed then.

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
    # All fused classes are imported before torchrl's are replaced, because they derive from those.
    ours = {name: getattr(fusedrl, name) for name in known}
    return replace(
        "torchrl",
        [
            Replacement(HOMES[name], name, ours[name])
            if name in HOMES
            else Replacement(FORMER[name][0], name, ours[name], add_to=FORMER[name])
            for name in chosen
        ],
    )
