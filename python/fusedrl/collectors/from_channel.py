"""The weights of a collector's policy, out of a weight channel."""

from __future__ import annotations

from typing import Any

from torch import nn

from fusedrl.channel import WeightHandle, WeightReader
from fusedrl.channel.sources import module_slots


class FromChannel:
    """Gives a policy the newest version of a channel.

    Args:
        channel: a handle, which is opened and closed here, or a reader.
        policy: the module that the channel has the weights of, or what has it as its ``model``.
        mode: ``"alias"`` or ``"copy"``, as of :meth:`WeightReader.load_into`.

    Raises:
        ValueError: neither has the names of the channel.
    """

    def __init__(self, channel: WeightHandle | WeightReader, policy: Any, mode: str) -> None:
        self._opened = isinstance(channel, WeightHandle)
        self.reader = channel.open() if isinstance(channel, WeightHandle) else channel
        self.mode = mode
        self.loaded: int | None = None
        self.closed = False
        try:
            self.module = self._module(policy)
        except ValueError:
            self.close()
            raise

    def _module(self, policy: Any) -> nn.Module:
        names = {entry.name for entry in self.reader.layout.entries}
        for module in (getattr(policy, "model", None), policy):
            if isinstance(module, nn.Module) and names <= {s.name for s in module_slots(module)}:
                return module
        raise ValueError(
            f"channel: expected weights of {type(policy).__name__} or of its model, got "
            f"{min(names)}, ...; create the channel from the model that the policy wraps"
        )

    @property
    def newest(self) -> int | None:
        """The newest version that is published: what the next call of the policy has."""
        return self.loaded if self.closed else self.reader.version

    def take(self) -> int | None:
        """Load what is newest, if it is not loaded; returns the version that is.

        Before the first version, ``None``, the policy keeps the weights that it has.
        """
        if self.reader.version != self.loaded:
            self.loaded = self.reader.load_into(self.module, self.mode)
        return self.loaded

    def close(self) -> None:
        """Close the reader if it was opened here; the policy keeps its weights."""
        self.closed = True
        if self._opened:
            self.reader.close()
