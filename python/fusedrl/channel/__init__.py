"""The weight channel: complete, numbered versions of a model's weights, shared without a copy."""

from fusedrl.channel.channel import ReaderInfo, WeightChannel, Writing
from fusedrl.channel.follow import Follower
from fusedrl.channel.reader import Lease, WeightHandle, WeightReader

__all__ = [
    "Follower",
    "Lease",
    "ReaderInfo",
    "WeightChannel",
    "WeightHandle",
    "WeightReader",
    "Writing",
]
