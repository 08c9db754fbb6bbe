"""Weight updaters: how a collector's policy gets the trainer's weights."""

from fusedrl.weights.base import LocalWeightUpdaterBase, RemoteWeightUpdaterBase
from fusedrl.weights.ray_updater import RayRemoteWeightUpdater
from fusedrl.weights.updaters import MultiProcessedRemoteWeightUpdate, VanillaLocalWeightUpdater

__all__ = [
    "LocalWeightUpdaterBase",
    "MultiProcessedRemoteWeightUpdate",
    "RayRemoteWeightUpdater",
    "RemoteWeightUpdaterBase",
    "VanillaLocalWeightUpdater",
]
