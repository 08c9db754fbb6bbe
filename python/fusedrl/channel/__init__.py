"""The weight channel: complete, numbered versions of a model's weights, shared without a copy."""

from fusedrl.channel.channel import ReaderInfo, WeightChannel, Writing
from fusedrl.channel.handle import WeightHandle
from fusedrl.channel.reader import Lease, WeightReader

__all__ = ["Lease", "ReaderInfo", "WeightChannel", "WeightHandle", "WeightReader", "Writing"]
