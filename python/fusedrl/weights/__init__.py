"""Weight updaters: how a collector's policy gets the trainer's weights."""

from fusedrl.weights.base import LocalWeightUpdaterBase, RemoteWeightUpdaterBase
from fusedrl.weights.sync_scheme import ChannelWeightSyncScheme
from fusedrl.weights.updaters import (
    MultiProcessedRemoteWeightUpdate,
    RayRemoteWeightUpdater,
    VanillaLocalWeightUpdater,
)

__all__ = [
    "ChannelWeightSyncScheme",
    "LocalWeightUpdaterBase",
    "MultiProcessedRemoteWeightUpdate",
    "RayRemoteWeightUpdater",
    "RemoteWeightUpdaterBase",
    "VanillaLocalWeightUpdater",
]
