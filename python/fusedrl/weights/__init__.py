"""Weight updaters: how a collector's policy gets the trainer's weights."""

from fusedrl.weights.sync_scheme import ChannelWeightSyncScheme
from fusedrl.weights.updaters import (
    LocalWeightUpdaterBase,
    MultiProcessedRemoteWeightUpdate,
    RayRemoteWeightUpdater,
    RemoteWeightUpdaterBase,
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
